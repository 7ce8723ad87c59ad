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
    belief = search.state.belief
    shape = search.n_slots, search.open.shape[1]
    colours = np.empty((*shape, 3))
    for slot in range(search.n_slots):
        saving, _, _ = belief.outlook(slot)
        part = np.clip(saving / DARKEST, -1, 1)
        part = part[:, None]
        ink = np.where(part > 0, GREEN, RED)
        strength = np.abs(part)
        colours[slot] = WHITE + strength * (ink - WHITE)
    colours[~search.open] = GREY

    tall = colours.repeat(CELL, axis=0)
    wide = tall.repeat(CELL, axis=1)
    pixels = wide.astype(np.uint8)
    for slot, config in enumerate(search.confirmed):
        _frame(pixels, slot, config)
    return pixels


def _frame(pixels: Array, slot: int, config: int) -> None:
    """Draw a frame into the square of a setting."""
    top = slot * CELL
    left = config * CELL
    square = pixels[top : top + CELL, left : left + CELL]
    square[:FRAME] = BLACK
    square[-FRAME:] = BLACK
    square[:, :FRAME] = BLACK
    square[:, -FRAME:] = BLACK
