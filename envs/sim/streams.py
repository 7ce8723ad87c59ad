"""The collectives of one step of real training jobs: which slots they have, and how often each is called.

Models are public ones by their published dimensions; the streams follow what ZeRO does with them (units gathered and
scattered by stage 3, buckets by stages 1 and 2, every parameter by itself as DeepSpeed's stage 3 does without
prefetch), as laid out by :mod:`.schedule`. Two more are public recordings: aliyun/aicb (23eec3c, Apache-2.0), a
Llama-7B under DeepSpeed ZeRO-2 and ZeRO-3 on 128 ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...traces.records import TUNED_FUNCS, size_class
from .schedule import llama_units, zero_step

Array = np.ndarray[Any, Any]

#: (hidden, layers, vocabulary, intermediate): GPT-2 XL and Llama-like models of 0.1 to 70 billion parameters.
MODELS = {
    "gpt2-xl": (1600, 48, 50257, 4267),
    "llama-160m": (768, 12, 32000, 3072),
    "tinyllama-1.1b": (2048, 22, 32000, 5632),
    "llama-3b": (3200, 26, 32000, 8640),
    "llama-7b": (4096, 32, 32000, 11008),
    "llama-13b": (5120, 40, 32000, 13824),
    "llama-8b-v3": (4096, 32, 128256, 14336),
    "llama-70b": (8192, 80, 32000, 28672),
}
BUCKETS = (2**25, 2**27, 2**28, 5 * 10**8, 2 * 10**9)
#: aliyun/aicb: calls of each (func, bytes) in one step.
AICB = {
    "aicb-llama-7b-zero-3": {
        ("all_gather", 33554432): 256,
        ("all_gather", 90177536): 192,
        ("all_gather", 8192): 195,
        ("all_gather", 262144000): 4,
        ("reduce_scatter", 1990279168): 7,
    },
    "aicb-llama-7b-zero-2": {("all_gather", 2246138624): 6},
}
#: Slots kept of a stream: the ones that move most.
KEPT = 6


@dataclass(frozen=True)
class Streams:
    """All streams as arrays (n_streams, KEPT); unused places have no calls."""

    names: tuple[str, ...]
    is_reduce_scatter: Array  # bool
    n_bytes: Array  # of a typical call, before padding to the ranks
    calls: Array  # per step


def _per_parameter(units: list[int], hidden: int, intermediate: int) -> Counter[tuple[str, int]]:
    """Stage 3 that gathers each matrix by itself: four of attention, three of the MLP, two norms a layer."""
    calls: Counter[tuple[str, int]] = Counter()
    layers = len(units) - 2
    calls["all_gather", 2 * hidden * hidden] += 2 * 4 * layers
    calls["all_gather", 2 * hidden * intermediate] += 2 * 3 * layers
    calls["all_gather", 2 * hidden] += 2 * 2 * layers
    calls["all_gather", units[0]] += 4
    calls["reduce_scatter", min(5 * 10**8, sum(units))] += max(1, round(sum(units) / 5e8))
    return calls


def _counts() -> dict[str, Counter[tuple[str, int]]]:
    found: dict[str, Counter[tuple[str, int]]] = {name: Counter(calls) for name, calls in AICB.items()}
    for name, (hidden, layers, vocabulary, intermediate) in MODELS.items():
        units = llama_units(hidden, layers, vocabulary, intermediate)
        found[f"{name} zero-3 by parameter"] = _per_parameter(units, hidden, intermediate)
        for stage, bucket in [(3, 0), *((2, bucket) for bucket in BUCKETS)]:
            calls: Counter[tuple[str, int]] = Counter()
            for op in zero_step(stage, units, 8, bucket=bucket or BUCKETS[0]).ops:
                if op.func:
                    calls[op.func, op.n_bytes] += 1
            found[f"{name} zero-{stage}" + (f" buckets of {bucket}" if bucket else "")] = calls
    return found


@functools.cache
def streams() -> Streams:
    """The streams, read-only."""
    counts = _counts()
    shape = len(counts), KEPT
    is_rs, n_bytes, calls = np.zeros(shape, bool), np.full(shape, 1024, np.int64), np.zeros(shape)
    for row, counted in enumerate(counts.values()):
        slots: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for (func, size), n in counted.items():
            slots.setdefault((func, size_class(size)), []).append((size, n))
        moved = sorted(slots.items(), key=lambda item: -sum(size * n for size, n in item[1]))
        for column, ((func, _), sizes) in enumerate(moved[:KEPT]):
            is_rs[row, column] = func == TUNED_FUNCS[1]
            n_bytes[row, column] = max(sizes, key=lambda s: s[0] * s[1])[0]
            calls[row, column] = sum(n for _, n in sizes)
    for array in (is_rs, n_bytes, calls):
        array.flags.writeable = False
    return Streams(tuple(counts), is_rs, n_bytes, calls)
