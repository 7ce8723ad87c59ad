"""Import of PyTorch's Flight Recorder dumps (pickle or JSON): one file per rank.

Times are the host's: when a call was enqueued and, with TORCH_NCCL_ENABLE_TIMING=1, how long its kernel took; the end
is when the watchdog saw it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import TraceError
from .importers_common import Imported, comm_id_of, dtype_of, func_of, rank_in_name, ranks_of, width_of
from .json_stream import Source, loads


class _Plain(pickle.Unpickler):
    """Unpickles numbers, text, lists and dictionaries, and nothing else: a pickle from elsewhere can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"it refers to {module}.{name}, which no Flight Recorder dump does: it was not read")


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read one dump a rank. Raises TraceError for files that are not the Flight Recorder's."""
    found = Imported()
    for order, path in enumerate(paths):
        dump = _load(path, on_bytes)
        if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
            raise TraceError(f"{path} is no Flight Recorder dump: it has no entries")
        rank = dump.get("rank", rank_in_name(path))
        _read_one(dump, order if rank is None else int(rank), found)
    if found.events and all(e["start_ns"] is None for e in found.events):
        found.notes.append("no durations: the job ran without TORCH_NCCL_ENABLE_TIMING=1, there are no times")
    return found


def _read_one(dump: dict[str, Any], rank: int, found: Imported) -> None:
    if version := (dump.get("nccl_version") or dump.get("comm_lib_version")):
        found.header["nccl"] = str(version)
    configs = dump.get("pg_config") or {}
    for entry in dump["entries"]:
        func = func_of(str(entry.get("profiling_name", "")))
        if func is None:
            continue
        name, ranks = _group(entry, configs)
        dtypes = [dtype_of(str(t)) for t in (entry.get("output_dtypes") or []) + (entry.get("input_dtypes") or [])]
        dtype = dtypes[0] if dtypes else "unknown"
        elements = max(_elements(entry.get("input_sizes")), _elements(entry.get("output_sizes")))
        comm_id = comm_id_of(name, ranks)
        found.groups[comm_id] = ranks
        row = {"comm_id": comm_id, "rank": rank, "pid": rank, "func": func, "dtype": dtype}
        row |= {"n_ranks": len(ranks), "n_bytes": elements * width_of(dtype)}
        seq = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
        start, end = _times(entry)
        row |= {"seq": seq, "enqueue_ns": int(entry.get("time_created_ns") or 0), "start_ns": start, "end_ns": end}
        found.events.append(row)


def _times(entry: dict[str, Any]) -> tuple[int | None, int | None]:
    duration, end = entry.get("duration_ms"), entry.get("time_discovered_completed_ns")
    if not duration or not end:
        return None, None
    return int(end) - round(float(duration) * 1e6), int(end)


def _group(entry: dict[str, Any], configs: Any) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of an entry's process group; the ranks are () where the dump does not list them."""
    group = entry.get("process_group") or [str(entry.get("pg_id", ""))]
    name = str(group[0]) if isinstance(group, list | tuple) else str(group)
    if not isinstance(configs, dict):
        return name, ()
    config = configs.get(name)
    if config is None and len(configs) == 1:  # a gloo job's one group has no name there
        config = next(iter(configs.values()))
    ranks = config.get("ranks", ()) if isinstance(config, dict) else ()
    return name, ranks_of(ranks)


def _elements(sizes: Any) -> int:
    """Elements of all the tensors whose sizes are listed."""
    return sum(math.prod(int(n) for n in size) for size in sizes or [])


def _load(path: Path, on_bytes: Callable[[int], None]) -> Any:
    with Source(path, on_bytes) as source:
        data = source.read_all()
    if data[:1] in (b"{", b"["):
        return loads(path, data)
    try:
        _check(data)
        return _Plain(io.BytesIO(data)).load()
    except TraceError as error:
        raise TraceError(f"{path} is not a plain dump: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise TraceError(f"{path} is neither JSON nor a whole pickle ({type(error).__name__}): dump it again") from None


def _check(data: bytes) -> None:
    """Refuse a pickle that claims memory that it does not fill: a place in the memo far beyond what was put there."""
    for n, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if "PUT" in opcode.name and int(argument or 0) > n:
            raise TraceError("it asks for more memory than it fills: it was not read")
