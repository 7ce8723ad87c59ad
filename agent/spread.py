"""Spreads work over processes of this machine, or over a Ray cluster: one loop, two executors.

Work is a function of one item that returns a JSON-like dict, or raises ValueError with the reason.
"""

from __future__ import annotations

import logging
import multiprocessing
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Work = Callable[[Any], dict[str, Any]]
_PYTHON = Path(sysconfig.get_path("stdlib")).resolve()


def attempt(work: Work, item: Any) -> dict[str, Any]:
    """What ``work`` returns, or ``{"failed": reason}``: runs where the work is done."""
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
        ours = path.resolve().is_relative_to(Path(__file__).resolve().parents[1])
        guest = not ours or "tests" in path.resolve().parts
        if guest and "site-packages" not in path.parts and not path.resolve().is_relative_to(_PYTHON):
            return f" ({path.name}, line {frame.lineno})"
    return ""


class Executor(Protocol):
    """Where work is done, at most ``slots`` items at a time."""

    slots: int

    def start(self, work: Work, item: Any) -> Any:
        """Begin; returns a handle."""
        ...

    def result(self, handle: Any) -> dict[str, Any] | None:
        """What came out; None while it runs."""
        ...

    def end(self, handle: Any) -> None:
        """Stop it, whatever it is doing."""
        ...


def _in_child(work: Work, item: Any, pipe: Any) -> None:
    pipe.send(attempt(work, item))


class Processes:
    """Processes of this machine, one an item: one that dies or hangs takes nothing with it."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self._context = multiprocessing.get_context("spawn")

    def start(self, work: Work, item: Any) -> Any:
        """A new process, and the pipe that its result comes through."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_in_child, args=(work, item, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def result(self, handle: Any) -> dict[str, Any] | None:
        """See :class:`Executor`."""
        process, pipe = handle
        if not pipe.poll():
            return None
        try:
            found: dict[str, Any] = pipe.recv()
        except EOFError:
            process.join()
            return {"failed": f"exited with {process.exitcode}"}
        process.join()
        return found

    def end(self, handle: Any) -> None:
        """See :class:`Executor`."""
        handle[0].kill()
        handle[0].join()


class OnRay:
    """A Ray cluster: that of ``RAY_ADDRESS``, else one on this machine. dynamiccl is installed on its nodes."""

    def __init__(self) -> None:
        """Raises ValueError, with the cure, when Ray is not installed or cannot be reached."""
        try:
            import ray
        except ImportError as error:
            raise ValueError("--ray needs Ray: pip install 'dynamiccl[ray]'") from error
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
            self.slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
        except Exception as error:
            raise ValueError(f"Ray cannot be reached ({error}): start it, or set RAY_ADDRESS") from error
        self._ray, self._attempt = ray, ray.remote(attempt).options(max_retries=0)

    def start(self, work: Work, item: Any) -> Any:
        """A task."""
        return self._attempt.remote(work, item)

    def result(self, handle: Any) -> dict[str, Any] | None:
        """See :class:`Executor`."""
        done, _ = self._ray.wait([handle], timeout=0)
        if not done:
            return None
        try:
            found: dict[str, Any] = self._ray.get(handle)
        except Exception as error:  # the node died, the worker was killed: Ray has an exception for each
            return {"failed": f"{type(error).__name__}: {error}"}
        return found

    def end(self, handle: Any) -> None:
        """See :class:`Executor`."""
        self._ray.cancel(handle, force=True)


def spread(
    work: Work, items: Iterable[Item], executor: Executor, limit_s: Callable[[Item], float] = lambda item: 600.0
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield (item, result) as they come. What fails, or takes longer than its limit, gives ``{"failed": reason}``.

    The limit counts from the start of the item; on Ray that includes the wait for a free node.
    """
    waiting, running = list(items), list[tuple[Item, Any, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < executor.slots:
                item = waiting.pop(0)
                running.append((item, executor.start(work, item), time.monotonic()))
            for entry in list(running):
                item, handle, begun = entry
                found = executor.result(handle)
                if found is None and time.monotonic() - begun > limit_s(item):
                    executor.end(handle)
                    found = {"failed": f"gave no result in {limit_s(item):.0f} s"}
                if found is not None:
                    running.remove(entry)
                    yield item, found
            time.sleep(0.05)
    finally:
        for _, handle, _ in running:  # interrupted
            executor.end(handle)
