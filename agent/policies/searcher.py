"""What entrants without a learned policy share: they see one slot's turn at a time, and name its next config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...envs.search.interfaces import COMPARE, GO_ON, LEAVE, actions_of
from ...envs.search.observation import Seen, decode
from ...traces.fingerprint import FEATURES, N_FEATURES
from ...traces.records import PAIRS
from ...traces.spaces import N_CONFIGS
from .rule import is_proven, promises_gain

Array = np.ndarray[Any, Any]

#: Savings are measured in a slot's share of the step, of which this is the least: below, noise is all there is.
SMALLEST_SHARE = 0.01
#: Where a slot's features say what NCCL runs by itself, see ``traces.fingerprint.Fingerprint.vector``.
_OWN_PAIR = slice(N_FEATURES - len(PAIRS), N_FEATURES)
_OWN_CHANNELS = list(FEATURES).index("own_channels")


@dataclass
class Turn:
    """One slot's turn, as a searcher sees it; savings are in units of the slot's share of the step."""

    slot: int
    is_last: bool  # of the slots
    round: int  # windows of the search so far
    open: Array  # (a,) configs that may be chosen
    mean: Array  # (N_CONFIGS,) saving of what was tried; -inf: not tried; AUTO's is 0
    asked: Array  # (N_CONFIGS,) times that it was chosen
    own: int  # index of the pair of NCCL's own choice
    own_channels: int = 0  # its channels
    #: (N_CONFIGS,) time of the slot's calls over the default's, as last measured; NaN: not known
    call: Array = field(default_factory=lambda: np.full(N_CONFIGS, np.nan))

    @property
    def best(self) -> int:
        """The best of what was tried."""
        return int(self.open[self.mean[self.open].argmax()])

    @property
    def untried(self) -> list[int]:
        """What may be chosen and was not tried yet."""
        return [int(c) for c in self.open if np.isneginf(self.mean[c])]

    def first(self, configs: Sequence[int]) -> int:
        """The first of ``configs`` that was not tried yet, the best where there is none. Last comes what was asked for
        before: that window was given up, maybe for what ran in another slot."""
        allowed = self.untried
        new = (c for c in configs if c in allowed)
        return min(new, key=lambda c: self.asked[c], default=self.best)


@dataclass
class Memo:
    """What a searcher remembers of one search."""

    asked: dict[int, Array] = field(default_factory=dict)  # see Turn, by slot
    calls: dict[int, Array] = field(default_factory=dict)  # the same
    is_done: bool = False  # what it found is compared, or was
    has_left: bool = False  # its last word was LEAVE
    round: int = 0  # see Turn


class Searcher:
    """Base: takes observations apart; a subclass has :meth:`choose`."""

    #: Windows running under one table that say that it is done; at once, where nothing is left to chance.
    patience = 1
    #: Windows after which it keeps to the best it has tried.
    horizon = 30
    #: What is likelier than this to make a step far too long is not tried.
    care = 0.2

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def choose(self, turn: Turn) -> int:
        """Config to run next in this slot."""
        raise NotImplementedError

    def best(self, turn: Turn) -> int:
        """What it keeps to in the end."""
        return turn.best

    def may_compare(self, promises: bool) -> bool:
        """Whether the table in the end is compared; ``promises``: the belief expects a gain of its own best one."""
        return promises

    def predict(
        self,
        observation: Array,
        state: list[Memo] | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, list[Memo]]:
        """See ``envs.search.interfaces.Policy``. ``state`` is changed in place; ``deterministic`` makes no
        difference."""
        rows = np.atleast_2d(np.asarray(observation))
        seen = decode(rows)
        state = [Memo() for _ in rows] if state is None else state
        chosen = np.zeros(len(rows), np.int64)
        what = np.zeros(len(rows), np.int64)
        is_early = is_proven(seen)  # as the rule has it
        promises = promises_gain(seen)
        starts = np.zeros(len(rows), bool)
        if episode_start is not None:
            starts = np.atleast_1d(episode_start)
        for i in range(len(rows)):
            is_allowed = seen.open[i] & (seen.risk[i] <= self.care)
            turn = _turn(seen, i, is_allowed)
            state[i] = self._memo(state[i], turn.round, bool(starts[i]))
            turn.asked = state[i].asked.setdefault(turn.slot, turn.asked)
            turn.call = state[i].calls.setdefault(turn.slot, turn.call)
            _note_call(turn, seen, i)
            if is_early[i]:  # a proven gain is confirmed before the search goes on, for every entrant
                savings = np.where(is_allowed, seen.saving[i], -np.inf)
                chosen[i] = savings.argmax()
                what[i] = COMPARE
                continue
            if turn.round < self.horizon:
                chosen[i] = self.choose(turn)
            else:
                chosen[i] = self.best(turn)
            turn.asked[chosen[i]] += 1
            is_settled = seen.last[i, chosen[i]] and seen.context.idle[i] >= self.patience
            is_over = bool(turn.is_last and is_settled)
            may_compare = self.may_compare(bool(promises[i]))
            what[i] = self._what_next(state[i], is_over, may_compare)
            if seen.is_refining[i]:
                what[i] = LEAVE
            state[i].has_left = what[i] == LEAVE
        actions = actions_of(chosen, what)
        if np.ndim(observation) != 2:
            actions = actions[0]
        return actions, state

    @staticmethod
    def _memo(memo: Memo, round_: int, is_start: bool) -> Memo:
        """What is remembered in this turn: nothing of an earlier search, which was of the job before it changed."""
        is_later = memo.has_left or round_ < memo.round
        found = Memo() if is_start or is_later else memo
        found.round = round_
        return found

    @staticmethod
    def _what_next(memo: Memo, is_over: bool, may_compare: bool) -> int:
        """What comes after the config; ``is_over``: nothing is left to try."""
        if memo.is_done:
            return LEAVE
        if not is_over:
            return GO_ON
        memo.is_done = True
        return COMPARE if may_compare else LEAVE


def _turn(seen: Seen, i: int, allowed: Array) -> Turn:
    context = seen.context
    n_slots = round(float(context.slots[i]))
    slot = round(float(context.place[i]) * n_slots)
    share = max(float(context.share[i]), SMALLEST_SHARE)
    saved = seen.saving[i] - seen.saving[i, 0]
    was_tried = seen.count[i] > 0
    mean = np.where(was_tried, saved / share, -np.inf)
    mean[0] = 0.0
    log_channels = 6 * float(seen.features[i, _OWN_CHANNELS])  # to the base 2
    own_channels = round(2**log_channels)
    return Turn(
        slot=slot,
        is_last=bool(seen.is_last_slot[i]),
        round=round(float(context.round[i])),
        open=np.flatnonzero(allowed),
        mean=mean,
        asked=np.zeros(N_CONFIGS),
        own=int(seen.features[i, _OWN_PAIR].argmax()),
        own_channels=own_channels,
    )


def _note_call(turn: Turn, seen: Seen, i: int) -> None:
    """Keep the time of the slot's calls in the last window; exactly 0 says that none was sampled."""
    log_time = float(seen.context.last_call[i])
    if turn.round and log_time:
        ran = int(seen.last[i].argmax())
        turn.call[ran] = math.exp(log_time)
