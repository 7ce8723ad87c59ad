"""Spreads work over processes of this machine, one an item: one that dies or hangs takes nothing with it.

Work is a function of one item that returns a JSON-like dict, or raises ValueError with the reason.
"""

from __future__ import annotations

import multiprocessing
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Work = Callable[[Any], dict[str, Any]]
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()


def spread(
    work: Work, items: Iterable[Item], processes: int = 2, limit_s: Callable[[Item], float] = lambda item: 600.0
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield (item, result) as they come. What fails, or takes longer than its limit, gives ``{"failed": reason}``."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(items), dict[Any, tuple[Item, Any, float]]()  # by the pipe that a result comes through
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                item = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_in_child, args=(work, item, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = item, process, time.monotonic() + limit_s(item)
            first_end = min(end for _, _, end in running.values())
            done = wait(list(running), max(0.0, first_end - time.monotonic()))
            for pipe, (item, process, end) in list(running.items()):
                if pipe in done:
                    found = _result(pipe, process)
                elif time.monotonic() >= end:
                    found = {"failed": f"gave no result in {limit_s(item):.0f} s"}
                else:
                    continue
                del running[pipe]
                process.kill()
                process.join()
                yield item, found
    finally:
        for _, process, _ in running.values():  # interrupted
            process.kill()
            process.join()


def _result(pipe: Any, process: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = pipe.recv()
    except EOFError:
        process.join()
        return {"failed": f"exited with {process.exitcode}"}
    process.join(5.0)  # what it has left to do at its end; a thread of a guest's may never end
    return found


def _in_child(work: Work, item: Any, pipe: Any) -> None:
    pipe.send(_attempt(work, item))


def _attempt(work: Work, item: Any) -> dict[str, Any]:
    """What ``work`` returns, or ``{"failed": reason}``."""
    try:
        return work(item)
    except Exception as error:  # a guest's policy may raise anything; its reason goes onto the board
        where = _place(error)
        if isinstance(error, ValueError) and not where:
            return {"failed": str(error)}
        return {"failed": f"{type(error).__name__}: {error}{where}"}


def _place(error: Exception) -> str:
    """Where in code that is neither ours nor a library's an error came from; '' where nowhere."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = path.resolve().is_relative_to(Path(__file__).resolve().parents[2])
        guest = not ours or "tests" in path.resolve().parts
        if guest and "site-packages" not in path.parts and not path.resolve().is_relative_to(_PYTHON):
            return f" ({path.name}, line {frame.lineno})"
    return ""
