"""The job's command line, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from dynamiccl.zero_workload.job import launch, train
from dynamiccl.zero_workload.job.options import is_rank
from job_log import read_log
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--seq", "32", "--quiet"]


def job(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynamiccl.zero_workload", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **env})


class Ranks:
    """In place of the launcher's processes: keeps the environment of each, and all end well."""

    made: ClassVar[list[Ranks]] = []

    def __init__(
        self, name: str, program: str, command: object, envs: dict[int, dict[str, str]], logs: object
    ):
        self.envs = envs
        self.made.append(self)

    def start(self) -> None: ...
    def wait(self, period: float) -> None: ...
    def close(self, death_sig: signal.Signals) -> None: ...


@pytest.mark.parametrize("of_the_pod", [{}, {"RANK": "1", "WORLD_SIZE": "4"}])
def test_the_job_starts_its_own_ranks_whatever_started_it(
    monkeypatch: pytest.MonkeyPatch, of_the_pod: dict[str, str]
) -> None:
    """Before: as one of four in a pod whose operator sets RANK and WORLD_SIZE; and where torchrun had started the pod's
    program nobody served the store of the ranks."""
    monkeypatch.setattr(Ranks, "made", [])
    monkeypatch.setattr(launch, "_Ranks", Ranks)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**of_the_pod, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert train.main([*SMALL, "--ranks", "3", "--hsdp", "3", "--stage", "3"]) == 0
    (ranks,) = Ranks.made
    for rank, env in ranks.envs.items():
        seen = {**os.environ, **env}
        assert (seen["RANK"], seen["WORLD_SIZE"]) == (str(rank), "3")
        assert seen["TORCHELASTIC_USE_AGENT_STORE"] == "False" and is_rank(seen)


@pytest.mark.parametrize(("quiet", "lines"), [([], 1), (["--quiet"], 0)])
def test_a_job_of_its_own_says_so_where_a_rank_is_set(
    quiet: list[str], lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before: who had forgotten LOCAL_RANK had as many jobs as ranks, without a word."""
    monkeypatch.setattr(launch, "_Ranks", Ranks)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert train.main([*SMALL[:-1], *quiet]) == 0
    said = capfd.readouterr().err
    assert said.count("\n") == lines and ("LOCAL_RANK is not" in said) == bool(lines)


@pytest.mark.slow
def test_the_job_logs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = job("--steps", "6", "--stage", "2", "--log", str(log))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    head, steps = read_log(log)
    assert head["n_ranks"] == 2 and head["stage"] == 2 and head["n_params"] > 30_000
    assert [s["step"] for s in steps] == list(range(6)) and all(s["step_ms"] > 0 for s in steps)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert not {"loss_scale", "skipped"} & steps[0].keys()


@pytest.mark.slow
def test_the_job_logs_the_loss_scale_of_float16(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = job("--steps", "4", "--stage", "2", "--dtype", "fp16", "--log", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    for step in read_log(log)[1]:
        # The first scale is 2^16; each skipped step halves it.
        assert step["loss_scale"] * 2 ** step["skipped"] == 2**16 and step["skipped"] <= step["step"] + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--stage", "4"], 2, "stage is 0, 1, 2 or 3"),
        (["--heads", "3"], 2, "heads"),
        (["--seq", "1000000000"], 2, "bytes are too few for sequences of 1000000000"),
        (["--backend", "emulated"], 2, "dynamiccl tune --cluster"),
        (["--backend", "nccl"], 2, "no GPU"),
        (["--steps", "0"], 2, "--steps: a whole number from 1 up, not 0"),
        (["--prefetch", "some"], 2, "prefetch"),
        (["--steps", "5", "--lr", "1e30"], 1, "the gradient is not finite at step 1: lower"),
    ],
)
def test_the_job_refuses_in_one_line(arguments: list[str], code: int, words: str) -> None:
    if words == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = job(*arguments)
    assert done.returncode == code
    assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "dynamiccl.zero_workload",
        *SMALL,
        "--steps",
        "100000",
        "--log",
        str(log),
    ]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ranks = wait_for_steps(log, launcher)
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    _, said = launcher.communicate(timeout=30)
    assert time.monotonic() - begin < 5
    assert launcher.returncode == 1 and said.strip() == "error: rank 1: killed by signal 9"


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_job_with_its_reason() -> None:
    """Only rank 0 opens the log; the others wait for it in a collective."""
    begin = time.monotonic()
    done = job("--steps", "1", "--log", "/proc/nowhere")
    assert time.monotonic() - begin < 45  # most of it is the start of two processes, waiting would be 300 s
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: rank 0: FileNotFoundError: ") and "/proc/nowhere" in done.stderr


def test_the_rank_that_failed_by_itself_is_blamed(tmp_path: Path) -> None:
    def blame(*ended: tuple[int, int]) -> tuple[int, int, str]:
        """Of ranks with their exit codes, in the order in which they were seen to end."""
        return launch._blame(ProcessFailure(rank, 0, code, str(tmp_path / str(rank))) for rank, code in ended)

    lost = "RuntimeError: Connection reset by peer"
    (tmp_path / "0").write_text(json.dumps({"message": lost, "errorCode": 1, "timestamp": 1}))
    # Rank 0 lost the killed rank 1 and was seen to end first.
    assert blame((0, 1), (1, -9)) == (1, 1, "killed by signal 9")
    assert blame((1, 7), (0, 1)) == (1, 1, "ended with exit code 7")
    assert blame((0, 1)) == (0, 1, lost)  # the other end of the connection was not ours
    (tmp_path / "1").write_text(json.dumps({"message": "rank 1 has no text", "errorCode": 2, "timestamp": 2}))
    assert blame((0, 1), (1, 2)) == (1, 2, "rank 1 has no text")


@pytest.mark.slow
def test_sigterm_ends_the_job_after_a_step(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "dynamiccl.zero_workload",
        *SMALL[:-1],
        "--steps",
        "100000",
        "--log",
        str(log),
    ]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(log, launcher)
    launcher.terminate()
    told, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM and said == ""
    last = read_log(log)[1][-1]["step"]
    assert told.endswith(f"stopped after step {last + 1}\n")


#: What a rank does when it is told to stop.
WHEN_TOLD = {"saves": "time.sleep(0.5); os._exit(0)", "fails": "os._exit(3)", "hangs": "pass"}


@pytest.mark.parametrize(
    ("what", "patience", "code", "words"),
    [
        ("saves", -1, 128 + signal.SIGINT, ""),
        ("fails", -1, 1, "error: rank 0: ended with exit code 3\n"),
        (
            "hangs",
            0.1,
            128 + signal.SIGINT,
            "error: ranks did not end within 0.1 s of SIGINT, and are killed",
        ),
    ],
)
def test_ranks_that_are_told_to_stop_have_their_time(
    what: str, patience: float, code: int, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before: a save of more than ten seconds was cut short, without a word."""
    told = f"signal.signal(signal.SIGTERM, lambda *_: exec({WHEN_TOLD[what]!r}))"
    script = f"import os, signal, time; {told}; open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(60); time.sleep(60)"
    ranks = launch._Ranks(
        "rank", sys.executable, {0: ("-c", script)}, {0: {}}, DefaultLogsSpecs(str(tmp_path))
    )
    ranks._start()
    try:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        assert launch._stop(ranks, signal.SIGINT, patience) == code
    finally:
        ranks.close(signal.SIGKILL)
    said = capfd.readouterr().err
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_saves_and_goes_on_in_the_same_log(tmp_path: Path) -> None:
    """Before: it looked only when it read the loss; and the log of the run before was lost."""
    log, folder = tmp_path / "log", tmp_path / "save"
    options = ["--log", str(log), "--save", str(folder)]
    command = [sys.executable, "-m", "dynamiccl.zero_workload", *SMALL, *options]
    launcher = subprocess.Popen(
        [*command, "--steps", "100000", "--log-every", "100000"], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (not log.exists() or not log.read_text()):
        time.sleep(0.1)
    time.sleep(1)
    launcher.terminate()
    assert launcher.communicate(timeout=60)[1] == b"" and launcher.returncode == 128 + signal.SIGTERM
    (last,) = [step["step"] for step in read_log(log)[1]]
    done = job("--steps", str(last + 3), "--resume", str(folder), *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert [step["step"] for step in read_log(log)[1]] == [last, last + 1, last + 2]


def wait_for_steps(log: Path, launcher: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, once they train."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (not log.exists() or log.read_text().count("\n") < 3):
        assert launcher.poll() is None, launcher.communicate()[1]
        time.sleep(0.1)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children]
