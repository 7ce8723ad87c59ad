"""What people read: on terminals and in locales that lack letters, at once where nothing can come, and true."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import invoke, start
from dynamiccl.agent.daemon.console import show_summary
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.terminal import terminal
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.job_ends import FEWEST_STEPS
from dynamiccl.envs.live.reader import Reader
from dynamiccl.envs.nccl.probe.probe import Probe
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.reasons import Happened, NotAgreeing, NotTuning, RunEnds
from dynamiccl.traces.records import AgreementState

#: A locale of which Python reads and writes ASCII alone: nothing makes it UTF-8.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


def test_a_script_with_umlauts_has_its_report_in_the_posix_locale(tmp_path):
    """plaso#3717, cuckoo#2442. Before: "surrogates not allowed", and no report."""
    script = tmp_path / "j\u00f6b.py"
    script.write_text("print('ran')\n")
    words = ["tune", "--no-memory", "--out", tmp_path / "out", "--cluster", "dgx-h100-2x8"]
    done = start(*words, "--", sys.executable, script, **ASCII)
    assert done.returncode == 0 and "could not be made" not in done.stderr, done.stderr
    assert "j\u00f6b.py" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for encoding in ("latin-1", "ascii"):  # YOLOX#694: a traceback of `show`
        shown = start("show", tmp_path / "out", PYTHONIOENCODING=encoding)
        assert shown.returncode == 0 and "Traceback" not in shown.stderr, shown.stderr


def test_a_terminal_without_our_letters_gets_their_codes():
    code = "import sys; from dynamiccl.agent import cli; cli.run = lambda words: print('\u2501 \u2581'); cli.main()"
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout == b"\\u2501 \\u2581\n", done.stderr


def test_an_interrupt_ends_a_command_without_a_traceback():
    code = "import os; from dynamiccl.agent import cli; cli.run = lambda words: os.kill(os.getpid(), 2); cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stderr == "interrupted\n"


def shown(**fields):
    """What `tune` prints at its end of such a run."""
    console = terminal(width=100, record=True, file=io.StringIO())
    show_summary(console, RunSummary(**({"trace": "t", "report": "r", "consistency": {}} | fields)))
    return console.export_text()


DECIDED = {
    "speedup": 1.2,
    "speedup_ci95": [1.1, 1.3],
    "detectable": 0.02,
    "kept": True,
    "in_force": "A",
    "table": "t",
}


@pytest.mark.parametrize(
    ("status", "has_verdict"), [(1, False), (77, False), (0, True), (143, True), (137, True)]
)
def test_a_job_that_failed_has_no_verdict(status, has_verdict):
    """Before: a job that ended with a traceback was told what its tables had gained. A signal is no failure."""
    told = verdict(RunSummary(**DECIDED, job_status=status))
    assert told.startswith("KEPT A" if has_verdict else f"NO VERDICT: the job failed with status {status}")
    text = shown(**DECIDED, job_status=status)
    assert ("dynamiccl apply" in text) == has_verdict and ("Fix the job" in text) == (not has_verdict)


def test_what_ddp_can_do_is_on_the_screen():
    """Before: in OPERATING.md alone."""
    assert "fully_shard" in shown(ended=NotTuning.NOTHING())


def test_one_number_of_fewest_steps_is_told_everywhere():
    """Before: "give --steps 1000", "100 to 1200" and "107 to 693"."""
    refused = invoke(["tune", "--steps", FEWEST_STEPS - 1])
    assert refused.exit_code == 2 and f"give --steps {FEWEST_STEPS} or more" in refused.stderr
    assert f"at least {FEWEST_STEPS}." in " ".join(invoke(["tune", "--help"]).stdout.split())
    assert f"at least {FEWEST_STEPS} steps" in shown(
        ended=RunEnds.JOB_STATUS(status=0), job_status=0, windows=3
    )
    page = Path(__file__).resolve().parents[2] / "OPERATING.md"
    assert f"at least {FEWEST_STEPS} steps. Fewer seldom reach a verdict" in page.read_text(encoding="utf-8")
    # Before: "a verdict takes at least 100 steps", which half of the jobs of `unseen` do not need.
    assert "seldom reach a verdict" in refused.stderr


def help_of(command):
    return " ".join(invoke([command, "--help"]).stdout.split())


def test_the_board_takes_as_long_as_its_jobs():
    """Before: 2 to 6 hours of a core for 8,000 plays of 1.2 to 3 s; now nine policies play."""
    path = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
    page, told = " ".join(path.read_text(encoding="utf-8").split()), help_of("bench")
    low, high = map(float, re.search(r"A job takes ([\d.]+) to ([\d.]+) s of a core", told).groups())
    assert f"A job takes {low} s, on a busy core {high} s" in page
    assert f"1,000 jobs: {round(low * 9000 / 3600)} to {round(high * 9000 / 3600)} hours" in told


@pytest.mark.parametrize("command", ["tune", "apply", "env"])
def test_more_channels_than_the_communicators_need_headroom_with_every_release(command):
    """Before: "NCCL 2.31 and newer need it: there a table cannot use more channels"."""
    assert (
        "NCCL allocates memory for them. A table cannot use more channels than the communicator has."
        in help_of(command)
    )


@pytest.fixture
def run():
    folder = RunFolder.create()
    yield folder
    folder.close()


@pytest.mark.parametrize(("steps", "has_nccl", "says"), [(20, True, "20 steps"), (20, False, "first step"),
                                                        (5000, True, "first step")])  # fmt: skip
def test_a_job_of_few_steps_is_told_that_they_were_few(run, steps, has_nccl, says):
    """Before, after 20 steps: "not every rank has taken its first step, or NCCL has not loaded the tuner there"."""
    reader = Reader(run)
    reader.state = AgreementState.WAITING, NotTuning.NOT_ALL_THERE()
    reader.last_step, reader.ranks = steps, {0, 1}
    if has_nccl:
        reader.assembler.comms[7] = None
    ended = reader.ended()
    assert says in str(ended) and ended.reason is RunEnds.BEFORE_A_SWITCH


def test_a_job_on_gloo_hears_at_once_that_nothing_asks_a_tuner(run, monkeypatch):
    """Before: at the end of the whole job. Once is enough."""
    said, told = [], (AgreementState.WAITING, NotTuning.OTHER_BACKEND(backend="gloo"))
    monkeypatch.setattr(Reader, "poll", lambda self: setattr(self, "state", told))
    job = Job(run, on_state=said.append)
    for _ in range(3):
        job.poll()
    assert said == [Happened.NEEDS_NCCL(why=told[1])] and "--cluster" in str(said[0])


FIRST_STEP = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], 0.1)
weight.sum().backward()
optimizer.step()
word, end = os.environ["DYNAMICCL_RUN"] + "/agreement", time.monotonic() + 60
while not os.path.exists(word) and time.monotonic() < end:
    time.sleep(0.05)
print(open(word).read())
"""


def test_the_probe_tells_of_gloo_in_every_state_without_a_switch(tmp_path):
    """Before: after three fruitless rounds the last line of `apply` named NCCL's profiler."""
    probe = Probe(str(tmp_path))
    probe._backend = "gloo"
    for state in (AgreementState.WAITING, AgreementState.LOSING, AgreementState.SHUT):
        probe._tell(state, NotAgreeing.NOTHING_COUNTED())
        assert (tmp_path / "agreement").read_text() == NotTuning.OTHER_BACKEND(backend="gloo").packed(), state
    probe._tell(AgreementState.OPEN, None)
    assert (tmp_path / "agreement").read_text() == ""


def test_the_probe_tells_of_gloo_at_the_first_step(run):
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], env={**os.environ, "DYNAMICCL_RUN": str(run.path),
                          "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.stdout.strip() == NotTuning.OTHER_BACKEND(backend="gloo").packed(), done.stderr


@pytest.mark.parametrize("asked", [0, 7], ids=["before the first collective", "before the first step"])
def test_stop_before_the_first_table_answers_at_once(run, monkeypatch, asked):
    """Before: 33 s, and exit status 1: it waited for a step under the empty table."""
    ring = SimpleNamespace(name="ring-0-5", calls=lambda: (asked, 0))
    monkeypatch.setattr(RunFolder, "rings", lambda self: [ring])
    begun = time.monotonic()
    done = invoke(["stop", str(run.path), "--wait", "30"])
    assert done.exit_code == 0 and "no table has been used yet" in done.stdout
    assert (run.path / "stop").exists() and time.monotonic() - begun < 10


def test_stop_on_a_node_without_rank_0_does_not_say_that_it_is_done(run, monkeypatch):
    """Before: "the job stays under NCCL's default" and status 0, under a table of the node of rank 0."""
    ring = SimpleNamespace(name="ring-8-5", calls=lambda: (7, 5))
    monkeypatch.setattr(RunFolder, "rings", lambda self: [ring])
    done = invoke(["stop", str(run.path)])
    assert done.exit_code == 1 and "no rank 0 was seen on this node" in done.stdout


def test_top_imports_no_tables():
    """Before: pandas and pyarrow, 6.5 s for `top --once`."""
    code = "import sys; from dynamiccl.agent.report import runs, terminal; "
    code += "print({'pandas', 'pyarrow'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr
