"""What may make a step far too long is tried at few of a step's calls first: their times say whether all may run so.

A table that holds at about one call a step can hardly make it far too long, whatever the config; how long such a call
takes says what all of them would do to the step. So a config that is feared costs no more than another to try, and
which one is to be feared is known before a step is at stake.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .canary import GIVE_UP
from .windows import Plan

if TYPE_CHECKING:
    from .search import Search

Array = np.ndarray[Any, Any]

#: What is likelier than this to make a step far too long is tried at single calls first, in slots that have so many in
#: a step; of what is likelier still one call may do it.
DARING, FEWEST, MAD = 0.01, 8, 0.7
#: Calls of each slot that such a window is to hold.
HEARD = 2


def plan(search: Search, kind: str, table: Array) -> Plan | None:
    """The window in which a table (s,) holds at about one call a step, for slots that it is daring in; None where it
    is in none."""
    pairs = enumerate(zip(table, search.confirmed, strict=True))
    asked = np.array([config != own and is_daring(search, slot)[config] for slot, (config, own) in pairs])
    if not asked.any():
        return None
    configs, calls = np.where(asked, table, search.confirmed), search.job.calls[asked]
    one_of, wait, most = math.ceil(calls.max()), search.discard(configs), search.too_long_ms(configs)
    n_steps = math.ceil(HEARD * one_of / calls.min())
    return Plan(kind, configs, n_steps, wait, most, one_of, search.confirmed.copy())


def is_daring(search: Search, slot: int) -> Array:
    """(N_CONFIGS,) bool: configs of a slot of which single calls are to be tried first."""
    can_tell = search.job.calls[slot] >= FEWEST and search.belief.has_calls
    is_new = can_tell & (search.tried[slot] == 0) & ~search.heard[slot]
    return np.asarray(is_new & (search.canary.risk(slot, search.belief, search.tried) > DARING))


def risk(search: Search, slot: int) -> Array:
    """(N_CONFIGS,) how likely a trial of each config of a slot is to make a step far too long."""
    at_all = search.canary.risk(slot, search.belief, search.tried)
    at_few = search.belief.too_long(slot, 1 + search.job.calls[slot] * (GIVE_UP - 1))
    return np.where(is_daring(search, slot) & (at_all < MAD), np.minimum(at_all, at_few), at_all)
