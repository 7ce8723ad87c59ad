"""The trace of a run without --headroom, made of a filed table of what ran at each size."""

import numpy as np
import pandas as pd
from dynamiccl.traces.names import EVENT_COLUMNS
from dynamiccl.traces.writer import TraceWriter
from paths import DATA

FILED = DATA / "nccl_on_cpu" / "untouched"


def filed(name):
    return pd.read_csv(FILED / f"{name}.csv")


def write_untouched(folder, rows=None, **changed):
    """Results in ``folder`` with such calls on communicators of 2 ranks on 2 nodes; ``changed``: of their columns, or
    ``header``."""
    header = {"nccl": "2.28.9", **changed.pop("header", {})}
    rows = (filed("untouched_2") if rows is None else rows).assign(n_ranks=2, n_nodes=2)
    rows = rows.assign(**{"asked_bytes": rows["n_bytes"], "dtype": "float32", "captured": False, **changed})
    rows = rows.reset_index(drop=True)
    events = pd.DataFrame({name: np.zeros(len(rows)) for name in EVENT_COLUMNS})
    for name, kind in EVENT_COLUMNS.items():
        values = rows[name] if name in rows else events[name]
        events[name] = (values * np.nan if name in ("start_ns", "end_ns") else values).astype(kind)
    with TraceWriter(folder / "trace", header) as writer:
        writer.write(events)
    return folder
