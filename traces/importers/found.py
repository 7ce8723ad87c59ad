"""What every reader of other tools' files fills in: rows of events and steps, and what the files do not say."""

from __future__ import annotations

import bisect
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..assemble import COMPUTE_COLUMNS, EVENT_COLUMNS, STEP_COLUMNS, complete, empty
from ..files import TraceError
from ..names import ALGOS, DTYPE_BYTES, PROTOS
from .json_stream import many

#: PyTorch's names of types that are not ours.
_ALIASES = {"char": "int8", "byte": "uint8", "bool": "uint8", "int": "int32", "long": "int64"}
_ALIASES |= {"half": "float16", "float": "float32", "double": "float64"}
#: Columns of events and of steps that no other tool records: 0.
_NOT_RECORDED = dict.fromkeys(("table_generation", "captured", "asked_bytes"), 0)
_NOT_RECORDED |= dict.fromkeys(("memory_used", "memory_total", "sampled", "sample_every"), 0)
#: Columns of an event that a reader may leave out, and their values then.
_EVENT_DEFAULTS = {
    "dtype": "unknown",
    "algo": "unknown",
    "proto": "unknown",
    "n_channels": 0,
    "n_nodes": 0,
    "step": 0,
    "seq": None,
    "start_ns": None,
    "end_ns": None,
}
#: More ranks than this is no job.
MOST_RANKS = 1 << 22
#: What an event's numbers stay below; a damaged file holds anything.
_BELOW = {
    "rank": MOST_RANKS,
    "n_ranks": MOST_RANKS,
    "n_channels": 1 << 15,
    "n_bytes": 1 << 60,
    "seq": 1 << 62,
    "pid": 1 << 62,
    "step": 1 << 62,
    "enqueue_ns": 1 << 62,
    "start_ns": 1 << 62,
    "end_ns": 1 << 62,
}
#: Collectives by the begin of their names, the longer of two first.
_FUNCS = ("reduce_scatter", "all_gather", "all_reduce", "send_recv", "broadcast", "reduce", "send", "recv")
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)|^r(\d+)[-_.]", re.IGNORECASE)
#: What to say of calls that no marked step holds.
OUTSIDE = "left out: {} that no marked step holds"
#: The algorithm of a call that ran one of NCCL's symmetric kernels: no tuner is asked about it.
SYMMETRIC = "symmetric"
#: Messages of these are given per rank by NCCL's own tools; a trace holds the bytes of all ranks.
PER_RANK = ("all_gather", "reduce_scatter")


#: A file, and the steps of a rank that it holds.
_Owner = tuple[Path, frozenset[int]]


class NoRankError(Exception):
    """Nothing in a file and nothing in its name says which rank it is of."""


@dataclass
class LeftOut:
    """Calls of NCCL that a reader had to leave out: how many, and their GPU time in ns beside that of those it read."""

    calls: int = 0
    ns: int = 0
    read_ns: int = 0

    def share(self) -> str:
        """The part of NCCL's GPU time that was left out, for people; empty where no times are known."""
        total = self.ns + self.read_ns
        return f", {self.ns / total:.0%} of NCCL's time," if total else ""


@dataclass
class Gaps:
    """What a format's reader says, with the cure, where files of it lack something; empty: there is nothing to say."""

    calls: str = ""  # how to record so that every call says which collective it is
    times: str = ""
    steps: str = ""
    compute: str = ""


@dataclass
class Found:
    """What the files of a job hold: rows of EVENT_COLUMNS and STEP_COLUMNS, facts for the header, notes for people.

    An event needs ``comm_id``, ``rank``, ``n_ranks``, ``func``, ``n_bytes``, ``enqueue_ns`` and ``pid``, which is of
    one process among all hosts: see :func:`process_of`. An event without a ``seq`` gets one by counting.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # comm_id -> ranks, () where not told
    computes: list[pd.DataFrame] = field(default_factory=list)  # parts of COMPUTE_COLUMNS
    left_out: LeftOut = field(default_factory=LeftOut)
    gaps: Gaps = field(default_factory=Gaps)
    owners: dict[int, list[_Owner]] = field(default_factory=dict)  # by rank
    outside: Counter[str] = field(
        default_factory=Counter
    )  # what to say of calls that no step holds -> how many

    def claim(self, file: Path, rank: int, steps: Collection[int]) -> None:
        """Note that a file holds these steps of a rank.

        Raises TraceError if another file holds one of them too, or if one of the two marks no steps: they would be
        added up.
        """
        mine = frozenset(steps)
        for other, theirs in self.owners.get(rank, []):
            shared = mine & theirs
            if shared or not mine or not theirs:
                what = (
                    f"step {min(shared)} of rank {rank}" if shared else f"rank {rank}, and one marks no steps"
                )
                raise TraceError(
                    f"{other} and {file} both hold {what}: give one file a rank; "
                    "to compare two recordings put each into its own folder"
                )
        self.owners.setdefault(rank, []).append((file, mine))

    def add(self, event: dict[str, Any]) -> None:
        """Add an event; one whose numbers cannot be is counted as left out."""
        numbers = ((event.get(name), below) for name, below in _BELOW.items())
        if all(value is None or 0 <= value < below for value, below in numbers):
            self.events.append(event)
        else:
            self.left_out.calls += 1

    def add_symmetric(self, n_calls: int) -> None:
        """Say that calls ran symmetric kernels."""
        if n_calls:
            kernels = "a symmetric kernel" if n_calls == 1 else "symmetric kernels"
            self.notes.append(f"{many(n_calls, 'call')} ran {kernels}, which no table reaches")

    def add_steps(self, rank: int, marks: Marks) -> None:
        """Add the steps of a rank, which also stands for its process: process ids repeat on other hosts."""
        for begin, lasts, step in marks.marks:
            row = {"rank": rank, "pid": rank, "index": step}
            self.steps.append({**row, "end_ns": begin + lasts, "duration_ns": lasts})

    def add_compute(self, rank: int, start_ns: Any, end_ns: Any) -> None:
        """Add the times of a rank's other kernels, two arrays (n,) of ns."""
        if len(start_ns):
            part = pd.DataFrame({"rank": rank, "start_ns": start_ns, "end_ns": end_ns})
            self.computes.append(part.astype(COMPUTE_COLUMNS))

    def event_frame(self, ranks_per_node: int | None) -> pd.DataFrame:
        """The events as EVENT_COLUMNS, in the order in which they were enqueued."""
        # As objects: a column with gaps must not become float64, clock values have more digits than that.
        filled = [{**_EVENT_DEFAULTS, **event} for event in self.events]
        events = pd.DataFrame(filled, dtype=object).assign(**_NOT_RECORDED)
        events = events.sort_values("enqueue_ns", kind="stable", ignore_index=True)
        counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
        events["seq"] = events["seq"].where(events["seq"].notna(), counted)
        if ranks_per_node:
            is_open = events["n_nodes"] == 0
            nodes = self._nodes(events[is_open], ranks_per_node)
            events["n_nodes"] = events["n_nodes"].where(~is_open, events["comm_id"].map(nodes))
        return complete(events, EVENT_COLUMNS)

    def _nodes(self, events: pd.DataFrame, ranks_per_node: int) -> dict[int, int]:
        """comm_id -> number of nodes that its ranks lie on; a note where these are not told."""
        nodes = {}
        comms = events[["comm_id", "n_ranks"]].drop_duplicates("comm_id")
        untold = []
        for comm_id, n_ranks in comms.to_numpy():
            ranks = self.groups.get(comm_id) or range(n_ranks)
            nodes[comm_id] = len({rank // ranks_per_node for rank in ranks})
            if comm_id not in self.groups or not self.groups[comm_id]:
                untold.append(n_ranks)
        if any(n_ranks > 1 for n_ranks in untold):
            self.notes.append(
                "on which nodes the ranks of a group lie: assumed packed on as few as hold them"
            )
        return nodes

    def step_frame(self) -> pd.DataFrame:
        """The steps as STEP_COLUMNS, in order; empty where the files mark none."""
        if not self.steps:
            return empty(STEP_COLUMNS)
        rows = pd.DataFrame(self.steps).assign(**_NOT_RECORDED)
        steps = complete(rows, STEP_COLUMNS)
        return steps.sort_values(["index", "rank"], ignore_index=True)


def algo_in_kernel(name: str) -> str:
    """The algorithm that a kernel's name tells for sure: SYMMETRIC or 'unknown'."""
    return SYMMETRIC if "Symk" in name else "unknown"


def func_of(name: str) -> str | None:
    """A collective's name as PyTorch or NCCL writes it -> one of FUNCS; None if it is none of them.

    ``_allgather_base``, ``AllGather`` and ``nccl:_all_gather_base`` are all ``all_gather``.
    """
    text = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    for func in _FUNCS:
        if text.startswith(func.replace("_", "")):
            return func
    return None


def dtype_of(name: str) -> str:
    """A type's name as PyTorch or NCCL writes it -> ours; 'unknown' if NCCL has no such type: its counts are bytes."""
    plain = name.lower().removeprefix("torch.").removeprefix("nccl")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in DTYPE_BYTES else "unknown"


def algo_of(name: str) -> str:
    """An algorithm's name or number as NCCL logs it -> one of ALGOS, or 'unknown'."""
    return _named(name, ALGOS)


def proto_of(name: str) -> str:
    """A protocol's name or number as NCCL logs it -> one of PROTOS, or 'unknown'."""
    return _named(name, PROTOS)


def _named(name: str, known: tuple[str, ...]) -> str:
    text = name.strip().lower()
    if text.isdecimal() and int(text) < len(known):
        return known[int(text)]
    plain = {value.replace("_", ""): value for value in known}
    return plain.get(text.replace("_", ""), "unknown")


def comm_id_of(*parts: Any) -> int:
    """A 64-bit id for a communicator that the source names instead of numbering; the same on every rank."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def process_of(host: Any, pid: int) -> int:
    """An id for a process among those of all hosts: process ids repeat on other hosts, in containers always."""
    return comm_id_of("process", host, pid) % _BELOW["pid"]


def whole_bytes(func: str, n_bytes: int, n_ranks: int) -> int:
    """Bytes of all ranks of a message that NCCL's tools give per rank."""
    return n_bytes * n_ranks if func in PER_RANK and n_ranks > 0 else n_bytes


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name tells: ``trace_rank_3.json``, ``rank3.json``, ``r3-2025-3-14.json``; None otherwise.

    No other number in a name is a rank: they are dates, times and process ids.
    """
    found = _RANK_IN_NAME.search(path.name)
    rank = int(found[1] or found[2]) if found else MOST_RANKS
    return rank if rank < MOST_RANKS else None


class Marks:
    """The steps that a process marked, in order: (begin, duration, step), times in ns."""

    def __init__(self, marks: Iterable[tuple[int, int, int]]) -> None:
        self.marks = sorted(marks)
        self._begins = [begin for begin, _, _ in self.marks]

    @property
    def steps(self) -> list[int]:
        """The steps' numbers."""
        return [step for _, _, step in self.marks]

    def step_at(self, ns: int) -> int | None:
        """The step that ran at a time, None where none did; 0 without marks."""
        if not self.marks:
            return 0
        at = bisect.bisect_right(self._begins, ns) - 1
        begin, lasts, step = self.marks[at]
        return step if begin <= ns < begin + lasts else None
