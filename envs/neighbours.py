"""What is still worth a window when a policy that goes by the belief has nothing left to try.

The belief is surer of configs that were never measured than it should be: in simulated jobs what a search misses is
most often the same pair with the next number of channels, or a slot in which NCCL's own choice would have been better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..traces.spaces import N_CHANNELS
from .belief import Belief

Array = np.ndarray[Any, Any]

#: A slot of so small a share of the step is left to the belief.
NOTABLE = 0.02


def untested(
    table: Array, share: Array, open_: Array, tried: Array, belief: Belief, seen: Mapping[bytes, int]
) -> Array:
    """The table (s,), or one beside it that was never measured.

    First, in all slots at once, its pairs with the next number of channels, fewer before more; then, one slot at a
    time, NCCL's own choice where the table's is not surely better. ``share`` (s,) of the step; ``open_`` (s,
    N_CONFIGS) bool: what may run; ``tried`` (s, N_CONFIGS): windows measured; ``seen``: how often a table ran, by its
    bytes.
    """
    found, notable = table.copy(), np.flatnonzero((table > 0) & (share > NOTABLE)).tolist()
    for slot in notable:
        own = int(table[slot]) // N_CHANNELS * N_CHANNELS
        known = [c for c in range(own + 1, own + N_CHANNELS) if open_[slot, c]]
        at = known.index(table[slot]) if table[slot] in known else len(known)
        fresh = [c for c in known[max(at - 1, 0) : at] + known[at + 1 : at + 2] if not tried[slot, c]]
        found[slot] = fresh[0] if fresh else table[slot]
    if (found != table).any() or len(table) == 1:
        return found
    for slot in notable:
        mean, deviation = (figure[table[slot]] for figure in belief.figures(slot))
        without = np.where(np.arange(len(table)) == slot, 0, table)
        if mean < deviation and not seen.get(without.tobytes()):
            return without
    return table
