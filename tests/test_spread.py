"""Work over processes: what fails takes nothing with it."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dynamiccl.agent.bench.spread import spread


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


def thread(item: str) -> dict[str, Any]:
    if item == "stays":
        threading.Thread(target=time.sleep, args=(300,)).start()
    return {"item": item}


def test_what_fails_is_told_by_name_and_takes_nothing_with_it() -> None:
    found = dict(spread(work, [*WANTED, "dies"], 3, limit))
    assert found == WANTED | {"dies": {"failed": "exited with 3"}}


@pytest.mark.slow
def test_one_whose_process_does_not_end_holds_nobody_up() -> None:
    """Before: its result had come, and its process was waited for without a limit."""
    begun = time.monotonic()
    assert dict(spread(thread, ["stays", "a"], 1)) == {"stays": {"item": "stays"}, "a": {"item": "a"}}
    assert time.monotonic() - begun < 60


def test_work_is_ended_when_the_caller_goes_away() -> None:
    others = set(multiprocessing.active_children())
    going = spread(work, ["hangs", "a"])
    assert next(going)[0] == "a"
    (hanging,) = set(multiprocessing.active_children()) - others
    with pytest.raises(KeyboardInterrupt):
        going.throw(KeyboardInterrupt)
    assert not hanging.is_alive()
