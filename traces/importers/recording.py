"""Profiles of PyTorch as ordinary traces: what ``show``, the report, a replay and ``advise`` can read."""

from __future__ import annotations

import filecmp
import os
from pathlib import Path

import pandas as pd

from ..assemble import (
    COMM_COLUMNS,
    COMPUTE_COLUMNS,
    EVENT_COLUMNS,
    OFFER_COLUMNS,
    STEP_COLUMNS,
    complete,
    empty,
    joined,
)
from ..files import Trace, TraceError
from .kineto import Profiles, read


def recording_files(paths: list[Path]) -> list[Path]:
    """The files of ``paths``, folders replaced by the files in them. Raises TraceError for what is not there."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"there is no file or folder {path}")
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        found += [p for p in inside if p == path or (p.is_file() and not p.name.startswith("."))]
    if not found:
        raise TraceError(f"no file in {', '.join(map(str, paths))}: folders within are not looked into")
    for i, one in enumerate(found):
        if twin := next((other for other in found[:i] if filecmp.cmp(one, other, shallow=False)), None):
            raise TraceError(f"{twin} and {one} are the same: give one file a rank")
    return found


def read_recording(paths: list[Path], ranks_per_node: int | None = None) -> Trace:
    """A recording as a trace in memory: a trace folder of ours, or profiles of PyTorch (or folders of them).

    ``ranks_per_node`` gives the number of nodes, which profiles do not tell. The header's ``notes`` say what is not
    known. Raises TraceError for a file that is no profile or is damaged, and where no collective or no step is in it.
    """
    ours = [p for p in paths for name in ("header.json", "trace/header.json") if (p / name).exists()]
    if ours:
        return Trace.read(ours[0])
    if ranks_per_node is not None and ranks_per_node < 1:
        raise TraceError(f"there is at least 1 rank on a node, not {ranks_per_node}")
    files = recording_files(paths)
    used = [file for file in files if file in paths or file.name.endswith((".json", ".json.gz"))]
    if not used:
        raise TraceError(f"no profile in {paths[0]}: PyTorch's end in .json or .json.gz")
    found, events, steps = _read(used, ranks_per_node)
    left_out = [f"{file.name} is left out: it is no profile of PyTorch's" for file in files if file not in used]
    comms = events.drop_duplicates(["comm_id", "rank", "pid"]).assign(name="")[[*COMM_COLUMNS]].astype(COMM_COLUMNS)
    # The header tells of the recorded machine; what is not known of it must not be this machine's.
    header = {"host": None, "kernel": None, "commit": None, **found.header, "emulated": False, "source": "kineto"}
    header |= {"files": [str(p) for p in used], "notes": found.notes + left_out}
    compute = joined(found.computes, COMPUTE_COLUMNS)
    return Trace(Path(os.path.commonpath(used)), header, events, steps, comms, empty(OFFER_COLUMNS), compute)


def _read(files: list[Path], ranks_per_node: int | None) -> tuple[Profiles, pd.DataFrame, pd.DataFrame]:
    """What is in the files, its events and steps. Raises TraceError."""
    names = ", ".join(file.name for file in files)
    try:
        found = read(files)
        events, steps = _events(found, ranks_per_node), _steps(found)
    except TraceError:
        raise
    except Exception:  # wrong types in a file that otherwise parses, or too much of it
        raise TraceError(f"{names}: a field is not what PyTorch writes there: cut or changed? Record again") from None
    if events.empty:
        raise TraceError(f"{names}: no collective in it that NCCL runs, nothing to import")
    if steps.empty:
        raise TraceError(f"{names}: no step in it: call the profiler's step() after each step of the optimizer")
    return found, events, steps


def _events(found: Profiles, ranks_per_node: int | None) -> pd.DataFrame:
    """As EVENT_COLUMNS. Without a ``seq`` they are counted by rank, communicator and func, as they were enqueued."""
    if not found.events:
        return empty(EVENT_COLUMNS)
    # As objects: a column with gaps must not become float64, clock values have more digits than that.
    events = pd.DataFrame(found.events, dtype=object).sort_values("enqueue_ns", kind="stable", ignore_index=True)
    events = events.assign(n_nodes=0, algo="unknown", proto="unknown", table_generation=0)
    counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
    events["seq"] = events["seq"].where(events["seq"].notna(), counted)
    if ranks_per_node:
        sizes = events[["comm_id", "n_ranks"]].drop_duplicates("comm_id").itertuples(index=False)
        nodes = {c: len({r // ranks_per_node for r in found.groups[c] or range(n)}) for c, n in sizes}
        events["n_nodes"] = events["comm_id"].map(nodes)
    return complete(events, EVENT_COLUMNS)


def _steps(found: Profiles) -> pd.DataFrame:
    """As STEP_COLUMNS, by number and rank; what a profile does not tell is 0."""
    if not found.steps:
        return empty(STEP_COLUMNS)
    steps = pd.DataFrame(found.steps).assign(table_generation=0, memory_used=0, memory_total=0)
    return complete(steps, STEP_COLUMNS).sort_values(["index", "rank"], ignore_index=True)
