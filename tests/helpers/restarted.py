"""The trace of a job that was started again: two lives of two ranks, each with processes of its own."""

from pathlib import Path

import pandas as pd
from dynamiccl.traces.assemble import COMM_COLUMNS, EVENT_COLUMNS, OFFER_COLUMNS, STEP_COLUMNS, empty
from dynamiccl.traces.files import Trace
from dynamiccl.traces.segments import Coverage, Segment

MS = 1_000_000
GIB = 1 << 30
ROW = {"func": "all_gather", "min_bytes": 0, "max_bytes": 1 << 20, "decision": "ring/ll128/8"}
#: Of each life: number of steps, ms of a step, the step from which on the table runs, its generation.
LIVES = ((90, 100, 60, 20), (40, 80, 5, 21))
VERDICT_STEP = 58  # of the first life


def frame(rows, columns):
    return pd.DataFrame(rows).reindex(columns=list(columns), fill_value=0).astype(columns)


def restarted(lives=LIVES, gap_ms=5000, folder=Path("trace")):
    """A trace of these lives. Ranks have the processes 10 and 11, then 20 and 21, and so on."""
    steps, events, now = [], [], 0
    starts = {10 * n + rank: f"life of {10 * n}" for n in range(1, len(lives) + 1) for rank in (0, 1)}
    for number, (n_steps, ms, first, generation) in enumerate(lives, 1):
        for index in range(n_steps):
            for rank in (0, 1):
                who = {"rank": rank, "pid": 10 * number + rank}
                who["table_generation"] = generation if index >= first else 0
                memory = {"memory_used": (80 - 40 * (number - 1)) * GIB, "memory_total": 80 * GIB}
                took = {"end_ns": (now + ms) * MS, "duration_ns": ms * MS}
                steps.append({"index": index, **who, **memory, **took})
                call = {"seq": index, "step": index, "comm_id": number, "n_ranks": 2, "n_nodes": 1}
                ran = {
                    "func": "all_gather",
                    "n_bytes": 1000,
                    "dtype": "bfloat16",
                    "algo": "ring",
                    "proto": "ll",
                }
                times = {"start_ns": (now + 10) * MS, "end_ns": (now + ms // 2) * MS, "enqueue_ns": now * MS}
                events.append({**who, **call, **ran, **times, "n_channels": 8})
            now += ms
        now += gap_ms
    tables = [{"kind": "table", "table": {"generation": one[3], "rules": [ROW]}} for one in lives]
    named = {
        "kind": "named",
        "letter": "A",
        "rows": [{**ROW, "algo": "ring", "proto": "ll128", "n_channels": 8}],
    }
    verdict = {"kind": "verdict", "step": VERDICT_STEP, "text": "KEPT"}
    return Trace(
        folder,
        {},
        frame(events, EVENT_COLUMNS),
        frame(steps, STEP_COLUMNS),
        empty(COMM_COLUMNS),
        empty(OFFER_COLUMNS),
        log=[{"kind": "begins", "out": "."}, named, verdict, *tables],
        segments=[Segment("000-0", coverage=Coverage(starts=starts))],
    )
