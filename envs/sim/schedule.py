"""The time of a training step: compute and collectives on in-order streams, computed event by event.

An operation starts when the one before it on its stream and everything it waits for have ended. While collectives run,
compute slows by the sum of their :attr:`Op.slowdown` (their channels hold SMs and memory bandwidth), and collectives
that run side by side on different streams slow each other by ``contention`` apiece.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.fingerprint import PRICE_CAP
from ...traces.records import CHANNELS, PAIRS, Decision, pair_costs, size_class
from . import cost_model
from .clusters import Cluster
from .fabric import Fabric

Array = np.ndarray[Any, Any]
COMPUTE = "compute"
#: A slot as a job knows it: the collective and the power-of-two class of its size.
SlotKey = tuple[str, int]


@dataclass(frozen=True)
class Op:
    """One operation: ``us`` of work alone on ``stream``, after the operations at the indices ``after``."""

    stream: str
    us: float
    after: tuple[int, ...] = ()
    func: str = ""  # a collective's; "" is compute
    n_bytes: int = 0
    slowdown: float = 0.0  # of compute beside it
    name: str = ""


@dataclass(frozen=True)
class Timeline:
    """When each operation of a step ran, us from its begin; ``exposed`` is the part without compute beside it."""

    start: Array  # (n_ops,)
    end: Array
    exposed: Array

    @property
    def total_us(self) -> float:
        """Duration of the step."""
        return float(self.end.max(initial=0.0))


def simulate(ops: Sequence[Op], contention: float = 0.0) -> Timeline:
    """Run a step. Raises ValueError when an operation waits for itself, for a later one of its stream, or for ever."""
    n = len(ops)
    if any(not 0 <= j < n for op in ops for j in op.after) or any(not op.us >= 0 for op in ops):
        raise ValueError("an operation needs a duration of at least 0 and waits for operations of the same step")
    queues: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        queues[op.stream].append(i)
    heads = dict.fromkeys(queues, 0)
    start, end, exposed = np.full(n, np.nan), np.full(n, np.nan), np.zeros(n)
    left: dict[int, float] = {}
    done, now = [False] * n, 0.0
    n_done = 0
    while n_done < n:
        moved = True
        while moved:  # an operation of no duration ends at once and may let others begin
            moved = False
            for stream, queue in queues.items():
                if heads[stream] == len(queue):
                    continue
                i = queue[heads[stream]]
                if i not in left and all(done[j] for j in ops[i].after):
                    start[i], left[i] = now, ops[i].us
                if left.get(i, 1.0) <= 0.0:
                    del left[i]
                    end[i], done[i], moved = now, True, True
                    heads[stream] += 1
                    n_done += 1
        if n_done == n:
            break
        if not left:
            raise ValueError("operations wait for each other: the step never ends")
        collectives = [i for i in left if ops[i].func]
        slow = 1.0 + sum(ops[i].slowdown for i in collectives)
        crowd = 1.0 + contention * (len(collectives) - 1)
        pace = {i: crowd if ops[i].func else slow for i in left}
        first = min(left, key=lambda i: left[i] * pace[i])
        passed = left[first] * pace[first]
        if len(collectives) == len(left):
            for i in collectives:
                exposed[i] += passed / len(collectives)
        now += passed
        for i in left:
            left[i] = 0.0 if i == first else left[i] - passed / pace[i]
    return Timeline(start, end, exposed)


@dataclass(frozen=True)
class Workload:
    """One training step: its operations, collectives without a duration yet (``us`` 0)."""

    name: str
    ops: tuple[Op, ...]
    contention: float = 0.3

    def slots(self) -> dict[SlotKey, list[int]]:
        """Indices of the calls of every slot."""
        found: dict[SlotKey, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            if op.func:
                found[op.func, size_class(op.n_bytes)].append(i)
        return dict(found)

    def compute_scaled(self, factor: float) -> Workload:
        """The same step on a GPU that computes ``1 / factor`` times as fast."""
        return replace(self, ops=tuple(op if op.func else replace(op, us=op.us * factor) for op in self.ops))

    def run(self, cluster: Cluster, fabric: Fabric, decisions: Mapping[SlotKey, Decision] | None = None) -> Timeline:
        """The step with each slot under its decision, NCCL's own where there is none."""
        timed = []
        for op in self.ops:
            if op.func:
                decision = (decisions or {}).get((op.func, size_class(op.n_bytes)), Decision())
                us, ran = call_us(cluster, fabric, op.func, op.n_bytes, decision)
                op = replace(op, us=us, slowdown=fabric.slowdown(ran))
            timed.append(op)
        return simulate(timed, self.contention)


def call_us(c: Cluster, fabric: Fabric, func: str, n_bytes: int, decision: Decision) -> tuple[float, int]:
    """Microseconds and channels of one call under a decision (unset parts are NCCL's)."""
    algo, proto = decision.algo, decision.proto
    if algo is None or proto is None:
        algo, proto = cost_model.choice(c, func, n_bytes)
    ran, _ = cost_model.channels(c, func, n_bytes, algo, proto, decision.n_channels)
    return fabric.time_us(func, n_bytes, algo, proto, ran), ran


def with_exposure(work: Workload, c: Cluster, fabric: Fabric, exposed: float) -> Workload:
    """``work`` with its compute scaled: under NCCL's own choices that part of the step (0..1) is bare waiting."""
    low, high = 1e-6, 1e6
    for _ in range(60):
        middle = math.sqrt(low * high)
        timeline = work.compute_scaled(middle).run(c, fabric)
        if timeline.exposed.sum() / timeline.total_us > exposed:
            low = middle
        else:
            high = middle
    return work.compute_scaled(high)


def candidates(c: Cluster, func: str, n_bytes: int) -> list[Decision]:
    """What a tuner may choose for a message: AUTO, and the offered pairs that NCCL does not price out."""
    costs = pair_costs(cost_model.cost_table(c, func, n_bytes))
    cap = PRICE_CAP * costs[costs >= 0].min()
    pairs: list[tuple[str | None, str | None]] = [(None, None)]
    pairs += [pair for pair, cost in zip(PAIRS, costs, strict=True) if 0 <= cost <= cap]
    return [Decision(*pair, k) for pair in pairs for k in CHANNELS if k <= c.comm_channels]


def best_alone(work: Workload, c: Cluster, fabric: Fabric) -> dict[SlotKey, Decision]:
    """For each slot the config whose collectives are quickest, whatever they do to the compute beside them."""
    chosen = {}
    for key, calls in work.slots().items():
        sizes = [work.ops[i].n_bytes for i in calls]

        def spent(d: Decision, key: SlotKey = key, sizes: list[int] = sizes) -> float:
            return sum(call_us(c, fabric, key[0], b, d)[0] for b in sizes)

        if key[0] != "all_reduce":
            chosen[key] = min(candidates(c, key[0], max(sizes)), key=spent)
    return chosen


def best_step(
    work: Workload, c: Cluster, fabric: Fabric, progress: Callable[[float], None] | None = None
) -> dict[SlotKey, Decision]:
    """For each slot the config that makes the step shortest: every config of a slot in turn, until none helps."""
    chosen = {key: Decision() for key in work.slots() if key[0] != "all_reduce"}
    best = work.run(c, fabric, chosen).total_us
    for _ in range(4):
        before = best
        for key in chosen:
            size = max(work.ops[i].n_bytes for i in work.slots()[key])
            for decision in candidates(c, key[0], size):
                total = work.run(c, fabric, {**chosen, key: decision}).total_us
                if total < best * (1 - 1e-9):
                    chosen[key], best = decision, total
            if progress:
                progress(best)
        if best > before * 0.999:
            break
    return chosen


def zero_step(
    stage: int, units: Sequence[int], n_ranks: int, us_per_mb: float = 3.0, prefetch: int = 1, bucket: int = 2**29
) -> Workload:
    """A step of ZeRO ``stage`` (1, 2 or 3) on a model of ``units`` (bytes of each unit's 16-bit parameters).

    Stage 3 gathers each unit before its forward and again before its backward, ``prefetch`` units ahead, and scatters
    its gradients after; stages 1 and 2 scatter gradients in buckets during the backward and gather all parameters
    after the optimizer, bucket by bucket. Backward takes twice the forward's time (``us_per_mb`` of parameters).
    Raises ValueError for another stage.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage is 1, 2 or 3, not {stage}")
    whole = [max(-(-b // (16 * n_ranks)), 1) * 16 * n_ranks for b in units]  # padded, as every ZeRO pads its shards
    cost = [us_per_mb * b / 1e6 for b in units]
    ops: list[Op] = []

    def add(*args: Any, **kw: Any) -> int:
        ops.append(Op(*args, **kw))
        return len(ops) - 1

    n = len(units)
    order = [(i, False) for i in range(n)] + [(i, True) for i in reversed(range(n))]
    computes: list[int] = []
    scattered: list[int] = []
    pending: list[int] = []  # computes whose gradients wait for their bucket to fill
    filled = 0
    for k, (i, backward) in enumerate(order):
        needs: tuple[int, ...] = ()
        if stage == 3:
            # The gather of a unit may begin once the compute `prefetch` units before it has begun, that is, once
            # the one before that has ended.
            gate = computes[k - prefetch - 1] if k - prefetch - 1 >= 0 else None
            after = () if gate is None else (gate,)
            needs = (add("gather", 0.0, after, "all_gather", whole[i], name=f"gather {i}"),)
        name = f"{'backward' if backward else 'forward'} {i}"
        computes.append(add(COMPUTE, cost[i] * (2 if backward else 1), needs, name=name))
        if backward:
            pending.append(computes[-1])
            filled += whole[i]
            if stage == 3 or filled >= bucket or i == 0:
                scattered.append(add("scatter", 0.0, tuple(pending), "reduce_scatter", filled, name=f"scatter {i}"))
                pending, filled = [], 0
    step = add(COMPUTE, sum(cost) * 0.05, tuple(scattered), name="optimizer")
    if stage < 3:
        total = sum(whole)
        for first in range(0, total, bucket):
            size = min(bucket, total - first)
            add("gather", 0.0, (step,), "all_gather", -(-size // (16 * n_ranks)) * 16 * n_ranks, name="gather")
    return Workload(f"zero-{stage}", tuple(ops))


def llama_units(hidden: int, layers: int, vocabulary: int, intermediate: int) -> list[int]:
    """Bytes of the 16-bit parameters of each unit of a Llama-like model: embedding, layers, head."""
    layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden)
    return [2 * vocabulary * hidden, *[layer] * layers, 2 * vocabulary * hidden]


#: Which collective of a public stream is which, and what computes before or after it.
_STREAM_FUNCS = {"CommType.all_gather": "all_gather", "CommType.reduce_scatter": "reduce_scatter"}


def from_aicb(path: Path, us_per_mb: float = 3.0, prefetch: int = 2) -> Workload:
    """A step from an AICB stream (aliyun/aicb: ``comm_type, comm_group, comm_group_size, msg_size, stage, ...``).

    Gathers of the forward and backward are followed by the compute on what they gathered, scatters follow the compute;
    message sizes and order are the stream's, times of compute are proportional to the bytes. Raises ValueError when
    the file holds no step.
    """
    lines = path.read_text().splitlines()
    first = next((k for k, line in enumerate(lines) if line.startswith("comm_type,")), None)
    if first is None:
        raise ValueError(f"{path} is no AICB stream: it has no header line 'comm_type,...'")
    ops: list[Op] = []
    computes: list[int] = []
    for row in csv.DictReader(lines[first:]):
        func, where = _STREAM_FUNCS.get(row["comm_type"]), row["stage"] or ""
        if row["comm_type"] == "CommType.epoch_end" and ops:
            break
        if func is None or where.startswith("init"):
            continue
        size = int(row["msg_size"])
        if func == "all_gather" and where.startswith(("forward", "backward")):
            gate = (computes[-prefetch - 1],) if len(computes) > prefetch else ()
            ops.append(Op("gather", 0.0, gate, func, size, name=where))
            factor = 2.0 if where.startswith("backward") else 1.0
            ops.append(Op(COMPUTE, factor * us_per_mb * size / 1e6, (len(ops) - 1,), name=where))
            computes.append(len(ops) - 1)
        else:
            gate = (computes[-1],) if computes else ()
            ops.append(Op("scatter" if func == "reduce_scatter" else "gather", 0.0, gate, func, size, name=where))
    if not ops:
        raise ValueError(f"{path} holds no all_gather or reduce_scatter after its initialisation")
    return Workload(path.stem, tuple(ops))


def shares(timeline: Timeline, ops: Iterable[Op]) -> dict[str, float]:
    """Part of the step that each collective runs for, and (``exposed``) that is spent waiting without compute."""
    out: dict[str, float] = defaultdict(float)
    for op, begin, end in zip(ops, timeline.start, timeline.end, strict=True):
        if op.func:
            out[op.func] += float(end - begin) / timeline.total_us
    return {**out, "exposed": float(timeline.exposed.sum()) / timeline.total_us}
