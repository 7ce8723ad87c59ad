"""Chakra execution traces, in and out: one file a rank, as ASTRA-sim and SimAI read them.

A file is a row of protobuf messages, each after its length: one GlobalMetadata, then Nodes. Written after the public
schema (mlcommons/chakra, schema/protobuf/et_def.proto), of which only the fields below are read or written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .files import Trace, TraceError
from .importers_common import Imported, comm_id_of, rank_in_name
from .json_stream import Source

COMP_NODE, COMM_COLL_NODE = 4, 7
#: CollectiveCommType -> our name.
_FUNCS = {0: "all_reduce", 1: "reduce", 2: "all_gather", 5: "broadcast", 7: "reduce_scatter", 8: "reduce_scatter"}
_TYPES = {name: number for number, name in reversed(_FUNCS.items())}
#: Fields of AttributeProto that hold a value of one kind: varints, zigzag varints, fixed, text.
_VARINT, _ZIGZAG, _TEXT = (7, 9, 11, 13, 27), (15, 17), (29, 31)
_FIXED = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}
_MOST = 1 << 20  # bytes of one node


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read one trace a rank. Raises TraceError for files that are no Chakra traces."""
    found = Imported()
    for order, path in enumerate(paths):
        rank = rank_in_name(path, order)
        with Source(path, on_bytes) as source:
            data = memoryview(source.read_all())
        try:
            _read_one(data, rank, found)
        except (IndexError, ValueError, struct.error, OverflowError, UnicodeDecodeError) as error:
            raise TraceError(f"{path} is no whole Chakra trace ({type(error).__name__}: {error})") from None
    sizes: dict[int, set[int]] = {}
    for row in found.events:
        sizes.setdefault(row["comm_id"], set()).add(row["rank"])
    for row in found.events:  # a process group's size stands in the trace's inputs only; its ranks are these files
        row["n_ranks"] = row["n_ranks"] or len(sizes[row["comm_id"]])
    if len(paths) == 1 and not any(row["n_ranks"] > 1 for row in found.events):
        found.notes.append("one rank's trace does not tell how many there are: it is taken to be the whole cluster")
        for row in found.events:
            row["n_ranks"] = 0
    return found


def _read_one(data: memoryview, rank: int, found: Imported) -> None:
    at, first, n_nodes = 0, True, 0
    while at < len(data):
        size, at = _varint(data, at)
        if size > _MOST or at + size > len(data):
            raise ValueError(f"a message of {size} bytes at {at}")
        message = data[at : at + size]
        at += size
        if first:
            first = False
            if not any(number == 1 for number, _ in _fields(message)):
                raise ValueError("it does not begin with a version")
            continue
        n_nodes += 1
        _node(message, rank, found)
    if not n_nodes:
        raise ValueError("it holds no nodes")


def _node(message: memoryview, rank: int, found: Imported) -> None:
    node: dict[int, Any] = {}
    attributes: dict[str, Any] = {}
    for number, value in _fields(message):
        if number == 10:
            key, told = _attribute(value)
            attributes[key] = told
        else:
            node[number] = value
    start, duration = 1000 * int(node.get(6, 0)), 1000 * int(node.get(7, 0))
    kind, name = node.get(3, 0), bytes(node.get(2, b"")).decode()
    if kind == COMM_COLL_NODE:
        func = _FUNCS.get(int(attributes.get("comm_type", -1)))
        if func is None:
            return
        group = str(attributes.get("pg_name", ""))
        row = {"comm_id": comm_id_of("chakra", group), "rank": rank, "pid": rank, "func": func}
        n_ranks = int(attributes.get("comm_group_size", 0))
        row |= {"n_bytes": int(attributes.get("comm_size", 0)), "n_ranks": n_ranks, "enqueue_ns": start}
        timed = duration > 0
        row |= {"start_ns": start if timed else None, "end_ns": start + duration if timed else None}
        found.events.append(row)
    elif kind == COMP_NODE and not attributes.get("is_cpu_op", False) and duration:
        index = np.array([found.compute.names.setdefault(name, len(found.compute.names))])
        begin, zero = np.array([start]), np.array([0])
        found.compute.add(rank, begin, begin + duration, index, zero, zero)


def _attribute(message: Any) -> tuple[str, Any]:
    name, value = "", None
    for number, raw in _fields(message):
        if number == 1:
            name = bytes(raw).decode()
        elif number in _VARINT:
            value = raw - (1 << 64) if number in (7, 9) and raw >= 1 << 63 else raw
        elif number in _ZIGZAG:
            value = (raw >> 1) ^ -(raw & 1)
        elif number in _FIXED:
            value = struct.unpack(_FIXED[number], raw)[0]
        elif number in _TEXT:
            value = bytes(raw).decode()
    return name, value


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: an int for varints, the bytes for all others."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("a field is cut short")
        yield number, message[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def write(trace: Trace, folder: Path) -> list[Path]:
    """Write a trace's collectives as ``rank.N.et``, each node after the one before it on its stream; the files.

    What is lost: algorithm, protocol, channels, tables, steps; times are in whole microseconds from the first call.
    Raises TraceError when the trace holds no collective that Chakra has.
    """
    events = trace.events[trace.events["func"].isin(tuple(_TYPES))].sort_values("enqueue_ns", kind="stable")
    if events.empty:
        raise TraceError(f"{trace.folder} holds no collective that a Chakra trace can say")
    folder.mkdir(parents=True, exist_ok=True)
    zero, files = int(events["enqueue_ns"].min()), []
    for rank, group in events.groupby("rank"):
        out = bytearray(_framed(_text(1, "0.0.4")))
        for number, row in enumerate(group.to_dict("records"), 1):
            timed = not pd.isna(row["start_ns"])
            begin = int(row["start_ns"] if timed else row["enqueue_ns"])
            lasts = int(row["end_ns"]) - begin if timed else 0
            told = _number(1, number) + _text(2, str(row["func"])) + _number(3, COMM_COLL_NODE)
            told += _number(5, number - 1) if number > 1 else b""
            told += _number(6, max(0, begin - zero) // 1000) + _number(7, lasts // 1000)
            for key, value in (("comm_type", _TYPES[str(row["func"])]), ("comm_size", int(row["n_bytes"]))):
                told += _bytes(10, _text(1, key) + _number(9, value))
            told += _bytes(10, _text(1, "comm_group_size") + _number(9, int(row["n_ranks"])))
            told += _bytes(10, _text(1, "is_cpu_op") + _number(27, 0))
            told += _bytes(10, _text(1, "pg_name") + _text(29, f"{int(row['comm_id']):x}"))
            out += _framed(told)
        files.append(folder / f"rank.{rank}.et")
        files[-1].write_bytes(out)
    return files


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _framed(message: bytes) -> bytes:
    return _encoded(len(message)) + message


def _number(field: int, value: int) -> bytes:
    return _encoded(field << 3) + _encoded(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _encoded(field << 3 | 2) + _framed(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())
