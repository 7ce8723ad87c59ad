"""How a job learns that it is told to stop: at no cost on a GPU; a signal that comes again within a second is one."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dynamiccl.zero_workload.job import launch, train
from handlers import hide_handler_of_c_code
from torch.distributed.elastic.multiprocessing import api


class Ranks:
    """In place of the launcher's processes: a signal comes at each wait. Then all end well."""

    def __init__(self, *_: object) -> None: ...

    def start(self) -> None:
        """As torch's."""
        signal.signal(signal.SIGTERM, api._terminate_process_handler)

    def pids(self) -> dict[int, int]:
        return {}

    def wait(self, timeout: float = -1, period: float = 1) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(failures={})

    def close(self, death_sig: signal.Signals) -> None: ...


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that are read, one after the other."""
    times = list[float]()
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    return times


@pytest.mark.parametrize(("second", "says"), [(10.004, ""), (11.0, "error: ranks had not ended at SIGTERM")])
def test_the_launcher_tells_a_second_signal_from_the_first_again(
    second: float,
    says: str,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before: Slurm's second copy of a signal killed the ranks before they had saved."""
    monkeypatch.setattr(launch, "_Ranks", Ranks)
    before = signal.getsignal(signal.SIGTERM)
    clock += [10.0, second]
    try:
        assert launch.launch(2, [], -1) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capfd.readouterr().err
    assert said.startswith(says) and bool(said) == bool(says)


def test_a_handler_that_c_code_had_set_stops_no_launcher(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: TypeError as Python's None was to be set again, in place of the exit status."""
    monkeypatch.setattr(launch, "_Ranks", Ranks)
    before = signal.getsignal(signal.SIGTERM)
    clock += [10.0, 10.004]
    try:
        hide_handler_of_c_code(monkeypatch, signal.SIGTERM)
        assert launch.launch(2, [], -1) == 128 + signal.SIGTERM
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)


def test_what_was_ignored_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `nohup` did not keep the job from ending with its terminal."""

    class Left(Ranks):
        """A terminal closes, and the ranks go on."""

        def start(self) -> None:
            signal.signal(signal.SIGHUP, api._terminate_process_handler)

        def wait(self, timeout: float = -1, period: float = 1) -> Any:
            signal.raise_signal(signal.SIGHUP)
            return SimpleNamespace(failures={})

    monkeypatch.setattr(launch, "_Ranks", Left)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch.launch(2, [], -1) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert launch.launch(2, [], -1) == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_rank_tells_a_second_signal_from_the_first_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = list[int]()
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: ends.append(number))
    monkeypatch.setattr(train.signal, "raise_signal", ends.append)
    told = {number: launch.Told() for number in (signal.SIGINT, signal.SIGTERM)}
    job: Any = SimpleNamespace(stopped=False, _told=told)
    clock += [10.0, 10.004, 10.9, 11.5, 12.5]
    train.Job._stop(job, signal.SIGTERM, None)
    train.Job._stop(job, signal.SIGTERM, None)
    train.Job._stop(job, signal.SIGTERM, None)
    train.Job._stop(job, signal.SIGINT, None)  # the terminal's, and then the launcher's SIGTERM
    assert job.stopped and not ends
    train.Job._stop(job, signal.SIGINT, None)
    assert ends == [signal.SIGINT] * 2


class Seen(list[Any]):
    """A tensor on the GPU."""

    order: list[str]

    def to(self, device: str, non_blocking: bool = False) -> str:
        """Its copy."""
        self.order.append(f"copy, non_blocking={non_blocking}")
        return f"on {device}"


def test_on_a_gpu_the_host_does_not_wait_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: whether to stop was copied behind the optimizer's kernels, in each step."""
    seen = Seen([0.0] * 3)
    seen.order = order = list[str]()
    work = SimpleNamespace(wait=lambda: order.append("wait"))
    monkeypatch.setattr(train, "torch", SimpleNamespace(zeros=lambda numel, device: seen))
    monkeypatch.setattr(train, "dist", SimpleNamespace(all_reduce=lambda tensor, async_op: work))
    engine = SimpleNamespace(
        model=lambda: torch.ones(()), backward=lambda loss: None, step=lambda: order.append("step")
    )
    corpus = SimpleNamespace(batch=lambda *rows, step, seed: [])
    args = SimpleNamespace(accumulate=1, batch=1, tensor_parallel=1, seed=0, corpus=corpus)
    job: Any = object.__new__(train.Job)
    vars(job).update(args=args, engine=engine, device=SimpleNamespace(type="cuda"), size=2, place=0)
    vars(job).update(stopped=False, parent=0)
    assert job._step(0) == ("on cpu", work)
    assert order == ["wait", "copy, non_blocking=True", "step"]
