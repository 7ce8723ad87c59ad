"""Training steps as workloads: what computes, which collectives, on which streams, and what waits for what.

A :class:`Workload` knows no cluster: its compute has times that are scaled later, its calls have bytes.
"""

from __future__ import annotations

import csv
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.records import TUNED_FUNCS, size_class
from .step import COMPUTE, Op

#: A slot as a job knows it: the collective and the power-of-two class of its size.
SlotKey = tuple[str, int]
Array = np.ndarray[Any, Any]
RECORDED = Path(__file__).with_name("steps.npz")
KINDS = (COMPUTE, "optimizer", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
#: Of a GPU in bf16, roughly; jobs scale it.
FLOPS_A_US = 4e8


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

    def others(self) -> list[int]:
        """Indices of the collectives that no tuner reaches."""
        return [i for i, op in enumerate(self.ops) if op.func and op.func not in TUNED_FUNCS]

    def on_one_communicator(self) -> Workload:
        """The same step with all collectives on one stream, in the order in which they are issued."""
        ops = tuple(replace(op, stream="nccl") if op.func in TUNED_FUNCS else op for op in self.ops)
        return Workload(f"{self.name}, one communicator", ops)


def zero_step(
    stage: int, units: Sequence[int], n_ranks: int = 1, us_per_mb: float = 3.0, prefetch: int = 1, bucket: int = 2**29
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

    def add(
        stream: str, us: float, after: tuple[int, ...] = (), func: str = "", n_bytes: int = 0, name: str = ""
    ) -> int:
        ops.append(Op(stream, us, after, func=func, n_bytes=n_bytes, name=name))
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
            needs = (add("gather", 1.0, after, "all_gather", whole[i], f"gather {i}"),)
        name = f"{'backward' if backward else 'forward'} {i}"
        computes.append(add(COMPUTE, cost[i] * (2 if backward else 1), needs, name=name))
        if backward:
            pending.append(computes[-1])
            filled += whole[i]
            if stage == 3 or filled >= bucket or i == 0:
                scattered.append(add("scatter", 1.0, tuple(pending), "reduce_scatter", filled, f"scatter {i}"))
                pending, filled = [], 0
    step = add(COMPUTE, sum(cost) * 0.05, tuple(scattered), name="optimizer")
    if stage < 3:
        total = sum(whole)
        for first in range(0, total, bucket):
            size = min(bucket, total - first)
            add("gather", 1.0, (step,), "all_gather", -(-size // (16 * n_ranks)) * 16 * n_ranks, "gather")
    return Workload(f"zero-{stage}", tuple(ops))


def llama_units(hidden: int, layers: int, vocabulary: int, intermediate: int) -> list[int]:
    """Bytes of the 16-bit parameters of each unit of a Llama-like model: embedding, layers, head."""
    layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden)
    return [2 * vocabulary * hidden, *[layer] * layers, 2 * vocabulary * hidden]


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
            ops.append(Op("gather", 1.0, gate, func=func, n_bytes=size, name=where))
            factor = 2.0 if where.startswith("backward") else 1.0
            ops.append(Op(COMPUTE, factor * us_per_mb * size / 1e6, (len(ops) - 1,), name=where))
            computes.append(len(ops) - 1)
        else:
            gate = (computes[-1],) if computes else ()
            stream = "scatter" if func == "reduce_scatter" else "gather"
            ops.append(Op(stream, 1.0, gate, func=func, n_bytes=size, name=where))
    if not ops:
        raise ValueError(f"{path} holds no all_gather or reduce_scatter after its initialisation")
    return Workload(path.stem, tuple(ops))


@dataclass(frozen=True)
class Recording:
    """A step as a dry run issued it; see ``tests/make_steps.py``. Compute is in FLOPs."""

    name: str
    kind: Array  # (n,) index into KINDS
    value: Array  # (n,) FLOPs of compute, bytes of a collective
    waits: Array  # (m, 2) the first of each pair waits for the second

    @classmethod
    def of(cls, name: str, ops: Sequence[tuple[str, float, set[int]]]) -> Recording:
        """From (kind, value, what it waits for)."""
        waits = [(i, j) for i, (_, _, after) in enumerate(ops) for j in sorted(after)]
        kinds = np.array([KINDS.index(kind) for kind, _, _ in ops], np.uint8)
        return cls(name, kinds, np.array([float(v) for _, v, _ in ops]), np.array(waits, np.int32).reshape(-1, 2))

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
def recordings(path: Path = RECORDED) -> dict[str, Recording]:
    """The shipped recordings by name. Raises ValueError when the file is not one of them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            a = {key: file[key] for key in file.files}
        found = {}
        for k, name in enumerate(map(str, a["name"])):
            ops = slice(a["op_at"][k], a["op_at"][k + 1])
            waits = a["waits"][a["wait_at"][k] : a["wait_at"][k + 1]]
            found[name] = Recording(name, a["kind"][ops], a["value"][ops], waits)
        return found
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{path} holds no recorded steps: {error}; make them by tests/make_steps.py") from error
