"""What Python knows of handlers of signals that it has not set."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest


def hide_handler_of_c_code(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Python names no handler for this signal, as where C code set it before Python began (a library of LD_PRELOAD)."""

    def hidden(real: Callable[..., Any]) -> Callable[..., Any]:
        def known(which: int, *handler: Any) -> Any:
            found = real(which, *handler)
            return None if which == number else found

        return known

    for name in ("signal", "getsignal"):
        monkeypatch.setattr(signal, name, hidden(getattr(signal, name)))
