"""A thread beside the one that trains: handed a task at a step's boundary, and asked for it at the next."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs ``task`` once for every :meth:`go`. Two locks hand over; each costs the training thread some 100 ns.

    Between ``go`` and a ``join`` that said True all that ``task`` touches belongs to the thread.
    """

    def __init__(self, task: Callable[[], None], name: str) -> None:
        """``task`` must not raise."""
        self._task = task
        self._wake, self._done = threading.Lock(), threading.Lock()
        self._wake.acquire()
        self._done.acquire()
        self.closing = False  # what blocks in `task` looks at this from time to time
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self.closing:
                return
            self._task()
            self._done.release()

    def go(self) -> None:
        """Begin the task; not again before :meth:`join`."""
        self._wake.release()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the task begun last; False if it takes longer than ``timeout_s`` seconds."""
        return self._done.acquire(timeout=timeout_s)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread. It must not be inside native code when the interpreter goes away."""
        self.closing = True
        if self._wake.locked():
            self._wake.release()
        self._thread.join(timeout_s)
