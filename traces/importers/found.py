"""What every reader of other tools' files fills in: the calls of each process, and what the files do not say.

A reader takes one file at a time. It decides nothing: which rank a process is, which step holds a call and what is left
out is decided by :mod:`.whose`, in one way for all formats.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..names import ALGOS, DTYPE_BYTES, PROTOS

#: PyTorch's names of types that are not ours.
_ALIASES = {"char": "int8", "byte": "uint8", "bool": "uint8", "int": "int32", "long": "int64"}
_ALIASES |= {"half": "float16", "float": "float32", "double": "float64"}
#: More ranks than this is no job.
MOST_RANKS = 1 << 22
#: Collectives by the begin of their names, the longer of two first.
_FUNCS = ("reduce_scatter", "all_gather", "all_reduce", "send_recv", "broadcast", "reduce", "send", "recv")
_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)|^r(\d+)[-_.]", re.IGNORECASE)
#: What to say of calls that no marked step holds.
OUTSIDE = "left out: {calls} that no marked step holds"
#: The algorithm of a call that ran one of NCCL's symmetric kernels: no tuner is asked about it.
SYMMETRIC = "symmetric"
#: Messages of these are given per rank by NCCL's own tools; a trace holds the bytes of all ranks.
PER_RANK = ("all_gather", "reduce_scatter")


@dataclass
class Gaps:
    """What a format's reader says, with the cure, where files of it lack something; empty: there is nothing to say."""

    calls: str = ""  # how to record so that every call says which collective it is
    rank: str = ""  # how to record so that a file says which rank it is of
    times: str = ""
    steps: str = ""
    compute: str = ""
    choice: str = ""  # what NCCL chose


class Member(NamedTuple):
    """A process's part in a communicator, as it made it."""

    n_ranks: int
    rank: int


class Marks:
    """The steps that a process marked, in order: (begin, duration, step), times in ns."""

    def __init__(self, marks: Iterable[tuple[int, int, int]] = ()) -> None:
        self.marks = sorted(marks)
        self._begins = [begin for begin, _, _ in self.marks]

    @property
    def steps(self) -> frozenset[int]:
        """The steps' numbers."""
        return frozenset(step for _, _, step in self.marks)

    def step_at(self, ns: int) -> int | None:
        """The step that ran at a time, None where none did; 0 without marks."""
        if not self.marks:
            return 0
        at = bisect.bisect_right(self._begins, ns) - 1
        begin, lasts, step = self.marks[at]
        return step if begin <= ns < begin + lasts else None


@dataclass(eq=False)
class Process:
    """What one process left in one file, in the file's own words.

    A call is a row with ``comm_id``, ``n_ranks``, ``func``, ``n_bytes`` and ``enqueue_ns``, and others of
    EVENT_COLUMNS. ``func`` None: none of FUNCS. ``untold``: the file does not say which. A missing ``seq`` is counted.
    Without ranks of processes calls have their own ``rank``; ``once``: what no second file may hold.
    """

    file: Path
    calls: list[dict[str, Any]] = field(default_factory=list)
    marks: Marks = field(default_factory=Marks)
    outside: str = OUTSIDE  # what to say of calls that no step holds
    unsaid: int = 0  # further calls, without a time, of which nothing is told
    compute: Any = None  # begins and ends of its other kernels, ns, (2, n)
    number: int | None = None  # of a log's process, among those of all hosts: see process_of
    told: int | None = None  # its rank, as the file says
    called: set[int] = field(default_factory=set)  # its rank, as its calls say
    comms: dict[int, Member] = field(default_factory=dict)  # the communicators that it made

    @property
    def holds_calls(self) -> bool:
        """Whether NCCL was called, told or not."""
        return bool(self.calls or self.unsaid)


@dataclass
class Found:
    """What a file holds, or all files of a job together."""

    processes: list[Process] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counted: Counter[str] = field(
        default_factory=Counter
    )  # a note with the places {calls} and {n} -> how many
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)  # comm_id -> ranks, () where not told
    nodes: dict[int, int] = field(
        default_factory=dict
    )  # comm_id -> nodes, where they are told apart from the calls
    nothing: list[str] = field(default_factory=list)  # what was seen in place of calls, where there are none

    def add(self, other: Found) -> None:
        """Take in what another file holds."""
        self.processes += other.processes
        self.header |= other.header
        self.notes += [note for note in other.notes if note not in self.notes]
        self.counted += other.counted
        self.groups = {**other.groups, **self.groups}
        self.nodes |= other.nodes
        self.nothing += other.nothing


#: Reads one file. Raises TraceError for a file that is none of its format: it is left out.
Reader = Callable[[Path, Found], None]


def many(n: int, noun: str) -> str:
    """``1 event``, ``2 events``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


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
    return comm_id_of("process", host, pid) % (1 << 62)


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
