"""Import of PyTorch's Flight Recorder dumps (pickle or JSON): one file per rank.

Times are the host's: when a call was enqueued and, with TORCH_NCCL_ENABLE_TIMING=1, how long its kernel took; the end
is when the watchdog saw it.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

from ..assemble import DTYPE_BYTES
from ..files import TraceError
from .common import Imported, comm_id_of, dtype_of, func_of, rank_in_name, ranks_of
from .json_stream import Source, loads


def read(paths: list[Path]) -> Imported:
    """Read one dump a rank. Raises TraceError for files that are not the Flight Recorder's."""
    found = Imported()
    for order, path in enumerate(paths):
        dump = _load(path)
        if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
            raise TraceError(f"{path} is no Flight Recorder dump: it has no entries")
        if version := (dump.get("nccl_version") or dump.get("comm_lib_version")):
            found.header["nccl"] = str(version)
        rank = int(rank_in_name(path, order) if dump.get("rank") is None else dump["rank"])
        for entry in dump["entries"]:
            found.header["backend"] = str(entry.get("profiling_name", "")).partition(":")[0]
            if func := func_of(str(entry.get("profiling_name", ""))):
                found.events.append({"rank": rank, "pid": rank, "func": func, **_call(entry, dump, found)})
    if found.events and all(e["start_ns"] is None for e in found.events):
        found.notes.append("no durations: the job ran without TORCH_NCCL_ENABLE_TIMING=1, there are no times")
    return found


def _call(entry: dict[str, Any], dump: dict[str, Any], found: Imported) -> dict[str, Any]:
    """What an entry says of its call."""
    name, ranks = _group(entry, dump.get("pg_config"))
    comm_id = comm_id_of(name, ranks)
    found.groups[comm_id] = ranks
    types = (entry.get("output_dtypes") or []) + (entry.get("input_dtypes") or [])
    dtype = dtype_of(str(types[0])) if types else "unknown"
    sides = entry.get("input_sizes") or [], entry.get("output_sizes") or []
    elements = max(sum(math.prod(map(int, size)) for size in sizes) for sizes in sides)
    duration, end = (entry.get(name) or 0 for name in ("duration_ms", "time_discovered_completed_ns"))
    timed = bool(duration and end)
    return {
        "comm_id": comm_id,
        "n_ranks": len(ranks),
        "dtype": dtype,
        "n_bytes": elements * DTYPE_BYTES.get(dtype, 1),
        "seq": entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"),
        "enqueue_ns": int(entry.get("time_created_ns") or 0),
        "start_ns": int(end) - round(float(duration) * 1e6) if timed else None,
        "end_ns": int(end) if timed else None,
    }


def _group(entry: dict[str, Any], configs: Any) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of an entry's process group; the ranks are () where the dump does not list them."""
    group = entry.get("process_group") or [entry.get("pg_id", "")]
    name = str(group[0] if isinstance(group, list | tuple) else group)
    configs = configs if isinstance(configs, dict) else {}
    # A gloo job's one group has no name there.
    config = configs.get(name) or (next(iter(configs.values())) if len(configs) == 1 else None)
    return name, ranks_of(config.get("ranks", ())) if isinstance(config, dict) else ()


class _Plain(pickle.Unpickler):
    """Unpickles numbers, text, lists and dictionaries, and nothing else: a pickle from elsewhere can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"it refers to {module}.{name}, which no Flight Recorder dump does: it was not read")


def _load(path: Path) -> Any:
    with Source(path) as source:
        data = source.read_all()
    if data[:1] in (b"{", b"["):
        return loads(path, data)
    try:
        for n, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if "PUT" in opcode.name and int(argument or 0) > n:  # a place in the memo far beyond what was put there
                raise TraceError("it asks for more memory than it fills: it was not read")
        return _Plain(io.BytesIO(data)).load()
    except TraceError as error:
        raise TraceError(f"{path} is not a plain dump: {error}") from None
    except Exception:  # a damaged pickle can raise anything
        raise TraceError(f"{path} is neither JSON nor a whole pickle: dump it again") from None
