"""What a profile measured of a job's compute, as evidence for the belief over that job.

A profile shows under NCCL's own choice what part of a collective's time nothing is computed. That is not what the
belief holds, the part of a shorter call that the step gains, but it tells of it: how much was measured on simulated
jobs of both families (``tests/check_advice.py fit``). It also shows how much longer compute takes beside a collective.
That is told to people only: fed to the belief it made predictions worse there, in every form that was tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ..traces.files import Trace
from ..traces.overlap import Overlap, exposed_ns, slowdowns
from ..traces.records import Slot, size_class
from ..traces.spaces import N_CONFIGS, actions_of, decision_of
from .belief import LOG_RANGE, Belief

Array = np.ndarray[Any, Any]

#: Exposure in the belief's sense for a part ``x`` of the time without compute: ``EXPOSED[0] + EXPOSED[1] * x``, give
#: or take ``EXPOSED[2]``.
EXPOSED = (0.49, 0.31, 0.25)
#: Of the compute that a config should slow less, by its channels and time, the step shows this part.
GIVEN_BACK = 0.5
#: Channels that each config asks for, (N_CONFIGS,); 0: as many as NCCL takes.
_ASKED = np.array([decision_of(action).n_channels for action in actions_of(np.arange(N_CONFIGS))])


@dataclass(frozen=True)
class SlotOverlap:
    """Of one slot under NCCL's own choice; NaN where it was not seen."""

    exposed: float = np.nan  # part of its time in which nothing is computed
    slowdown: float = np.nan  # compute beside it takes 1 + slowdown times as long


def given_back(exposed: float, slowdown: float, channels: float, ratio: Array) -> Array:
    """Part of a slot's time that the step should gain with each config by slowing compute less, (N_CONFIGS,).

    ``channels``: of NCCL's own choice, by whose number compute is slowed; ``ratio``: a call's time over its default's.
    """
    slow = slowdown * np.where(_ASKED > 0, _ASKED, channels) / max(channels, 1.0)
    return np.asarray(GIVEN_BACK * (1 - exposed) * (slowdown / (1 + slowdown) - ratio * slow / (1 + slow)))


def ratios(belief: Belief, slot: int) -> Array:
    """Mean of a call's time over its default's under each config, (N_CONFIGS,), as it is believed."""
    out, arms, part = np.ones(N_CONFIGS), belief.arms[slot], belief.parts[slot]
    at = slice(part.start + 1, part.start + 1 + len(arms))
    variance = np.minimum(np.diagonal(belief.cov)[at], 1.0)
    out[arms] = np.exp(np.clip(belief.mean[at], *LOG_RANGE)) * (1 + variance / 2)
    return out


def tell(belief: Belief, seen: Sequence[SlotOverlap]) -> None:
    """Let the belief know what was seen of its slots."""
    known = [(part.start, one.exposed) for part, one in zip(belief.parts, seen, strict=True) if one.exposed >= 0]
    if known:
        at, exposed = zip(*known, strict=True)
        belief.learn(list(at), EXPOSED[0] + EXPOSED[1] * np.minimum(exposed, 1.0), np.full(len(at), EXPOSED[2]))


def of_slot(seen: Iterable[tuple[Slot, SlotOverlap]], slot: Slot) -> SlotOverlap:
    """What was seen of a slot; recordings that do not tell the nodes of a communicator are taken by its ranks."""
    for other, one in seen:
        same = (other.func, other.size_class, other.n_ranks) == (slot.func, slot.size_class, slot.n_ranks)
        if same and other.n_nodes in (0, slot.n_nodes):
            return one
    return SlotOverlap()


def seen_in(trace: Trace, step_us: float) -> tuple[dict[Slot, SlotOverlap], list[Overlap]]:
    """What a recording shows of each slot as NCCL's own choice runs it, and every overlap that was measured."""
    if not len(trace.compute):
        return {}, []
    default = {g for g, rules in trace.tables.items() if not rules}
    events = trace.events[trace.events["table_generation"].isin(default)]
    overlaps = slowdowns(events, trace.compute, step_us)
    bare = exposed_ns(events, trace.compute)
    lasts = (events["end_ns"] - events["start_ns"]).astype("Float64")
    told = events.assign(bare=bare, lasts=lasts, size_class=events["n_bytes"].map(lambda n: size_class(int(n))))
    found = {}
    for key, mine in told[bare.notna()].groupby(["n_ranks", "n_nodes", "func", "size_class"]):
        n_ranks, n_nodes, func, klass = cast(tuple[int, int, str, int], key)
        slot = Slot(int(n_ranks), int(n_nodes), str(func), int(klass))
        exposed = float(mine["bare"].sum() / max(float(mine["lasts"].sum()), 1.0))
        own = _usual(mine)
        beside = next((o for o in overlaps if o.key == (*_key(slot), *own)), None)
        found[slot] = SlotOverlap(exposed, np.nan if beside is None else beside.slowdown)
    return found, overlaps


def _key(slot: Slot) -> tuple[int, int, str, int]:
    return slot.n_ranks, slot.n_nodes, slot.func, slot.size_class


def _usual(events: pd.DataFrame) -> tuple[str, str, int]:
    """What ran most often: algorithm, protocol, channels."""
    return Counter(zip(*(events[c] for c in ("algo", "proto", "n_channels")), strict=True)).most_common(1)[0][0]
