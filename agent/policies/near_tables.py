"""After another policy has nothing left to try: the tables next to the current one.

A config that was measured among other changes may look worse than it is. So each config that ran before is tried once
by itself, in one slot of the current table, unless it is expected to lose much. Such a trial ends with its first step
that is clearly slower, so a trial that loses costs a step or two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...envs.search.interfaces import GO_ON, RUN, Policy, actions_of
from ...envs.search.observation import Seen, decode

Array = np.ndarray[Any, Any]

#: A neighbour is tried if it is expected to lose at most this part of the step against the current table.
MAX_LOSS = 0.1
#: ... and if its risk of a step that is far too long is below this probability.
MAX_RISK = 0.01
#: Neighbours tried beside one current table, at most.
MAX_TRIALS = 100
#: ``Context.idle`` after one whole pass over the slots without a trial is 4.
PASSED = 3.99
#: Decimals of a slot's place (its index over the number of slots) that tell slots apart.
PLACE_DECIMALS = 4


@dataclass
class JobMemory:
    """What the policy remembers of one job; slots go by their place in the job."""

    is_active: bool = False  # the other policy has nothing left to try beside the current table
    current: dict[float, int] = field(default_factory=dict)  # by slot: its config in the current table
    tried: set[tuple[float, int]] = field(default_factory=set)  # (slot, config) tried beside that table


#: What is remembered: the state of the other policy, and the memory of each job.
State = tuple[Any, list[JobMemory]]


class NearTables:
    """Asks ``policy`` first, and tries the neighbours of the current table when it has passed on all slots."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def predict(
        self,
        observation: Array,
        state: State | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, State]:
        """See ``envs.search.interfaces.Policy``. The state is that of ``policy`` and the memory of each job."""
        observation = np.asarray(observation)
        rows = np.atleast_2d(observation)
        seen = decode(rows)
        if state is None:
            state = None, [JobMemory() for _ in rows]
        inner, memories = state
        if episode_start is not None:
            starts = np.atleast_1d(episode_start)
            pairs = zip(memories, starts, strict=True)
            memories = [JobMemory() if starts_anew else memory for memory, starts_anew in pairs]
        actions, inner = self.policy.predict(rows, inner, episode_start, deterministic)
        actions = np.array(actions)
        for i, memory in enumerate(memories):
            self._notice(memory, seen, i)
            if memory.is_active:
                actions[i] = self._choose(memory, seen, i)
        if np.ndim(observation) != 2:
            actions = actions[0]
        return actions, (inner, memories)

    def _notice(self, memory: JobMemory, seen: Seen, i: int) -> None:
        """Take in the current config of the slot, and whether the other policy has passed on all slots."""
        place = _place(seen, i)
        current = int(seen.current[i].argmax())
        before = memory.current.get(place, current)
        # While a search runs nothing is tried beside its table: what was, belongs to the job before it changed.
        is_other = before != current
        is_refining = bool(seen.is_refining[i])
        if is_other or not is_refining:
            memory.is_active = False
            memory.current.clear()
            memory.tried.clear()
        memory.current[place] = current
        has_passed = seen.context.idle[i] > PASSED
        is_next = memory.is_active or has_passed
        memory.is_active = is_refining and is_next

    def _choose(self, memory: JobMemory, seen: Seen, i: int) -> Array:
        """The best neighbour in this slot that was not tried yet, as an action; none: the next slot's turn."""
        place = _place(seen, i)
        current = memory.current[place]
        gain = seen.saving[i] - seen.saving[i, current]
        is_measured = seen.count[i] > 0
        has_low_risk = seen.risk[i] < MAX_RISK
        is_safe = seen.open[i] & has_low_risk
        is_near = gain > -MAX_LOSS
        candidates = np.flatnonzero(is_measured & is_safe & is_near)
        others = [int(c) for c in candidates if c != current]
        new = [c for c in others if (place, c) not in memory.tried]
        if not new or len(memory.tried) >= MAX_TRIALS:
            return actions_of(np.array(current), GO_ON)
        best = max(new, key=lambda c: float(gain[c]))
        memory.tried.add((place, best))
        return actions_of(np.array(best), RUN)


def _place(seen: Seen, i: int) -> float:
    place = float(seen.context.place[i])
    return round(place, PLACE_DECIMALS)
