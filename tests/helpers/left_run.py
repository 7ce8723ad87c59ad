"""What a tuner that is gone has left: a log that folds to a summary of the test's choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamiccl.agent.daemon.events import Events
from dynamiccl.agent.report.summary import COMPARISON, FIELDS, LOG_FILE, NAMED, RunSummary, read_object


def leave(out: Path, told: RunSummary, **header: Any) -> None:
    """Add to the log of ``out`` a tuner that came to ``told``; the trace's header gets ``header``."""
    (out / "trace").mkdir(parents=True, exist_ok=True)
    path = out / "trace" / "header.json"
    whole = {**read_object(path), "run": told.run, "run_id": told.run_id, **header}
    path.write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    events = Events(lambda: told.steps or 0)
    with (out / LOG_FILE).open("a") as log:
        events.open(lambda kind, line: log.write(json.dumps({"kind": kind, "time": 1.0, **line}) + "\n"))
        events.begin(out, whole)
        for letter, rows in told.tables.items():
            events.tell(NAMED, letter=letter, rows=rows)
        for number, row in enumerate(told.comparisons):
            events.tell(COMPARISON, number=number, row=row)
        for kind, names in FIELDS.items():
            events.tell(kind, **{name: getattr(told, name) for name in names})
