"""Work over processes and over Ray: the same loop, and what fails takes nothing with it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dynamiccl.agent.spread import OnRay, Processes, spread


class FakeRay:
    """Ray's interface as far as we use it; tasks run when asked for, and one never ends."""

    def __init__(self) -> None:
        self.cancelled: list[Any] = []

    def init(self, **options: Any) -> None:
        self.options = options

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, function: Any) -> Any:
        class Remote:
            def options(self, **_: Any) -> Any:
                return self

            def remote(self, work: Any, item: Any) -> Any:
                return None if item == "hangs" else (lambda: function(work, item))

        return Remote()

    def wait(self, handles: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], handles) if handles[0] is None else (handles, [])

    def get(self, handle: Any) -> Any:
        return handle()

    def cancel(self, handle: Any, force: bool) -> None:
        self.cancelled.append(handle)


def work(item: str) -> dict[str, Any]:
    if item == "dies":
        os._exit(3)
    if item == "hangs":
        time.sleep(60)
    if item == "raises":
        raise KeyError("x")
    if item == "refuses":
        raise ValueError("not that")
    return {"item": item, "much": "x" * 200_000}  # more than a pipe holds


def fine(item: str) -> dict[str, Any]:
    return {"item": item, "much": "x" * 200_000}


def line_of(text: str) -> str:
    """Where it stands in this file, as an exception's reason names it."""
    lines = Path(__file__).read_text().splitlines()
    return f"(test_spread.py, line {next(i for i, line in enumerate(lines, 1) if text in line)})"


WANTED = {
    "a": fine("a"),
    "b": fine("b"),
    "raises": {"failed": f"KeyError: 'x' {line_of('raise KeyError')}"},
    "refuses": {"failed": f"ValueError: not that {line_of('raise ValueError')}"},
    "hangs": {"failed": "gave no result in 1 s"},
}


def limit(item: str) -> float:
    return 1.0 if item == "hangs" else 60.0


def test_over_processes() -> None:
    found = dict(spread(work, [*WANTED, "dies"], Processes(3), limit))
    assert found == WANTED | {"dies": {"failed": "exited with 3"}}


def test_over_ray_by_the_same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert dict(spread(work, list(WANTED), OnRay(), limit)) == WANTED
    assert fake.cancelled == [None] and fake.options["ignore_reinit_error"]


def test_without_ray_or_a_cluster_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'dynamiccl\[ray\]'"):
        OnRay()
    fake = FakeRay()
    monkeypatch.setattr(fake, "cluster_resources", lambda: 1 / 0)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(ValueError, match="set RAY_ADDRESS"):
        OnRay()


def test_work_is_ended_when_the_caller_goes_away() -> None:
    executor = Processes(1)
    handles = []
    start = executor.start
    executor.start = lambda *args: handles.append(start(*args)) or handles[-1]  # type: ignore[func-returns-value,method-assign]
    going = spread(work, ["a", "hangs"], executor)
    assert next(going)[0] == "a"
    with pytest.raises(KeyboardInterrupt):
        going.throw(KeyboardInterrupt)
    assert not any(process.is_alive() for process, _ in handles)
