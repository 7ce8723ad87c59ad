"""The probe in real jobs of two processes on gloo: attached without a line of user code, and never in the way.

The job is ``probe_ranks.py``.
"""

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.envs.nccl.agreement.protocol import ABORT
from dynamiccl.envs.nccl.agreement.protocol import Decision as RoundDecision
from dynamiccl.envs.nccl.agreement.store import RoundStore
from dynamiccl.envs.nccl.plugin.build import compiler, job_env
from dynamiccl.envs.nccl.probe.connection import StoreConnections, _takes_connections
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import (
    STATE,
    STATE_DTYPE,
    STEP,
    STEP_DTYPE,
    AgreementState,
    Decision,
    Rule,
    Table,
)
from paths import HELPERS
from probe_ranks import LOOPS, STEPS

JOB = HELPERS / "probe_ranks.py"

# -- launching it ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(args: list[str], n: int, env: dict[str, str]) -> list[subprocess.Popen]:
    """``n`` ranks of the job (or of one process outside torch.distributed for n = 1)."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **env}
    processes = []
    for rank in range(n):
        world = {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank)} if n > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(JOB), *args],
                env=base | world,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def table(generation: int) -> Table:
    return Table(
        generation, (Rule(0, 0, "all_gather", 0, 2**30, Decision("ring", "ll", 1 + generation % 63)),)
    )


def finish(processes: list[subprocess.Popen], run: RunFolder | None = None) -> tuple[list[dict], list[str]]:
    """Publishes a table every few milliseconds until the job ends; what the ranks printed, and their errors."""
    generation = run.table.read()[0] if run and run.table.read() else 0
    end = time.monotonic() + 120
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if run:
            generation += 1
            run.table.publish(table(generation))
        time.sleep(0.02)
    out = [p.communicate(timeout=180) for p in processes]
    return [json.loads(o.splitlines()[-1]) for o, _ in out if o.strip()], [e for _, e in out]


@pytest.fixture
def run():
    folder = RunFolder.create()
    yield folder
    folder.close()


def steps_of(run: RunFolder) -> dict[int, np.ndarray]:
    """STEP records by rank."""
    found = {}
    for ring in run.rings():
        records = ring.drain()
        steps = records[records["kind"] == STEP].view(STEP_DTYPE)
        assert ring.lost == 0
        if len(steps):
            found[int(steps["rank"][-1])] = steps
    return found


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def framework_jobs():
    """All loops in one job with the probe, tables changing all the time, and the same job alone."""
    names = list(LOOPS)
    alone, errors = finish(start(names, 2, {}))
    assert len(alone) == 2, errors
    folder = RunFolder.create()
    env = {**job_env(folder.path), "JITTER_S": "0.02"}
    attached, errors = finish(start(names, 2, env), folder)
    assert len(attached) == 2, errors
    yield alone, attached, errors, steps_of(folder)
    folder.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LOOPS))
def test_ranks_switch_at_the_same_step_and_losses_stay(framework_jobs, name):
    alone, attached, _, _ = framework_jobs
    by_rank = {said["rank"]: said for said in attached}
    assert by_rank[0]["generations"][name] == by_rank[1]["generations"][name]
    for before, after in zip(alone, attached, strict=True):
        assert before["losses"][name] == after["losses"][name], "not bit-equal"


@pytest.mark.slow
def test_tables_do_change_and_steps_are_recorded(framework_jobs):
    _, attached, errors, steps = framework_jobs
    seen = [g for name in LOOPS for g in attached[0]["generations"][name]]
    assert len(set(seen)) > 10
    assert set(steps) == {0, 1}
    for mine in steps.values():
        # A loop loses the steps until its optimizer has taken the place of the one before; one fails every third time,
        # and one has a second optimizer that steps every other time.
        expected = sum(STEPS - 2 for name in LOOPS)
        assert abs(len(mine) - expected) <= 2 * len(LOOPS)
        assert np.array_equal(mine["step"], np.arange(len(mine)))
        assert (mine["duration_ns"] > 0).all()
    assert len(steps[0]) == len(steps[1])
    assert not any("dynamiccl" in error for error in errors), errors


def wait_for_steps(run: RunFolder, n: int) -> None:
    """Until every rank has ended ``n`` more steps."""
    count: dict[int, int] = {}
    # It ends a hang and claims no speed: at a load of 20 on two cores four steps took 43 s.
    end = time.monotonic() + 180
    while (len(count) < 2 or min(count.values()) < n) and time.monotonic() < end:
        time.sleep(0.02)
        for rank, steps in steps_of(run).items():
            count[rank] = count.get(rank, 0) + len(steps)
    assert len(count) == 2, f"the job did not get going: steps by rank {count}"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_does_not_leave_the_other_hanging(run, victim):
    processes = start(["plain"], 2, {**job_env(run.path), "JITTER_S": "0.2"})
    wait_for_steps(run, 3)
    processes[victim].send_signal(signal.SIGKILL)
    started = time.monotonic()
    out, error = processes[1 - victim].communicate(timeout=30)
    assert time.monotonic() - started < 15
    assert processes[1 - victim].returncode == 1 and not out  # gloo's own error ended it, as without us
    assert "Traceback" in error and "dynamiccl/envs" not in error.split("Traceback")[-1]
    processes[victim].communicate()


def test_a_store_that_takes_no_connection_is_known_at_once():
    """Before: PyTorch's client tried for half an hour, on the training thread, without descriptors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        _takes_connections("127.0.0.1", port)  # it waits for what we say

        def take_and_drop():  # what the store's server does with a connection for which it has no descriptor
            for _ in range(2):
                server.accept()[0].close()

        thread = threading.Thread(target=take_and_drop)
        thread.start()
        with pytest.raises(ConnectionError):
            for _ in range(2):
                _takes_connections("127.0.0.1", port)
        thread.join()
    with pytest.raises(ConnectionError):
        _takes_connections("127.0.0.1", port)


def test_a_connection_whose_other_end_is_gone_is_asked_nothing(capfd):
    """Before: PyTorch wrote 20 lines of a C++ stack into the job's output."""
    from torch.distributed import PrefixStore, TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs_own = TCPStore("127.0.0.1", server.port)
    c10d = SimpleNamespace(_get_default_store=lambda: PrefixStore("job", jobs_own), PrefixStore=PrefixStore)
    make = StoreConnections(c10d)
    store = RoundStore(make, 0, 1)
    store.connect()
    assert store.now() == (False, 0) and not store.has_news()
    del server
    gc.collect()
    for asks in (store.now, store.has_news, store.says_news):
        with pytest.raises(ConnectionAbortedError, match="store is gone"):
            asks()
    with pytest.raises(ConnectionRefusedError):
        make()
    store.closing = True
    assert store.settle(1, RoundDecision(7, {})) is ABORT  # at once: the job closes
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "fsdp2"]
)  # the store ends with the process group, or with rank 0's process
def test_a_job_whose_rank_0_hosts_the_store_ends_without_a_word_of_it(run, name):
    """As of ``torch.multiprocessing.spawn``, or of ``srun`` without torchrun. Before: 20 lines of PyTorch's on the
    ranks that ended later, or one of ours that tells to look at the network."""
    env = {**job_env(run.path), "JITTER_S": "0.05", "STAYS_S": "3", "STEPS": "40"}
    said, errors = finish(start([name], 2, env), run)
    assert len(said) == 2 and errors == ["", ""]
    assert name == "fsdp2" or len(set(said[1]["generations"][name])) > 2


@pytest.mark.slow
def test_a_communicator_with_a_rank_whose_nccl_took_no_tuner_gets_no_table(run):
    """Seen with NCCL 2.28.9: tables switched all the same, and 728 of 6,000 collectives ran two ways.

    Seen at 679c0ae, one rank's NCCL took no tuner: exit 0; 360 of 3,500 collectives ran two ways (728 of 6,000 with the
    real NCCL 2.28.9: review).
    """
    env = {**job_env(run.path), "DYNAMICCL_ATTACH_S": "1.5", "JITTER_S": "0.6", "NO_TUNER": "1"}
    said, errors = finish(start(["plain"], 2, env), run)
    assert [set(s["generations"]["plain"]) for s in said] == [{0}, {0}], errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skips once", "one rank steps", "probe breaks"])
def test_steps_decide_about_no_rank_s_tables(run, name):
    """A step left out, a rank without an optimizer, a probe that breaks: tables change on, alike on both ranks.

    Before: each of them ended the agreement for good, or kept it from beginning.
    """
    env = {**job_env(run.path), "VICTIM": "1", "JITTER_S": "0.05", "STEPS": "60", "DYNAMICCL_ATTACH_S": "1.5"}
    said, errors = finish(start([name], 2, env), run)
    first, second = (s["generations"][name] for s in said)
    assert first == second, errors
    if name != "one rank steps":  # who never steps does not load the plugin before its first backward pass
        assert len(set(first)) > 2, errors
    assert not any("Traceback" in error for error in errors), errors


def agreement_states(run: RunFolder) -> list[tuple[AgreementState, str]]:
    """What rank 0's agreement has told the daemon."""
    records = [record for ring in run.rings() for record in ring.drain() if record["kind"] == STATE]
    told = [np.array([record]).view(STATE_DTYPE)[0] for record in records]
    return [(AgreementState(int(record["code"])), record["text"].decode()) for record in told]


@pytest.mark.slow
def test_damaged_files_and_a_dead_daemon_change_nothing(run):
    """One job lives through noise, truncation, a half-written table, a table of another version and no folder."""
    processes = start(["plain"], 2, {**job_env(run.path), "JITTER_S": "0.4"})
    run.table.publish(table(5))
    wait_for_steps(run, 3)
    path = run.path / "table"
    sound = path.read_bytes()
    noise = random.Random(1).randbytes(4096)
    for content in (noise, sound[:100], sound[:24] + b"\7" + sound[25:], sound[:8] + b"\2" + sound[9:], b""):
        path.write_bytes(content)
        with path.open("r+b") as file:  # so that the probe looks at it
            file.seek(24)
            file.write(bytes([content[24] & 1 if len(content) > 24 else 0, 9]))
        wait_for_steps(run, 1)
    run.close(remove=True)
    said, errors = finish(processes)
    assert [s["generations"]["plain"][-1] for s in said] == [6, 6], errors
    assert not any("Traceback" in error for error in errors)


def test_a_job_whose_run_is_not_set_is_untouched():
    """Nothing of ours is imported, and nothing hangs on the optimizers."""
    program = """
import sys, torch
from torch.optim.optimizer import _global_optimizer_post_hooks
ours = [m for m in sys.modules if m.startswith("dynamiccl.")]
assert not ours, ours
assert not _global_optimizer_post_hooks
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


@pytest.mark.slow
def test_import_torch_survives_a_broken_probe(tmp_path):
    """Whatever is wrong on our side, `import torch` and the steps after it work."""
    program = """
import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
    broken = {
        "DYNAMICCL_RUN": str(tmp_path / "none"),
        "DYNAMICCL_PLUGIN": "/nowhere/plugin.so",
        "DYNAMICCL_CLUSTER": "no such cluster",
    }
    for name, value in broken.items():
        env = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")}
        env |= {"DYNAMICCL_RUN": str(tmp_path), name: value}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout == "trained\n"
        assert "Traceback" not in done.stderr and done.stderr.count("dynamiccl:") <= 1


LOADED = """
import ctypes, os, sys
from types import SimpleNamespace
from dynamiccl.envs.nccl.probe.probe import _nccl
built_with = SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 27, 3))))
before = _nccl(built_with)
ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)
print(before, _nccl(built_with))
"""


def test_the_nccl_that_is_named_is_the_one_that_is_loaded(tmp_path):
    """PyTorch names the release that it was built with. Seen with 2.8.0 and NCCL 2.28.9 in place of its own: 2.27.3."""
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int* number) { *number = 22809; return 0; }")
    command = [*compiler(), "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    said = subprocess.check_output([sys.executable, "-c", LOADED, str(library)], text=True)
    assert said.split() == ["2.27.3", "2.28.9"]
