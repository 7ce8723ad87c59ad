"""Training steps as workloads: what computes, which collectives, on which streams, and what waits for what.

``make_steps.py`` makes of these what the simulated jobs are drawn on. A :class:`Workload` knows no cluster: its compute
has times that are scaled later, its calls have bytes.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from dynamiccl.envs.sim.step import Steps
from dynamiccl.envs.sim.workloads import SLOTS, WorkloadArrays
from dynamiccl.traces.records import TUNED_FUNCS, size_class
from paths import DATA

#: A slot as a job knows it: the collective and the power-of-two class of its size.
SlotKey = tuple[str, int]
Array = np.ndarray[Any, Any]
RECORDED = DATA / "recorded_steps.npz"
COMPUTE = "compute"
#: As step.c has it.
MAX_STREAMS = 16
KINDS = (COMPUTE, "optimizer", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
#: Of a GPU in bf16, roughly; jobs scale it.
FLOPS_A_US = 4e8
#: A step with fewer is no job of its own kind: what is to be learnt of it, a larger one teaches too.
LEAST_SLOTS = 2
#: Rows of a job's calls after its slots: collectives that no tuner reaches, slots beyond SLOTS.
OTHER, REST = SLOTS, SLOTS + 1


@dataclass(frozen=True)
class Op:
    """One operation: ``us`` of work alone on ``stream``, after the operations at the indices ``after``.

    ``slot`` is the row of the job's :class:`Calls`; -1 is compute. A call takes its row's time, times ``us``. The other
    fields say what a call is where no row has been given to it yet.
    """

    stream: str
    us: float
    after: tuple[int, ...] = ()
    slot: int = -1
    func: str = ""  # a collective's; "" is compute
    n_bytes: int = 0
    name: str = ""


@dataclass(frozen=True)
class Workload:
    """One training step. Ops have a ``func`` and ``n_bytes`` where they are collectives, and no rows yet."""

    name: str
    ops: tuple[Op, ...]

    def slots(self) -> dict[SlotKey, list[int]]:
        """Indices of the calls of every slot that a tuner reaches, those that move most first."""
        found: dict[SlotKey, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if op.func in TUNED_FUNCS:
                found[op.func, size_class(op.n_bytes)].append(i)
        moved = {key: sum(self.ops[i].n_bytes for i in calls) for key, calls in found.items()}
        return {key: found[key] for key in sorted(found, key=lambda key: -moved[key])}

    def on_one_communicator(self) -> Workload:
        """The same step with all collectives on one stream, in the order in which they are issued."""
        ops = tuple(replace(op, stream="nccl") if op.func in TUNED_FUNCS else op for op in self.ops)
        return Workload(f"{self.name}, one communicator", ops)


def hybrid(work: Workload) -> Workload:
    """Stage 3 within each node, replicated over the nodes (HSDP): what is scattered is then reduced over the network.

    The all_reduce of a shard is an eighth of the bytes, a node having eight GPUs; the optimizer waits for the last.
    """
    ops = list(work.ops)
    last = next(i for i, op in enumerate(ops) if op.name == "optimizer")
    extra, waits = list[Op](), list(ops[last].after)
    for i, op in enumerate(ops):
        if op.func == "reduce_scatter":
            waits.append(len(ops) + len(extra))
            extra.append(Op("replicate", 1.0, (i,), func="all_reduce", n_bytes=op.n_bytes // 8, name=op.name))
    ops[last] = replace(ops[last], after=tuple(waits))
    return Workload(f"{work.name}, replicated", (*ops, *extra))


@dataclass(frozen=True)
class Recording:
    """A step as a dry run issued it; see ``tests/tools/make_steps.py``. Compute is in FLOPs."""

    name: str
    kind: Array  # (n,) index into KINDS
    value: Array  # (n,) FLOPs of compute, bytes of a collective
    waits: Array  # (m, 2) the first of each pair waits for the second

    @classmethod
    def of(cls, name: str, ops: Sequence[tuple[str, float, set[int]]]) -> Recording:
        """From (kind, value, what it waits for)."""
        waits = [(i, j) for i, (_, _, after) in enumerate(ops) for j in sorted(after)]
        kinds = np.array([KINDS.index(kind) for kind, _, _ in ops], np.uint8)
        return cls(
            name, kinds, np.array([float(v) for _, v, _ in ops]), np.array(waits, np.int32).reshape(-1, 2)
        )

    def workload(self, prefetch: int = 1) -> Workload:
        """The step. A gather may begin once the compute ``prefetch`` units before its own has begun.

        That is what FSDP2 and our engine do: a buffer for the unit in use, and for ``prefetch`` more.
        """
        after: list[list[int]] = [[] for _ in self.kind]
        for i, j in self.waits:
            after[i].append(int(j))
        compute = [i for i, kind in enumerate(self.kind) if KINDS[kind] in (COMPUTE, "optimizer")]
        reader = {j: i for i in reversed(compute) for j in after[i]}
        gathers = [i for i, kind in enumerate(self.kind) if KINDS[kind] == "all_gather" and i in reader]
        units = list(dict.fromkeys(reader[i] for i in gathers))
        total = sum(self.value[i] for i in compute)
        ops = []
        for i, (kind, value) in enumerate(zip(self.kind, self.value, strict=True)):
            func = KINDS[kind]
            if func in (COMPUTE, "optimizer"):
                # The optimizer's arithmetic is little: its time is memory traffic, a twentieth of the rest.
                us = (value if func == COMPUTE else value + 0.05 * total) / FLOPS_A_US
                ops.append(Op(COMPUTE, us, tuple(after[i]), name=func))
                continue
            gate = units.index(reader[i]) - prefetch if func == "all_gather" and i in reader else -1
            if gate >= 0:
                after[i] += [j for j in compute if j < units[gate]][-1:]
            stream = {"all_gather": "gather", "reduce_scatter": "scatter"}.get(func, "other")
            ops.append(Op(stream, 1.0, tuple(after[i]), func=func, n_bytes=int(value)))
        return Workload(self.name, tuple(ops))


@functools.cache
def recordings() -> dict[str, Recording]:
    """What is on record, by name."""
    with np.load(RECORDED, allow_pickle=False) as file:
        a = dict(file)
    found = {}
    for k, name in enumerate(map(str, a["name"])):
        ops = slice(a["op_at"][k], a["op_at"][k + 1])
        waits = a["waits"][a["wait_at"][k] : a["wait_at"][k + 1]]
        found[name] = Recording(name, a["kind"][ops], a["value"][ops], waits)
    return found


def flattened(steps: Sequence[Sequence[Op]]) -> Steps:
    """For step.c. Raises ValueError for an operation that waits for one of another step, or too many streams."""
    n_streams, after_at, after = [], [], list[int]()
    for ops in steps:
        n = len(ops)
        if any(not 0 <= j < n for op in ops for j in op.after) or any(not op.us >= 0 for op in ops):
            raise ValueError(
                "an operation needs a duration of at least 0 and waits for operations of its step"
            )
        n_streams.append(len({op.stream for op in ops}))
        for op in ops:
            after_at.append(len(after))
            after += op.after
        after_at.append(len(after))
    if max(n_streams, default=0) > MAX_STREAMS:
        raise ValueError(f"a step has at most {MAX_STREAMS} streams")
    numbers = [{name: k for k, name in enumerate(dict.fromkeys(op.stream for op in ops))} for ops in steps]
    flat = [(numbers[k][op.stream], op) for k, ops in enumerate(steps) for op in ops]
    return Steps(
        np.cumsum([0, *map(len, steps)], dtype=np.int32),
        np.array(n_streams, np.int32),
        np.array([s for s, _ in flat], np.int32),
        np.array([op.slot for _, op in flat], np.int32),
        np.array([op.us for _, op in flat], float),
        np.array(after_at, np.int32),
        np.array([*after, 0], np.int32),
    )


def arrays_of(works: list[tuple[Workload, bool]]) -> WorkloadArrays:
    """Each workload, and whether its shards are replicated over nodes."""
    shape = len(works), SLOTS
    is_rs, n_bytes, calls = np.zeros(shape, bool), np.full(shape, 1024, np.int64), np.zeros(shape)
    n_slots, other, steps = np.zeros(shape[0], int), np.zeros(shape[0]), []
    for w, (work, _) in enumerate(works):
        ops = [replace(op, slot=OTHER if op.func else -1) for op in work.ops]
        beside = [op.n_bytes for op in ops if op.slot == OTHER and op.func not in TUNED_FUNCS]
        other[w] = max(beside, default=0)
        for i, op in enumerate(ops):
            if op.slot == OTHER and op.func not in TUNED_FUNCS:
                ops[i] = replace(op, us=op.n_bytes / other[w])
        for k, ((func, _), members) in enumerate(work.slots().items()):
            # A slot's time is that of its typical call; other sizes of the class in proportion.
            sizes = [ops[i].n_bytes for i in members]
            typical = max(set(sizes), key=lambda size: (size * sizes.count(size), size))
            for i in members:
                ops[i] = replace(
                    ops[i], slot=min(k, SLOTS) if k < SLOTS else REST, us=ops[i].n_bytes / typical
                )
            if k < SLOTS:
                is_rs[w, k], n_bytes[w, k], calls[w, k] = func == TUNED_FUNCS[1], typical, len(members)
                n_slots[w] = k + 1
        steps.append(ops)
    names = np.array([work.name for work, _ in works])
    replicated = np.array([flag for _, flag in works])
    return WorkloadArrays(names, flattened(steps), n_slots, is_rs, n_bytes, calls, other, replicated)


def made() -> WorkloadArrays:
    """All steps on record: each on two communicators, on one, and replicated over nodes."""
    found: list[tuple[Workload, bool]] = []
    for name, recording in recordings().items():
        for prefetch in (1, 2) if "-3" in name else (1,):
            work = recording.workload(prefetch)
            if len(work.slots()) >= LEAST_SLOTS:
                found += [(work, False), (work.on_one_communicator(), False)]
                if "-3" in name:
                    work = hybrid(work)
                    found += [(work, True), (work.on_one_communicator(), True)]
    return arrays_of(found)
