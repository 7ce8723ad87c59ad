"""What is still worth a window when a policy that goes by the belief has nothing left to try.

The belief is surer of configs that were never measured than it should be: in simulated jobs what a search misses is
most often the same pair with the next number of channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...traces.spaces import N_CHANNELS

Array = np.ndarray[Any, Any]

#: A slot of so small a share of the step is left to the belief.
NOTABLE = 0.02


def one_slot_neighbours(table: Array, share: Array, open_: Array, tried: Array) -> Array:
    """The table (s,), in all its slots at once with the next number of channels that was never measured, fewer before
    more.

    ``share`` (s,) of the step; ``open_`` (s, N_CONFIGS) bool: what may run; ``tried`` (s, N_CONFIGS): windows measured.
    """
    found, notable = table.copy(), np.flatnonzero((table > 0) & (share > NOTABLE)).tolist()
    for slot in notable:
        own = int(table[slot]) // N_CHANNELS * N_CHANNELS
        known = [c for c in range(own + 1, own + N_CHANNELS) if open_[slot, c]]
        at = known.index(table[slot]) if table[slot] in known else len(known)
        fresh = [c for c in known[max(at - 1, 0) : at] + known[at + 1 : at + 2] if not tried[slot, c]]
        found[slot] = fresh[0] if fresh else table[slot]
    return found
