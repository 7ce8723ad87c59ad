"""Dumps of PyTorch's Flight Recorder (JSON, or a pickle of plain values): one file a rank.

They tell which collectives a rank asked for, and when. Durations are there only with TORCH_NCCL_ENABLE_TIMING=1; their
ends are when the watchdog saw them. A dump marks no steps.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from ..names import DTYPE_BYTES
from ..outside import TraceError, blocks, said
from .found import MOST_RANKS, Found, Gaps, Process, comm_id_of, dtype_of, func_of, many, rank_in_name
from .json_stream import mended

#: A dump holds some thousand calls; more bytes than this is none.
MOST_BYTES = 512 << 20
GAPS = Gaps(
    rank="name the files rank0.json, rank1.json ...",
    times="no durations in it: run the job with TORCH_NCCL_ENABLE_TIMING=1",
    steps="the Flight Recorder marks no steps: what part of a step calls take is not known",
)
#: What an entry is in place of a call.
_ODD, _OF_GLOO = "not whole", "of gloo"
_WRONG = (KeyError, TypeError, ValueError, OverflowError, AttributeError, IndexError)


def read(file: Path, found: Found) -> None:
    """Read a dump. Raises TraceError for a file of others, for one without calls, and for one of gloo."""
    dump = _load(file)
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise TraceError(f"{file} is no Flight Recorder dump: it has no entries")
    if version := (dump.get("nccl_version") or dump.get("comm_lib_version")):
        found.header["nccl"] = _text(version)
    entries = dump["entries"]
    calls = [_read_call(entry, dump.get("pg_config"), found) for entry in entries]
    process = _process(file, dump)
    process.calls = [call for call in calls if isinstance(call, dict)]
    left_out = Counter(call for call in calls if isinstance(call, str))
    if not process.calls:
        raise TraceError(_why_nothing(file, left_out))
    found.notes += [f"{file.name}: left out {many(n, 'call')} {what}" for what, n in left_out.items()]
    found.processes.append(process)


def _why_nothing(file: Path, left_out: Counter[str]) -> str:
    """What to say of a dump without a call of NCCL, and with so many others."""
    seen = " and ".join(f"{many(n, 'call')} {what}" for what, n in left_out.items()) or "no call"
    return f"{file} holds {seen}, none of NCCL: record a job over NCCL, and dump while it runs"


def _process(file: Path, dump: dict[str, Any]) -> Process:
    """The process of a dump, with what tells its rank."""
    process = Process(file, told=dump["rank"] if type(dump.get("rank")) is int else None)
    tail = file.name.rpartition("_")[2]
    if rank_in_name(file) is None and tail.isdecimal() and int(tail) < MOST_RANKS:  # a date is no rank
        process.called.add(int(tail))  # TORCH_NCCL_DEBUG_INFO_TEMP_FILE ends in an underscore and the rank
    return process


def _read_call(entry: Any, configs: Any, found: Found) -> dict[str, Any] | str:
    """An entry's call, or why it is none: _ODD or _OF_GLOO."""
    try:
        return _call(entry, configs, found)
    except _WRONG:
        return _ODD


def _call(entry: dict[str, Any], configs: Any, found: Found) -> dict[str, Any] | str:
    """An entry's call, or _OF_GLOO. Raises one of _WRONG where the entry is not whole."""
    backend, _, name = _text(entry["profiling_name"]).rpartition(":")
    if backend == "gloo":
        return _OF_GLOO
    asked = int(entry.get("time_created_ns") or 0)
    func = func_of(name)
    if func is None:
        return {"func": None, "enqueue_ns": asked}
    group, ranks = _group(entry, configs)
    comm_id = comm_id_of(group, ranks)
    found.groups[comm_id] = ranks
    dtype, elements = _size(entry)
    return {
        "comm_id": comm_id,
        "n_ranks": len(ranks),
        "func": func,
        "dtype": dtype,
        "n_bytes": elements * DTYPE_BYTES.get(dtype, 1),
        "seq": _seq(entry),
        "enqueue_ns": asked,
        **_times(entry),
    }


def _size(entry: dict[str, Any]) -> tuple[str, int]:
    """Element type of a call, and elements of its larger side."""
    types = (entry.get("output_dtypes") or []) + (entry.get("input_dtypes") or [])
    dtype = dtype_of(_text(types[0])) if types else "unknown"
    sides = entry.get("input_sizes") or [], entry.get("output_sizes") or []
    elements = max(sum(math.prod(map(int, size)) for size in sizes) for sizes in sides)
    return dtype, elements


def _times(entry: dict[str, Any]) -> dict[str, int | None]:
    """Start and end of a call in nanoseconds, both None where the dump holds no duration."""
    duration = entry.get("duration_ms") or 0
    end = entry.get("time_discovered_completed_ns") or 0
    if not (duration and end):
        return {"start_ns": None, "end_ns": None}
    return {"start_ns": int(end) - round(float(duration) * 1e6), "end_ns": int(end)}


def _text(value: Any) -> str:
    """A text or a number as text. Raises TypeError for other values: a pickle's lists may hold themselves."""
    if not isinstance(value, str | int | float):
        raise TypeError("no text")
    return str(value)


def _seq(entry: dict[str, Any]) -> int | None:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    return int(number) if number is not None else None


def _group(entry: dict[str, Any], configs: Any) -> tuple[str, tuple[int, ...]]:
    """Name and ranks of an entry's process group; the ranks are () where the dump does not list them."""
    group = entry.get("process_group") or [entry.get("pg_id", "")]
    name = _text(group[0] if isinstance(group, list | tuple) else group)
    config = configs.get(name) if isinstance(configs, dict) else None
    listed = config.get("ranks") if isinstance(config, dict) else ()
    if isinstance(listed, str):
        listed = orjson.loads(listed)
    return name, tuple(map(int, listed or ()))


class _Plain(pickle.Unpickler):
    """Unpickles numbers, text, lists and dictionaries, and nothing else: a pickle from elsewhere can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        raise TraceError(f"it refers to {module}.{name}, which no Flight Recorder dump does")


def _load(file: Path) -> Any:
    """The dump in a file. Raises TraceError for other files."""
    data = b""
    for block in blocks(file):
        data += block
        if len(data) > MOST_BYTES:
            raise TraceError(f"{file} is over {MOST_BYTES >> 20} MiB: that is no Flight Recorder dump")
    if data[:1] == b"\x80":
        return _unpickled(file, data)
    for text in (data, mended(data)):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            reason = error
    raise TraceError(f"{file} is not JSON ({reason}): was it copied whole?")


def _unpickled(file: Path, data: bytes) -> Any:
    cure = "dump it as JSON: torch._C._distributed_c10d._dump_nccl_trace_json()"
    try:
        for place, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if "PUT" in opcode.name and int(argument or 0) > place:  # far beyond what was put there
                raise TraceError("it asks for more memory than it fills")
        return _Plain(io.BytesIO(data)).load()
    except TraceError as error:
        raise TraceError(f"{file} was not read: {error}; {cure}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise TraceError(
            f"{file} is no whole pickle of {len(data):,} bytes ({said(error)}); {cure}"
        ) from None
