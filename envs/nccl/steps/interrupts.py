"""Signals whose Python handlers may raise, held back while a rank changes tables together with the others."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Interrupts:
    """Between :meth:`hold` and :meth:`let_go` the job's own handlers wait; then they run, in the order of arrival.

    A KeyboardInterrupt in the midst of a change would leave one rank under another table than the rest.
    """

    def __init__(self) -> None:
        self.held = False
        self._handlers: dict[int, Any] = {}
        self._came: list[tuple[int, Any]] = []

    def hold(self) -> None:
        """From now on. Only the main thread runs handlers: elsewhere there is nothing to hold."""
        self.held = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._came.append((number, frame))

    def let_go(self) -> None:
        """Handlers are the job's again; raises what those raise whose signals have come."""
        self.held = False
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        came, self._came = self._came, []
        for number, frame in came:
            handlers[number](number, frame)
