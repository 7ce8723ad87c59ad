"""The records that every part of dynamiccl shares: names of the knobs, Slot, Decision, Rule, Table.

Spelling: Python says ``all_gather``, ``ring``, ``ll128`` (lower case, torch.distributed's and NVIDIA's tuner-file
spelling); C and shared memory say NCCL's numbers: the index in the tuples of :mod:`.names`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from .names import ALGOS as ALGOS
from .names import ALL_REDUCE, ALL_REDUCE_WAYS
from .names import CHANNELS as CHANNELS
from .names import FUNCS as FUNCS
from .names import PAIRS as PAIRS
from .names import PAIRS_OF as PAIRS_OF
from .names import PROTOS as PROTOS
from .names import TUNED_FUNCS as TUNED_FUNCS

N_ALGOS, N_PROTOS = len(ALGOS), len(PROTOS)
UNSET = 255  # algo / proto byte in shared memory: NCCL decides


@dataclass(frozen=True, order=True)
class Decision:
    """What is chosen for one slot. ``None`` (or 0 channels) leaves that knob to NCCL.

    ``algo`` and ``proto`` are set together or not at all: NCCL's cost table is indexed by the pair.
    """

    algo: str | None = None
    proto: str | None = None
    n_channels: int = 0

    def __post_init__(self) -> None:
        if (self.algo is None) != (self.proto is None):
            raise ValueError("algo and proto are set together or left unset together")
        if self.algo is not None and (self.algo not in ALGOS or self.proto not in PROTOS):
            raise ValueError(
                f"unknown algorithm or protocol {self.algo}/{self.proto}; know {ALGOS} x {PROTOS}"
            )
        if not 0 <= self.n_channels <= 64:
            raise ValueError(f"n_channels is 0 (NCCL decides) to 64, not {self.n_channels}")

    @property
    def is_auto(self) -> bool:
        """True when everything is left to NCCL."""
        return self.algo is None and self.n_channels == 0

    def __str__(self) -> str:
        pair = f"{self.algo}/{self.proto}" if self.algo else "auto"
        return f"{pair}/{self.n_channels}" if self.n_channels else pair


AUTO = Decision()


def decision_from(text: str) -> Decision:
    """Inverse of ``str(Decision)``: ``ring/ll128/8``, ``auto/4``, ``auto``. Raises ValueError for other text."""
    parts = text.split("/")
    count = int(parts.pop()) if parts[-1].isdigit() else 0
    if parts == ["auto"]:
        return Decision(None, None, count)
    if len(parts) != 2:
        raise ValueError(f"{text!r} is no decision: it looks like ring/ll128/8 or auto")
    return Decision(parts[0], parts[1], count)


def decided(row: Mapping[str, Any]) -> str:
    """The decision of a summary's row (``algo, proto, n_channels``, each may be None), e.g. ``ring/ll128/16``."""
    return str(Decision(row.get("algo"), row.get("proto"), int(row.get("n_channels") or 0)))


def size_class(n_bytes: int) -> int:
    """Power-of-two class of a message: class ``k`` holds sizes in ``(2**(k-1), 2**k]`` bytes."""
    return max(int(n_bytes) - 1, 0).bit_length()


@dataclass(frozen=True, order=True)
class Slot:
    """One tunable place: (class of communicators, collective, size class), all that the plugin can tell apart.

    The class is the communicator's number of ranks and of nodes: equal shard groups share one decision, and a restart
    keeps it. (0, 0): all. Two roles of one shape and size class share a decision, which is right for neither or for
    both.
    """

    n_ranks: int
    n_nodes: int
    func: str
    size_class: int

    @property
    def min_bytes(self) -> int:
        """Smallest message of the class, inclusive."""
        return 0 if self.size_class == 0 else 2 ** (self.size_class - 1) + 1

    @property
    def max_bytes(self) -> int:
        """Largest message of the class, inclusive."""
        return 2**self.size_class

    def __str__(self) -> str:
        return f"{self.func} {format_range(self.min_bytes, self.max_bytes)}"


Decisions = Mapping[Slot, Decision]


def format_range(low: int, high: int) -> str:
    """Sizes from ``low`` to ``high`` bytes, both inclusive: ``33-64 MiB``; a class of small sizes in a smaller unit.

    The first number is the first whole one above the class below: 33-64 MiB holds all over 32 MiB.
    """
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
    unit = next((name for name, size in units.items() if high >= 4 * size), "B")
    first, last = -(-low // units[unit]), high / units[unit]
    text = f"{last:.0f}" if last == round(last) else f"{last:.1f}"
    return f"{first}-{text} {unit}" if first < last else f"{text} {unit}"


#: Format of tables in shared memory, on the wire and in the plugin.
TABLE_VERSION = 6

# One row of a table in shared memory and on the wire (C: struct dccl_rule in envs/nccl/plugin/plugin.h), 32 bytes.
RULE_DTYPE = np.dtype(
    [
        ("n_ranks", "<u4"),  # the class of communicators; both 0 match every communicator
        ("n_nodes", "<u4"),
        ("min_bytes", "<u8"),
        ("max_bytes", "<u8"),
        ("func", "u1"),
        ("algo", "u1"),
        ("proto", "u1"),
        ("n_channels", "u1"),
        ("threads", "<u4"),  # 0, or the row is a ceiling, see Rule
    ]
)
assert RULE_DTYPE.itemsize == 32


@dataclass(frozen=True)
class Rule:
    """One row: messages of ``func`` with ``min_bytes <= n_bytes <= max_bytes`` on communicators of one class.

    Class (n_ranks, n_nodes); (0, 0): every communicator whose class has no row. With ``threads`` a ceiling: NCCL's
    pair, and the channels that NCCL gives on a communicator of ``n_channels`` (``envs/nccl/untouched.py``).
    """

    n_ranks: int
    n_nodes: int
    func: str
    min_bytes: int
    max_bytes: int
    decision: Decision
    threads: int = 0  # of a ring's block under Simple, 256 or 512

    @classmethod
    def of(cls, slot: Slot, decision: Decision) -> Rule:
        """The row that applies ``decision`` to ``slot``."""
        return cls(slot.n_ranks, slot.n_nodes, slot.func, slot.min_bytes, slot.max_bytes, decision)


class Trial(NamedTuple):
    """How a table is tried: the fields of :class:`Table` with these names."""

    trial_steps: int = 0
    one_of: int = 0
    turn_steps: int = 0
    swap: int = 0


@dataclass(frozen=True)
class Table:
    """All decisions in force at once. A table without rows, or with ceilings alone, is NCCL untouched everywhere.

    ``trial_steps``: a trial, which ends by itself after about so many; 0: it stays. ``one_of``: it holds in one turn of
    so many. A turn is ``turn_steps`` steps, 0: one call. Two turns: A B B A (A: the trial); ``swap``: B A A B.
    """

    generation: int = 0
    rules: tuple[Rule, ...] = field(default=())
    trial_steps: int = 0
    one_of: int = 0
    turn_steps: int = 0
    swap: int = 0

    @property
    def deciding(self) -> tuple[Rule, ...]:
        """Its rows without the ceilings: none where NCCL is left untouched."""
        return tuple(rule for rule in self.rules if not rule.threads)

    @property
    def all_reduce(self) -> str:
        """What a job's option must say so that this table can hold: rows of all_reduce are the user's word, whatever
        algorithm they name."""
        return ALL_REDUCE_WAYS[-1] if any(rule.func == ALL_REDUCE for rule in self.deciding) else ""

    @property
    def trial(self) -> Trial:
        """What makes it a trial."""
        return Trial(self.trial_steps, self.one_of, self.turn_steps, self.swap)

    @classmethod
    def of(cls, generation: int, decisions: Decisions, *trial: int) -> Table:
        """Table with one row per slot whose decision is not AUTO; ``trial``: see :attr:`trial`."""
        return cls(
            generation, tuple(Rule.of(s, d) for s, d in sorted(decisions.items()) if not d.is_auto), *trial
        )

    def to_array(self) -> np.ndarray[Any, Any]:
        """Rows as RULE_DTYPE, sorted by (n_nodes, n_ranks, func, min_bytes) as the plugin's binary search needs.

        Raises ValueError when two rows of one class and collective overlap, or a class lacks one of its numbers.
        """
        rows = np.zeros(len(self.rules), RULE_DTYPE)
        for row, rule in zip(rows, sorted(self.rules, key=_rule_key), strict=True):
            d = rule.decision
            if (rule.n_ranks == 0) != (rule.n_nodes == 0):
                raise ValueError("a row names both ranks and nodes of its communicators, or neither")
            row["n_ranks"], row["n_nodes"], row["func"] = rule.n_ranks, rule.n_nodes, FUNCS.index(rule.func)
            row["min_bytes"], row["max_bytes"] = rule.min_bytes, rule.max_bytes
            row["algo"] = UNSET if d.algo is None else ALGOS.index(d.algo)
            row["proto"] = UNSET if d.proto is None else PROTOS.index(d.proto)
            row["n_channels"] = d.n_channels
            row["threads"] = rule.threads
        same = np.ones(max(len(rows) - 1, 0), bool)
        for name in ("n_ranks", "n_nodes", "func"):
            same &= rows[name][1:] == rows[name][:-1]
        if bool(np.any(same & (rows["min_bytes"][1:] <= rows["max_bytes"][:-1]))):
            raise ValueError("two rows of a table overlap: give each message size one row")
        return rows

    @classmethod
    def from_array(cls, generation: int, rows: np.ndarray[Any, Any], *trial: int) -> Table:
        """Inverse of :meth:`to_array`. Raises ValueError on numbers that no release knows."""
        return cls(generation, tuple(_rule(row) for row in rows), *trial)


def _rule_key(rule: Rule) -> tuple[int, int, int, int]:
    return rule.n_nodes, rule.n_ranks, FUNCS.index(rule.func), rule.min_bytes


def _rule(row: np.void) -> Rule:
    func, algo, proto = int(row["func"]), int(row["algo"]), int(row["proto"])
    if func >= len(FUNCS) or (algo != UNSET and algo >= N_ALGOS) or (proto != UNSET and proto >= N_PROTOS):
        raise ValueError(f"table row with unknown numbers: func {func}, algo {algo}, proto {proto}")
    decision = Decision(
        None if algo == UNSET else ALGOS[algo],
        None if proto == UNSET else PROTOS[proto],
        int(row["n_channels"]),
    )
    sizes = int(row["min_bytes"]), int(row["max_bytes"])
    shape = int(row["n_ranks"]), int(row["n_nodes"])
    return Rule(*shape, FUNCS[func], *sizes, decision, int(row["threads"]))


@dataclass
class Communicator:
    """A communicator as NCCL announced it; ``ranks`` maps each rank seen to the process that it lives in now."""

    comm_id: int
    n_ranks: int
    n_nodes: int
    name: str
    ranks: dict[int, int] = field(default_factory=dict)  # rank -> pid


@dataclass
class Offer:
    """What NCCL offered for one (comm_id, func, n_bytes)."""

    cost_us: np.ndarray[Any, Any]  # (N_ALGOS, N_PROTOS) float32 microseconds, -1 = not available
    algo: str  # NCCL's own choice
    proto: str
    n_pipe_ops: int
    is_registered: bool = False  # the communicator has had a call whose buffers are registered


# What the plugin and the probe write into a ring (C: struct dccl_record in envs/nccl/plugin/plugin.h), 128 bytes. The
# last 88 bytes depend on `kind`; the views below name them.
COMM, OFFER, COLL, KERNEL, STEP, STATE, WAIT = range(1, 8)
#: Bits of ``flags``: the communicator has had a call whose buffers are registered (OFFER), captured in a CUDA graph:
#: asked once, replayed often (COLL), kernel times were taken in it (STEP), the step is one turn's, or a part of one:
#: every communicator in turns made just one step's collectives, all under one table (STEP).
FLAG_REGISTERED, FLAG_CAPTURED, FLAG_SAMPLED, FLAG_WHOLE = 1, 2, 4, 16
#: As the generation of a STEP: several tables have answered in it.
MIXED = 2**32 - 1
_HEAD: list[Any] = [
    ("stamp", "<u8"),  # position in the ring + 1 once the record is whole
    ("kind", "u1"),
    ("func", "u1"),
    ("algo", "u1"),
    ("proto", "u1"),
    ("n_channels", "u1"),
    ("dtype", "u1"),  # ncclDataType_t as the profiler names it, UNSET if unknown
    ("flags", "<u2"),  # FLAG_*
    ("comm_id", "<u8"),
    ("n_bytes", "<u8"),  # the whole buffer: n_ranks x shard for all_gather / reduce_scatter
    ("step", "<u4"),
    ("generation", "<u4"),
]


def _record(kind_fields: list[Any]) -> np.dtype[Any]:
    head = np.dtype(_HEAD)
    body = np.dtype(kind_fields)
    assert head.itemsize == 40 and body.itemsize <= 88, body.itemsize
    return np.dtype([*_HEAD, *kind_fields, ("_pad", f"V{88 - body.itemsize}")])


#: A communicator was made: its size. `name` is NCCL's, NUL-padded.
COMM_DTYPE = _record(
    [("rank", "<u4"), ("n_ranks", "<u4"), ("n_nodes", "<u4"), ("spare", "<u4"), ("name", "S64")]
)
#: What NCCL offered for a message: predicted microseconds of each (algo, proto), -1 = not available; and, in the
#: head, the (algo, proto) of NCCL's own choice (the smallest cost). Written of TUNED_FUNCS when a (comm, func,
#: n_bytes) is new to the plugin, which forgets old ones where there are hundreds; of any when FLAG_REGISTERED is new.
OFFER_DTYPE = _record([("cost_us", "<f4", (N_ALGOS, N_PROTOS)), ("n_pipe_ops", "<i4")])
#: A collective was enqueued: what really runs (algo, proto, n_channels in the head). `seq` counts per comm and func.
#: `asked_bytes`: what NCCL asked the tuner about, the whole group's bytes where it was grouped; 0 if it did not ask.
#: `first`: number of its group's first collective on the communicator, from 1 on, by which the table was picked; 0: not
#: known.
COLL_DTYPE = _record(
    [
        ("seq", "<u8"),
        ("enqueue_ns", "<i8"),
        ("rank", "<u4"),
        ("spare", "<u4"),
        ("asked_bytes", "<u8"),
        ("first", "<u8"),
    ]
)
#: Its kernel ran, where sampled: GPU clock, earliest start to latest end over the channels that reported.
KERNEL_DTYPE = _record([("seq", "<u8"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("rank", "<u4")])
#: An optimizer step ended on this rank (head: step, generation of the table that answered in it, MIXED if there were
#: several). Memory is that of the GPU as last read.
STEP_DTYPE = _record(
    [
        ("rank", "<u4"),
        ("sample_every", "<u4"),  # kernel times are taken in one step of so many, 0 = never
        ("end_ns", "<i8"),  # CLOCK_MONOTONIC
        ("duration_ns", "<i8"),
        ("memory_used", "<u8"),  # bytes, 0 = unknown
        ("memory_total", "<u8"),
        ("trial", "<u4"),  # generation of the trial in which the step began, 0: in none
    ]
)
#: The agreement on tables has changed its state: `code` is an AgreementState, `text` says why, NUL-padded UTF-8; head:
#: the generation of a table that was refused.
STATE_DTYPE = _record([("rank", "<u4"), ("code", "<u4"), ("text", "S80")])
#: The job stood still until a sampled collective had ended: nothing was computed. Only a job on the emulated cluster
#: knows this.
WAIT_DTYPE = _record([("rank", "<u4"), ("spare", "<u4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
RECORD_BYTES = 128
assert all(
    t.itemsize == RECORD_BYTES
    for t in (COMM_DTYPE, OFFER_DTYPE, COLL_DTYPE, KERNEL_DTYPE, STEP_DTYPE, STATE_DTYPE, WAIT_DTYPE)
)


class AgreementState(IntEnum):
    """Where the ranks' agreement on tables stands."""

    WAITING = 0  # the text says for what
    OPEN = 1
    SHUT = 2  # never opened: the text says why
    CLOSED = 3  # stopped agreeing: the text says why and names the rank
    LOSING = 5  # open, but rounds come to nothing, or leave out who runs another table
    NO_TURNS = 6  # open, but the table of this generation was refused: its turns cannot follow steps


#: A cost of this or more means that NCCL does not have the pair: 2.32 writes 1.7e38 for PAT.
NO_OFFER = 1e30


def pair_costs(cost_us: np.ndarray[Any, Any], func: str = TUNED_FUNCS[0]) -> np.ndarray[Any, Any]:
    """Costs of :data:`PAIRS_OF` out of a ``(..., 7, 3)`` cost table -> ``(..., 6)`` microseconds, -1 = not offered."""
    algos = [ALGOS.index(a) for a, _ in PAIRS_OF[func]]
    protos = [PROTOS.index(p) for _, p in PAIRS_OF[func]]
    costs = cost_us[..., algos, protos]
    return np.where((costs >= 0) & (costs < NO_OFFER), costs, np.array(-1, costs.dtype))


def names(values: Iterable[int], known: tuple[str, ...]) -> list[str]:
    """NCCL's numbers -> names; unknown numbers become their decimal text, UNSET becomes 'auto'."""
    return [known[v] if v < len(known) else ("auto" if v == UNSET else str(v)) for v in map(int, values)]
