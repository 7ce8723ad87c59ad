"""Workloads as arrays: what random jobs pick their step from, and which of its calls is which slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...traces.records import TUNED_FUNCS
from . import workloads
from .step import Steps
from .workloads import Workload

Array = np.ndarray[Any, Any]
#: Slots of a job that can be tuned; of a step with more the rest is left to NCCL.
SLOTS = 10
#: A step with fewer is no job of its own kind: what is to be learnt of it, a larger one teaches too.
LEAST_SLOTS = 2
#: Rows of a job's calls after its slots: collectives that no tuner reaches, slots beyond SLOTS.
OTHER, REST = SLOTS, SLOTS + 1


@dataclass(frozen=True)
class Works:
    """Workloads as arrays: what jobs pick from."""

    names: tuple[str, ...]
    steps: Steps
    n_slots: Array  # (w,)
    is_reduce_scatter: Array  # (w, SLOTS) bool
    n_bytes: Array  # (w, SLOTS) of a typical call
    calls: Array  # (w, SLOTS) a step
    other_bytes: Array  # (w,) of a collective that no tuner reaches
    replicated: Array  # (w,) bool

    @classmethod
    def of(cls, works: list[tuple[Workload, bool]]) -> Works:
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
                    ops[i] = replace(ops[i], slot=min(k, SLOTS) if k < SLOTS else REST, us=ops[i].n_bytes / typical)
                if k < SLOTS:
                    is_rs[w, k], n_bytes[w, k], calls[w, k] = func == TUNED_FUNCS[1], typical, len(members)
                    n_slots[w] = k + 1
            steps.append(ops)
        names = tuple(work.name for work, _ in works)
        replicated = np.array([flag for _, flag in works])
        return cls(names, Steps.of(steps), n_slots, is_rs, n_bytes, calls, other, replicated)


@functools.cache
def works_of(prefixes: tuple[str, ...]) -> Works:
    """The steps of a family: each on two communicators, on one, and replicated over nodes."""
    found: list[tuple[Workload, bool]] = []
    for name, recording in workloads.recordings().items():
        if not name.startswith(prefixes):
            continue
        for prefetch in (1, 2) if "-3" in name else (1,):
            work = recording.workload(prefetch)
            if len(work.slots()) >= LEAST_SLOTS:
                found += [(work, False), (work.on_one_communicator(), False)]
                if "-3" in name:
                    work = workloads.hybrid(work)
                    found += [(work, True), (work.on_one_communicator(), True)]
    if not found:
        raise ValueError(f"no step is recorded of {', '.join(prefixes)}: make them by tests/make_steps.py")
    return Works.of(found)
