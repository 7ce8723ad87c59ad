"""Training steps of real models as arrays: what jobs are drawn on.

``steps.npz`` has every step on record, on two communicators and on one, replicated over nodes or not. It is made by
``tests/tools/make_steps.py``, of dry runs. A step knows no cluster: its compute is scaled later, its calls have bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from .step import Steps

Array = np.ndarray[Any, Any]
STEPS = Path(__file__).with_name("steps.npz")
#: Slots of a job that can be tuned; of a step with more the rest is left to NCCL.
SLOTS = 10


@dataclass(frozen=True)
class WorkloadArrays:
    """``w`` steps. A slot is a collective and the power-of-two class of its size, those that move most first."""

    names: Array  # (w,) str
    steps: Steps  # kinds of call: the slots, calls that no tuner reaches, slots beyond SLOTS
    n_slots: Array  # (w,)
    is_reduce_scatter: Array  # (w, SLOTS) bool
    n_bytes: Array  # (w, SLOTS) of a typical call
    calls: Array  # (w, SLOTS) a step
    other_bytes: Array  # (w,) of a collective that no tuner reaches
    replicated: Array  # (w,) bool


@functools.cache
def all_works() -> WorkloadArrays:
    """All steps on record."""
    with np.load(STEPS, allow_pickle=False) as file:
        arrays = dict(file)
    steps = Steps(**{field.name: arrays.pop(field.name) for field in fields(Steps)})
    return WorkloadArrays(steps=steps, **arrays)
