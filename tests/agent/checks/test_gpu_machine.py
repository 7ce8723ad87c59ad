"""Where ``gpu-check`` runs: visible GPUs, MPS, and a machine with a GPU but without a registry."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from dynamiccl.agent.checks.gpu import mps as mps_module
from dynamiccl.agent.checks.gpu.machine import Machine, placement
from dynamiccl.agent.checks.gpu.mps import Mps
from dynamiccl.agent.checks.sweep.manifest import network
from dynamiccl.envs.nccl.steps.nvml import Gpu, visible
from paths import TOOLS

ENV = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")} | {"OMP_NUM_THREADS": "1"}

GPUS = [Gpu(0, "H100", "GPU-aa"), Gpu(1, "H100", "GPU-ab"), Gpu(2, "H200", "GPU-b")]


@pytest.mark.parametrize(
    ("named", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("GPU-b", [2]),
        ("-1", []),
        (" 1 , GPU-aa", [1, 0]),
    ],
)
def test_cuda_visible_devices_is_respected(named, left):
    """As CUDA reads it: a name that fits no GPU ends the list."""
    assert [gpu.index for gpu in visible(GPUS, named)] == left


def test_ranks_that_share_a_gpu_are_told_how():
    assert placement(8, (2, 29, 7)) == "apart"
    assert placement(1, (2, 29, 7)) == "hosts" and placement(1, (2, 30, 3)) == "shared"
    machines = {way: Machine("a GPU", 2, way, "2.29.7") for way in ("apart", "hosts", "shared")}
    assert machines["hosts"].env()["NCCL_SOCKET_IFNAME"] == "lo"
    assert machines["shared"].env()["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert not any("CHANNELS" in name or "CTAS" in name for one in machines.values() for name in one.env())
    says = (
        'import os; os.write(1, f\'{os.environ.get("NCCL_HOSTID")} {os.environ["LOCAL_RANK"]}\\n\'.encode())'
    )
    command = machines["hosts"].ranks([sys.executable, "-c", says])  # in one piece: ranks share the output
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100)
    assert sorted(done.stdout.splitlines()) == ["rank-0 0", "rank-1 1"], done.stderr


def test_the_release_is_the_loaded_librarys_own_answer(tmp_path, monkeypatch):
    """Before: a library on LD_PRELOAD under a name without numbers was noted as the release of the package."""
    source = "int ncclGetVersion(int *version) { *version = 23007; return 0; }"
    library = tmp_path / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    says = "from dynamiccl.agent.checks.sweep.rank import nccl_version; print(nccl_version())"
    env = ENV | {"LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", says], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "2.30.7", done.stderr


FAKE_MPS = """#!{python}
import os, signal, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
log = open({log!r}, "a", buffering=1)
if "-f" in sys.argv:
    log.write(f"started in {{folder}}\\n")
    open(os.path.join(folder, "control"), "w").close()
    time.sleep(60)
log.write(f"told {{sys.stdin.read().strip()}} in {{folder}}\\n")
"""


#: A client that finds the pipe of the stand-in.
CLIENT = "import os; open(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/control')"


@pytest.fixture
def mps_log(tmp_path, monkeypatch):
    """MPS is installed, and clients can use it; returns the file of what it is told."""
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(FAKE_MPS.format(python=sys.executable, log=str(log)))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setattr(mps_module, "_CLIENT", CLIENT)
    return log


def test_mps_is_started_in_a_folder_of_its_own_and_stopped(tmp_path, mps_log):
    log = mps_log
    mps = Mps(2)
    folder = mps.env["CUDA_MPS_PIPE_DIRECTORY"]
    assert mps.state == "own" and mps.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    mps.stop()
    assert log.read_text().splitlines() == [f"started in {folder}", f"told quit in {folder}"]
    assert not Path(folder).exists()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "control").touch()
    theirs = Mps(4)
    assert theirs.env == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"} and "ran before" in theirs.state
    theirs.stop()
    assert len(log.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ("import sys; sys.exit('CUDA error 805')", "CUDA error 805"),
        ("import time; time.sleep(60)", "it hangs for 0 s"),
        ("import ctypes; ctypes.CDLL('no-such-library.so')", "OSError: no-such-library.so: cannot open"),
    ],
)
def test_mps_is_left_where_no_client_can_use_it(mps_log, monkeypatch, client, why):
    """Before: it was used once its pipe was there, and if no rank could connect nearly nothing was measured."""
    monkeypatch.setattr(mps_module, "_CLIENT", client)
    if "hangs" in why:
        monkeypatch.setattr(mps_module, "_CLIENT_S", 0.2)
    mps = Mps(4)
    assert mps.env == {} and mps.state.startswith(f"none: no client can use it ({why}")
    assert mps_log.read_text().splitlines()[-1].startswith("told quit in ")
    mps.stop()


def test_the_network_is_named_by_its_class_alone(tmp_path):
    assert network(tmp_path) == "ethernet"
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "mlx5_0" / "ports" / "1" / "link_layer").write_text("Ethernet\n")
    assert network(tmp_path) == "roce"
    (tmp_path / "mlx5_0" / "ports" / "1" / "link_layer").write_text("InfiniBand\n")
    assert network(tmp_path) == "infiniband"


STUB = """#!/bin/sh
case "$*" in
*pip*) exit 0 ;;
*"--out"*) out=$(echo "$*" | sed 's/.*--out //; s/ .*//'); mkdir -p "$out/one" && echo row > "$out/one/rows.csv"
    echo "commit $DYNAMICCL_COMMIT $*"; case "$*" in *hang*) exec sleep 60 ;; *) exit 1 ;; esac ;;
esac
"""


@pytest.mark.parametrize("words", [["--races"], ["hang"]])
def test_the_script_for_a_machine_without_a_registry_leaves_rows_as_they_come(tmp_path, words):
    """Before: a call that was killed at its limit brought nothing home, since all was packed at the end."""
    python, out = tmp_path / "python3", tmp_path / "out"
    python.write_text(STUB)
    python.chmod(0o755)
    (tmp_path / "commit").write_text("0bb17c4babb9\n")
    env = ENV | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WHEELS": str(tmp_path), "OUT": str(out)}
    command = ["sh", str(TOOLS / "gpu_machine.sh"), "run", *words]
    running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if words == ["hang"]:
        end = time.monotonic() + 20
        while not (out / "results" / "one" / "rows.csv").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGKILL)
    said = running.communicate(timeout=60)[0]
    assert (out / "results" / "one" / "rows.csv").read_text() == "row\n"
    if words != ["hang"]:
        assert running.returncode == 1
        assert f"commit 0bb17c4babb9 -m dynamiccl.agent.cli lab gpu-check --out {out}/results --races" in said
        with tarfile.open(out / "gpu-check.tar.gz") as archive:
            assert "./one/rows.csv" in archive.getnames()
