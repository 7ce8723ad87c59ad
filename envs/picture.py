"""A picture of a search: what is believed of each setting of each slot, as an array of pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from .search.search import Search

Array = np.ndarray[Any, Any]

#: Pixels of a side of a setting's square, and of its frame.
CELL, FRAME = 12, 2
#: Part of the step that is saved, or lost, in the darkest colour.
DARKEST = 0.05
WHITE, GREY, BLACK = (255, 255, 255), (225, 225, 225), (0, 0, 0)
GREEN, RED = np.array((0, 128, 60)), np.array((190, 40, 30))


def picture(search: Search) -> Array:
    """(CELL * slots, CELL * N_CONFIGS, 3) uint8: a row for each slot, a square for each setting.

    Grey: it may not be chosen. The greener, the more of a step it is believed to save against the best table; the
    redder, the more it loses. A black frame marks the current table.
    """
    shape = search.n_slots, search.open.shape[1]
    colours = np.empty((*shape, 3))
    belief = search.state.belief
    for slot in range(search.n_slots):
        saving = belief.outlook(slot)[0]
        part = np.clip(saving / DARKEST, -1, 1)[:, None]
        ink = np.where(part > 0, GREEN, RED)
        colours[slot] = WHITE + np.abs(part) * (ink - WHITE)
    colours[~search.open] = GREY
    pixels = colours.repeat(CELL, axis=0).repeat(CELL, axis=1).astype(np.uint8)
    for slot, config in enumerate(search.confirmed):
        square = pixels[slot * CELL : (slot + 1) * CELL, config * CELL : (config + 1) * CELL]
        inside = square[FRAME:-FRAME, FRAME:-FRAME].copy()
        square[:] = BLACK
        square[FRAME:-FRAME, FRAME:-FRAME] = inside
    return pixels
