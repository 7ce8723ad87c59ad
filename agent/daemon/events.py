"""What the tuner appends to the log of its run. All that it knows of the run itself is the fold of these lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...traces.header import plain
from ...traces.outside import TraceError
from ...traces.segments import is_cut
from ..report.summary import BEGINS, COMPARISON, FIELDS, LOG_FILE, WINDOW, Fold, RunSummary


class Events:
    """The log of one tuner, which has begun. ``step`` gives the step of the job now.

    A line that cannot be written now is written with the next one: telling must not stand in the way of what is done.
    After :meth:`close` what is told is known here only.
    """

    def __init__(self, step: Callable[[], int], fold: Fold | None = None) -> None:
        self.fold = fold or Fold({}, [{"kind": BEGINS, "out": "."}])
        self._step = step
        self._unwritten: list[tuple[str, dict[str, Any]]] = []
        self._write: Callable[[str, dict[str, Any]], object] | None = None

    @property
    def summary(self) -> RunSummary:
        """What the run has come to."""
        return self.fold.summary

    def begin(self, out: Path, header: dict[str, Any], before: RunSummary | None = None) -> None:
        """A tuner begins, and leaves its results in ``out``; ``before``: the summary that it goes on with."""
        self.fold = Fold(header)
        self.tell(BEGINS, out=str(out), before=vars(before) if before else None)

    def open(self, write: Callable[[str, dict[str, Any]], object]) -> None:
        """From now on ``write`` gets the kind and the facts of each line, those before too."""
        self._write = write

    def close(self) -> None:
        """Nothing is written any more."""
        self._write = None

    def tell(self, kind: str, **facts: Any) -> None:
        """Append an event at the job's step, unless ``facts`` name another.

        For a kind of FIELDS: what is not named stays as it is. Of these and of comparisons an event that changes
        nothing is none. Raises what the log's writer raises if a window cannot be written: nothing more can be measured
        then.
        """
        facts = plain(facts)
        if kind in FIELDS:
            now = {name: plain(vars(self.summary)[name]) for name in FIELDS[kind]}
            facts = now | facts
            if facts == now:
                return
        elif kind == COMPARISON and facts["row"] == self.fold.rows.get(facts["number"]):
            return
        # The readers of the log fold what JSON holds, and so does the tuner.
        line = {"step": self._step(), **facts}
        self.fold.take({"kind": kind, **line})
        self._unwritten.append((kind, line))
        try:
            while self._write and self._unwritten:
                self._write(*self._unwritten[0])
                del self._unwritten[0]
        except (OSError, TraceError, ValueError):  # ValueError: it is closed
            if kind == WINDOW:
                raise


def tell_after(out: Path, **told: dict[str, Any]) -> RunSummary:
    """Add to the log of a run whose tuner is gone: by kind, the facts. Returns the new summary. Raises OSError."""
    fold = Fold.read(out)
    step = fold.summary.steps or 0
    events = Events(lambda: step, fold)
    begin = "\n" if is_cut(out / LOG_FILE) else ""
    with (out / LOG_FILE).open("a", encoding="utf-8") as log:
        log.write(begin)

        def write(kind: str, line: dict[str, Any]) -> None:
            log.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **line}) + "\n")

        events.open(write)
        for kind, facts in told.items():
            events.tell(kind, **facts)
    return events.summary
