"""Training steps of real models as arrays: what jobs are drawn on.

``steps.npz`` has every step on record, on two communicators and on one, replicated over nodes or not. It is made by
``tests/tools/make_steps.py``, of dry runs. A step knows no cluster: its compute is scaled later, its calls have bytes.

Models of many parts (towers, experts, adapters) have calls of many sizes. No such model is on record, so their steps
are made here of those that are: each slot's calls are dealt, in their order, to several slots of other sizes. How many
slots, and how large their calls are, is drawn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import arange, argsort, concatenate, flatnonzero, where

from ..nccl_model.clusters import ClusterArrays
from .family import World
from .step import Steps

Array = np.ndarray[Any, Any]
STEPS = Path(__file__).with_name("steps.npz")
#: Slots of a job on a recorded step that can be tuned; of a step with more the rest is left to NCCL.
SLOTS = 10
#: And of a job on a step with many slots.
MANY_SLOTS = 60
#: Kinds of call before a job's slots: collectives that no tuner reaches, slots beyond SLOTS.
N_BESIDE = 2
#: Steps with many slots: at least so many, made so often of every step that has the calls.
LEAST_MANY, VERSIONS = 20, 2
#: What a call of theirs moves, in octaves beside the recorded call that it stands for; evenly drawn.
OCTAVES = (-5.0, 1.5)
#: How the names of steps end that were made of recorded ones.
_MANY, _SUMS = ", many slots", ", all-reduced"


@dataclass(frozen=True)
class WorkloadArrays:
    """``w`` steps of up to S slots. A slot is a collective and the power-of-two class of its size, those that move most
    first."""

    names: Array  # (w,) str
    steps: Steps  # kinds of call, see N_BESIDE
    n_slots: Array  # (w,)
    is_reduce_scatter: Array  # (w, S) bool; of an all_reduce too
    n_bytes: Array  # (w, S) of a typical call
    calls: Array  # (w, S) a step
    other_bytes: Array  # (w,) of a collective that no tuner reaches
    replicated: Array  # (w,) bool


@functools.cache
def recorded_works() -> WorkloadArrays:
    """The steps on record, as they lie in the file: kinds of call are SLOTS slots, and then the N_BESIDE others."""
    with np.load(STEPS, allow_pickle=False) as file:
        arrays = dict(file)
    parts = {}
    for field in fields(Steps):
        parts[field.name] = arrays.pop(field.name)
    steps = Steps(**parts)
    return WorkloadArrays(steps=steps, **arrays)


@functools.cache
def all_works() -> WorkloadArrays:
    """The steps on record and, after them, those with many slots; kinds of call begin with the N_BESIDE others."""
    works = numbered_for_jobs(recorded_works())
    rng = np.random.default_rng(0)  # the same steps on every machine
    calls = works.calls.sum(axis=1)
    sources = flatnonzero(calls >= LEAST_MANY)
    dealt = []
    for source in np.repeat(sources, VERSIONS):
        step = _dealt(works, int(source), rng)
        dealt.append(step)
    everyone = _joined(works, dealt)
    return _joined(everyone, [_summed(works, source) for source in range(len(works.names))])


def numbered_for_jobs(recorded: WorkloadArrays) -> WorkloadArrays:
    """Steps as they are recorded, their kinds of call numbered as jobs of any width have them."""
    kind = recorded.steps.slot
    after = where(kind >= 0, kind + N_BESIDE, -1)
    slot = where(kind >= SLOTS, kind - SLOTS, after)
    steps = replace(recorded.steps, slot=slot.astype(np.int32))
    return replace(recorded, steps=steps)


def steps_of(kind: World, fleet: ClusterArrays, rng: np.random.Generator) -> Array:
    """Which of all steps each job on ``fleet`` takes, (n,): any that the world has, that fits the job's cluster."""
    works = all_works()
    n = len(fleet)
    is_one_node = fleet.n_nodes == 1
    is_full = fleet.gpus_per_node == 8
    may_replicate = rng.random(n) < kind.replicated
    replicated = is_one_node & is_full & may_replicate
    one = rng.random(n) < kind.one_communicator
    pick = rng.random(n)
    names = works.names
    is_one = np.array(["one communicator" in name for name in names])
    many = np.array([name.endswith(_MANY) for name in names])
    sums = is_summed(names)
    known = np.array([name.startswith(kind.works) for name in names])
    known &= (many == kind.many) & (sums == kind.sums)
    which = np.zeros(n, int)
    for is_replicated in (False, True):
        for has_one in (False, True):
            alike = works.replicated == is_replicated
            alike &= is_one == has_one
            fit = flatnonzero(alike & known)
            mine = replicated == is_replicated
            mine &= one == has_one
            place = pick[mine] * len(fit)
            number = place.astype(int)
            which[mine] = fit[number]
    return which


@dataclass(frozen=True)
class _Dealt:
    """A step made of a recorded one, with the same operations: its calls have other slots, or are none."""

    source: int  # the step that it was made of
    name: str  # what is added to the source's
    slot: Array  # (operations,) kind of call
    is_reduce_scatter: Array  # (slots,)
    n_bytes: Array
    calls: Array


def _dealt(works: WorkloadArrays, source: int, rng: np.random.Generator) -> _Dealt:
    """Deal the calls of step ``source``: those of a slot, in their order, in runs to slots of their own."""
    begin, end = works.steps.op_at[source : source + 2]
    kind = works.steps.slot[begin:end]
    n_old = works.n_slots[source]
    calls = works.calls[source, :n_old].astype(int)
    most = min(int(calls.sum()), MANY_SLOTS)
    wanted = int(rng.integers(LEAST_MANY, most + 1))
    parts = _parts(calls, wanted)
    old = np.repeat(arange(n_old), parts)  # of each new slot
    octaves = rng.uniform(*OCTAVES, len(old))
    recorded = works.n_bytes[source, old]
    moved = recorded * np.exp2(octaves)
    n_bytes = np.maximum(moved, 1024).astype(np.int64)
    owner = np.full(len(kind), -1)
    for k in range(n_old):
        mine = flatnonzero(kind == k + N_BESIDE)
        calls_of_slot = arange(len(mine))
        cuts = rng.choice(calls_of_slot[1:], parts[k] - 1, replace=False)
        cuts = np.sort(cuts)
        run = np.searchsorted(cuts, calls_of_slot, side="right")
        first = parts[:k].sum()
        owner[mine] = first + run
    count = np.bincount(owner[owner >= 0], minlength=len(old))
    order = argsort(-count * n_bytes, kind="stable")
    place = argsort(order)
    slot = where(owner >= 0, place[owner] + N_BESIDE, kind)
    is_rs = works.is_reduce_scatter[source, old]
    calls = count.astype(float)
    return _Dealt(
        source=source,
        name=_MANY,
        slot=slot.astype(np.int32),
        is_reduce_scatter=is_rs[order],
        n_bytes=n_bytes[order],
        calls=calls[order],
    )


def is_summed(names: Array) -> Array:
    """Of which steps gradients are all-reduced, by name."""
    return np.array([name.endswith(_SUMS) for name in names])


def _summed(works: WorkloadArrays, source: int) -> _Dealt:
    """Step ``source`` as a data parallel one: its reduce-scatters are all-reduces, and its gathers take no time."""
    begin, end = works.steps.op_at[source : source + 2]
    kind = works.steps.slot[begin:end]
    n_old = works.n_slots[source]
    is_rs = works.is_reduce_scatter[source, :n_old]
    place = np.cumsum(is_rs) - 1
    number = kind - N_BESIDE
    is_slot = number >= 0
    old = where(is_slot, number, 0)
    new = where(is_rs[old], place[old] + N_BESIDE, -1)
    return _Dealt(
        source=source,
        name=_SUMS,
        slot=where(is_slot, new, kind).astype(np.int32),
        is_reduce_scatter=is_rs[is_rs],
        n_bytes=works.n_bytes[source, :n_old][is_rs],
        calls=works.calls[source, :n_old][is_rs],
    )


def _parts(calls: Array, wanted: int) -> Array:
    """How many slots those of ``calls`` (slots,) are dealt, ``wanted`` in all: as they have calls, at least one."""
    parts = np.ones(len(calls), int)
    while parts.sum() < wanted:
        each = where(parts < calls, calls / parts, 0.0)
        parts[each.argmax()] += 1
    return parts


def _joined(works: WorkloadArrays, dealt: list[_Dealt]) -> WorkloadArrays:
    """``works`` and after them the dealt ones, MANY_SLOTS wide; what an operation waits for is the source's. What was a
    call and is none takes no time."""
    steps = works.steps
    source = np.array([one.source for one in dealt])
    begin = steps.op_at[source]
    end = steps.op_at[source + 1]
    operations = _ranges(begin, end)
    # A step's row of after_at has one entry more than it has operations.
    entries = _ranges(begin + source, end + source + 1)
    n_operations = np.cumsum(end - begin)
    more = Steps(
        op_at=steps.op_at[-1] + n_operations.astype(np.int32),
        n_streams=steps.n_streams[source],
        stream=steps.stream[operations],
        slot=concatenate([d.slot for d in dealt]),
        work=_work(steps, operations, concatenate([d.slot for d in dealt])),
        after_at=steps.after_at[entries],
        after=steps.after[:0],
    )
    both = {}
    for field in fields(Steps):
        parts = [getattr(each, field.name) for each in (steps, more)]
        both[field.name] = concatenate(parts)
    names = [works.names[one.source] + one.name for one in dealt]
    n_slots = [len(one.calls) for one in dealt]
    is_rs = [*works.is_reduce_scatter, *(one.is_reduce_scatter for one in dealt)]
    n_bytes = [*works.n_bytes, *(one.n_bytes for one in dealt)]
    calls = [*works.calls, *(one.calls for one in dealt)]
    other_bytes = works.other_bytes
    replicated = works.replicated
    return WorkloadArrays(
        names=concatenate([works.names, names]),
        steps=Steps(**both),
        n_slots=concatenate([works.n_slots, n_slots]),
        is_reduce_scatter=_wide(is_rs, False),
        n_bytes=_wide(n_bytes, 1024),
        calls=_wide(calls, 0.0),
        other_bytes=concatenate([other_bytes, other_bytes[source]]),
        replicated=concatenate([replicated, replicated[source]]),
    )


def _work(steps: Steps, operations: Array, slot: Array) -> Array:
    """Of operations that were calls and are none: nothing."""
    was_call = steps.slot[operations] >= 0
    return where(was_call & (slot < 0), 0.0, steps.work[operations])


def _ranges(begin: Array, end: Array) -> Array:
    """The numbers from each ``begin`` to its ``end``, one range after the other."""
    pairs = zip(begin, end, strict=True)
    return concatenate([arange(first, after) for first, after in pairs])


def _wide(rows: list[Array], fill: Any) -> Array:
    shape = len(rows), MANY_SLOTS
    out = np.full(shape, fill, rows[0].dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out
