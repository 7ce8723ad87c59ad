"""Each file in ``examples/`` runs, or is valid: shell, YAML and units whose commands and metrics exist."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dynamiccl.agent.daemon.launcher import _HURRIED_S
from dynamiccl.agent.report.outputs import claim
from dynamiccl.agent.report.runs import METRICS
from paths import DATA, ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted((EXAMPLES / "scripts").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TEXTS = [
    p for p in EXAMPLES.rglob("*") if p.is_file() and p.suffix != ".md" and p.parent.name != "__pycache__"
]


def short(path: Path) -> str:
    return path.relative_to(EXAMPLES).as_posix()


def options_of(command: str) -> set[str]:
    frozen = json.loads((DATA / "command_line.json").read_text())
    return {option for word in frozen[f"dynamiccl {command}"] for option in word.split("/")}


def test_the_page_names_every_file():
    page = (EXAMPLES / "README.md").read_text()
    assert [short(p) for p in TEXTS if f"({short(p)})" not in page] == []


@pytest.mark.parametrize("path", TEXTS, ids=short)
def test_every_command_of_ours_exists_with_its_options(path):
    """Lines that a shell, YAML or a unit breaks are read as one."""
    words = re.sub(r'\\\n|[\[\]",]', " ", path.read_text()).split()
    starts = [i for i, word in enumerate(words) if word.endswith("dynamiccl") and i + 1 < len(words)]
    found = 0
    for start in starts:
        command = words[start + 1]
        if f"dynamiccl {command}" not in json.loads((DATA / "command_line.json").read_text()):
            continue
        found += 1
        ours = words[start + 2 :]
        ours = ours[: ours.index("--")] if "--" in ours else ours[:6]
        asked = {word for word in ours if re.fullmatch(r"--[a-z-]{3,}", word)}
        if command in ("tune", "top"):
            assert asked <= options_of(command), command
    assert found or path.name in ("dynamiccl-metrics.timer", "admission.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=short)
def test_each_script_trains_under_the_tuner(script, tmp_path):
    """As its first lines say, on the emulated cluster."""
    pytest.importorskip("accelerate" if "accelerate" in script.name else "torch", reason="not installed")
    pytest.importorskip("deepspeed" if "deepspeed" in script.name else "torch", reason="not installed")
    out = tmp_path / "out"
    tune = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--cluster", "dgx-h100-2x8", "--no-memory"]
    tune += ["--all-reduce"] * ("ddp" in script.name)
    command = [*tune, "--out", str(out), "--", *TORCHRUN, str(script), "60"]
    # DeepSpeed builds an extension at its first use. A process killed meanwhile leaves a lock behind.
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "step 0: loss" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] >= 50
    assert summary["consistency"]["mismatches"] == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=short)
def test_scripts_stay_short(script):
    assert len(script.read_text().splitlines()) <= 40


@pytest.mark.parametrize("script", SCRIPTS, ids=short)
def test_each_rank_of_a_script_takes_its_own_gpu_first(script):
    """Before: FSDP2 takes the current device, so all ranks of a node went to GPU 0."""
    text = script.read_text()
    if "dist.init_process_group(" in text:  # the other frameworks set the device themselves
        assert 0 < text.find("torch.cuda.set_device(device)") < text.index("dist.init_process_group(")


def test_the_batch_script_is_valid_shell_with_options_of_sbatch():
    script = EXAMPLES / "slurm" / "two_nodes.sbatch"
    assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0
    options = re.findall(r"^#SBATCH --([a-z-]+)=\S+$", script.read_text(), re.M)
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "signal", "output"}
    assert set(options) == known


@pytest.mark.parametrize(
    "name", ["slurm/two_nodes.sbatch", "kubernetes/jobset.yaml", "kubernetes/pytorchjob.yaml"]
)
def test_a_template_has_the_cap_the_switch_and_never_costs_a_job(name):
    words = re.sub(r'[",\s]+', " ", (EXAMPLES / name).read_text())
    assert " --or-untuned --budget 0.01 --search-slots 1:/" in words and "/etc/dynamiccl" in words


def test_the_signal_of_the_batch_script_leaves_time_for_a_checkpoint():
    """Before: SIGUSR1 ended torchrun at once, and the ranks heard nothing."""
    text = (EXAMPLES / "slurm" / "two_nodes.sbatch").read_text()
    numbers = r"--signal=TERM@(\d+)$.*SHUTDOWN_TIMEOUT=(\d+)$.*--kill-after (\d+) -- \\$.*torchrun"
    warned_s, waits_s, kills_s = map(int, re.search(numbers, text, re.M | re.S).groups())
    assert 30 < waits_s < kills_s < warned_s - _HURRIED_S


NAMES_THE_WAIT = ["examples/slurm/two_nodes.sbatch", "examples/kubernetes/jobset.yaml"]
NAMES_THE_WAIT += ["examples/kubernetes/pytorchjob.yaml", "OPERATING.md"]


@pytest.mark.parametrize("page", NAMES_THE_WAIT)
def test_a_page_that_sets_torchruns_wait_says_which_release_reads_it(page):
    """Before: PyTorch 2.8 to 2.11 ignored it, and killed the ranks after 30 s of a longer save."""
    lines = (EXAMPLES.parent / page).read_text("utf-8").splitlines()
    named = [number for number, line in enumerate(lines) if "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in line]
    assert named
    for number in named:
        around = " ".join(lines[max(0, number - 3) : number + 1])
        assert "PyTorch 2.12 or newer" in around


def test_the_batch_script_shows_the_run_that_tuned(tmp_path, monkeypatch):
    """Before: it asked for a folder that no run has, for all nodes at once, and hid the error."""
    monkeypatch.chdir(tmp_path)
    facts = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n",
    }
    for task in "01":
        for name, value in {**facts, "SLURM_PROCID": task}.items():
            monkeypatch.setenv(name, value)
        os.close(claim(None)[1])
    (tmp_path / "runs/tune/77.1/task-1/table.json").touch()
    (tmp_path / "venv/bin").mkdir(parents=True)
    stubs = 'srun() { :; }; scontrol() { echo node0; }; dynamiccl() { echo "$#" "$@"; }'
    (tmp_path / "venv/bin/activate").write_text(stubs)
    monkeypatch.setenv("HOME", str(tmp_path))
    script = ["bash", EXAMPLES / "slurm" / "two_nodes.sbatch"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2 show runs/tune/77.1/task-1\n"), done.stderr


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_a_manifest_has_what_the_tuner_needs(name):
    """A larger /dev/shm, time to end, the launcher first."""
    manifest = yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())
    assert manifest["apiVersion"] and manifest["kind"] and manifest["metadata"]["name"]
    pods = list(find(manifest, "containers"))
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        assert "dynamiccl tune" in " ".join([*container["command"], *container["args"]])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert set(mounts.values()) <= volumes.keys()
        # What admission.yaml asks for.
        (switch,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/etc/dynamiccl"]
        assert switch["readOnly"] and volumes[switch["name"]]["hostPath"]["path"] == "/etc/dynamiccl"
        # A cap on searches in a claim of the job's own would cap nothing.
        claims = [volumes[mounts[at]]["persistentVolumeClaim"] for at in ("/results", "/searches")]
        assert claims[0] != claims[1]
        told = {one["name"]: one.get("value") for one in container["env"]}
        waits_s = int(
            told["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
        )  # torchrun for its ranks; then the tuner sums up
        assert 30 < waits_s < pod["terminationGracePeriodSeconds"] - _HURRIED_S
        # A second start must not take the folder of the first: `tune` deletes what it finds in --out.
        (out,) = re.findall(r"--out (.+?) --", " ".join([*container["command"], *container["args"]]))
        unique = {"Never": "$(POD_NAME)", "OnFailure": "$(date "}
        restarts = pod.get("restartPolicy", "OnFailure")
        assert out.startswith("/results/") and unique[restarts] in out, restarts


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_a_manifest_counts_memory_as_the_page_does(name):
    """Before: 150 MiB, without what lies in /dev/shm. A limit of that size ends the container, and so the job."""
    (total,) = re.findall(r"= ([\d,]+ MiB)", (ROOT / "OPERATING.md").read_text())
    assert f"include {total}" in (EXAMPLES / "kubernetes" / name).read_text()


def find(tree, key):
    """All mappings below ``tree`` that have the key."""
    if isinstance(tree, dict):
        if key in tree:
            yield tree
        for value in tree.values():
            yield from find(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from find(value, key)


def test_alerts_speak_of_metrics_that_are_written():
    rules = yaml.safe_load((EXAMPLES / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    known = {name for name, _, _ in METRICS}
    asked = {name for rule in rules for name in re.findall(r"\bdynamiccl_\w+", rule["expr"])}
    assert {"dynamiccl_tuner_died", "dynamiccl_mismatches_total", "dynamiccl_lost_records_total"} <= asked
    for rule in rules:
        assert set(re.findall(r"\bdynamiccl_\w+", rule["expr"])) <= known
        assert rule["alert"] and rule["labels"]["severity"] and rule["annotations"]["description"]


def test_the_cost_of_a_search_is_compared_with_its_own_budget():
    """Before: with ten minutes, which are 0.7 % of a day and all of a short job. It ends with the tuner, as before."""
    rules = yaml.safe_load((EXAMPLES / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    (asked,) = (rule["expr"] for rule in rules if rule["alert"] == "DynamicclSearchCosts")
    sides = r"max by \(run\) \(dynamiccl_search_cost_seconds\) > max by \(run\) \(dynamiccl_search_budget_seconds\)"
    assert re.match(sides, asked) and asked.strip().endswith("(dynamiccl_tuner_up) == 1")


def test_a_mismatch_asks_for_a_look_at_the_job():
    """Before: "there is nothing to stop", of a job that may hang, and the next job began with the tuner."""
    rules = yaml.safe_load((EXAMPLES / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]
    (told,) = (r["annotations"]["description"] for r in rules if r["alert"] == "DynamicclRanksDisagree")
    wanted = ("still takes steps, and end it if not", "Keep the results folder", "/etc/dynamiccl/off")
    assert all(words in told for words in wanted) and "nothing to stop" not in told
    page = (ROOT / "OPERATING.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| ranks disagree"))
    assert "still takes steps" in row and "off switch" in row


def test_units_are_valid():
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    units = [str(p) for p in (EXAMPLES / "monitoring").glob("dynamiccl-metrics.*")]
    command = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_image_is_built_from_a_wheel_and_starts_the_launcher():
    text = (EXAMPLES / "docker" / "Dockerfile").read_text()
    instructions = re.findall(r"^([A-Z]+) ", text, re.M)
    assert set(instructions) <= {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    assert json.loads(entry) == ["dynamiccl", "tune", "--or-untuned", "--budget", "0.01", "--"]
    # Before: an image with a newer C library compiled the plugin, and the jobs' image could not load it.
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}"}
