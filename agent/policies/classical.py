"""Search without a learned policy, for comparison: NCCL's default, random, descent, sweep, NVIDIA's price of an SM.

Each decides for all slots of a job in every window, as the search asks it to (``envs.search.interfaces``): the slots'
trials run side by side, and what a config saved is what the belief makes of all windows and durations, the same for
every entrant. So each of them has the best estimate of its own trials that there is; which config to try next is its
own. ``horizon``, ``patience`` and ``care`` lost the least of what ``tests/tools/fit_classical.py`` tried on jobs that
no suite holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...envs.search.interfaces import COMPARE, GO_ON, LEAVE, actions_of
from ...envs.search.observation import Seen, decode
from ...traces.fingerprint import FEATURES, N_FEATURES
from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CHANNELS, N_CONFIGS
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
    """What a searcher remembers of one job."""

    asked: dict[int, Array] = field(default_factory=dict)  # see Turn, by slot
    calls: dict[int, Array] = field(default_factory=dict)  # the same
    is_done: bool = False  # what it found is compared, or was


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
            if starts[i]:
                state[i] = Memo()
            is_allowed = seen.open[i] & (seen.risk[i] <= self.care)
            turn = _turn(seen, i, is_allowed)
            turn.asked = state[i].asked.setdefault(turn.slot, turn.asked)
            turn.call = state[i].calls.setdefault(turn.slot, turn.call)
            _note_call(turn, seen, i)
            if is_early[i]:  # a proven gain is confirmed before the search goes on, for every entrant
                savings = np.where(is_allowed, seen.saving[i], -np.inf)
                chosen[i] = savings.argmax()
                what[i] = COMPARE
                continue
            chosen[i] = self.best(turn) if turn.round >= self.horizon else self.choose(turn)
            turn.asked[chosen[i]] += 1
            if seen.is_refining[i]:
                what[i] = LEAVE
                continue
            is_settled = seen.last[i, chosen[i]] and seen.context.idle[i] >= self.patience
            is_over = bool(turn.is_last and is_settled)
            what[i] = self._what_next(state[i], is_over, self.may_compare(bool(promises[i])))
        actions = actions_of(chosen, what)
        return actions if np.ndim(observation) == 2 else actions[0], state

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
    return Turn(
        slot=slot,
        is_last=bool(seen.is_last_slot[i]),
        round=round(float(context.round[i])),
        open=np.flatnonzero(allowed),
        mean=mean,
        asked=np.zeros(N_CONFIGS),
        own=int(seen.features[i, _OWN_PAIR].argmax()),
        own_channels=round(2 ** (6 * float(seen.features[i, _OWN_CHANNELS]))),
    )


def _note_call(turn: Turn, seen: Seen, i: int) -> None:
    """Keep the time of the slot's calls in the last window; exactly 0 says that none was sampled."""
    log_time = float(seen.context.last_call[i])
    if turn.round and log_time:
        ran = int(seen.last[i].argmax())
        turn.call[ran] = math.exp(log_time)


class Default(Searcher):
    """Leaves everything to NCCL."""

    def choose(self, turn: Turn) -> int:
        """AUTO."""
        return 0


class Random(Searcher):
    """Any config that may be chosen, all equally likely, for ``horizon`` windows."""

    horizon, patience = 16, 1

    def choose(self, turn: Turn) -> int:
        """A random one."""
        return int(self.rng.choice(turn.open))


def _of_pair(pair: int, turn: Turn) -> list[int]:
    """Configs of a pair from the fewest channels to NCCL's own count; of NCCL's own pair those of AUTO too."""
    rows = [1 + pair] + ([0] if pair == turn.own else [])
    found = [c for c in turn.open if int(c) // N_CHANNELS in rows]
    return [int(c) for c in sorted(found, key=lambda c: CHANNELS[c % N_CHANNELS] or 99)]


class CoordinateDescent(Searcher):
    """One knob at a time, as AutoCCL does within its subspaces, in all slots at once: all pairs, then channel counts
    outwards from the best until they get worse, then pairs again at that count, until nothing gains."""

    horizon, patience = 8, 2

    def choose(self, turn: Turn) -> int:
        """The next untried neighbour of the best config, else the best."""
        best = turn.best
        pair = turn.own if best < N_CHANNELS else best // N_CHANNELS - 1
        channel = best % N_CHANNELS
        pairs = list(range(channel, N_CONFIGS, N_CHANNELS))
        row = _of_pair(pair, turn)
        at = row.index(best)
        beside = (at - 1, at - 2 if channel == 0 else at + 1)
        counts = [row[k] for k in beside if 0 <= k < len(row)]
        return turn.first(pairs + counts if channel == 0 else counts + pairs)


class Sweep(Searcher):
    """Every config once, in order, then the best (as FlagCX)."""

    patience = 2

    def choose(self, turn: Turn) -> int:
        """The first untried one, else the best."""
        return turn.first(turn.untried)


class NvidiaPrice(Searcher):
    """NVIDIA's own price of an SM on measured times of calls, without a look at the step: a channel takes an SM.

    NCCL 2.32 has this rule for its symmetric kernels (``lsa.cc`` of ``sym_model``): of each kernel the smallest even
    number of channels whose time is at most 1.025 of that with the most; of these the least time x (1 + 0.02 x
    channels; 0.025 in an older model, 0.01 for reductions on Rubin, which lost least here). NCCL takes times from a
    model. Here they are measured: each pair with NCCL's own number first, then fewer channels of whichever pair may
    still be the cheapest.
    """

    horizon, patience, care = 12, 2, 0.05
    #: What fewer channels may cost in time, and what a channel costs.
    slower, price = 1.025, 0.01

    def choose(self, turn: Turn) -> int:
        """The next config whose time the rule needs, else what it ends with."""
        firsts = _firsts(turn)
        unknown = [c for c in firsts if _lacks_time(c, turn)]
        if unknown:
            return min(unknown, key=lambda c: turn.asked[c])
        bounds = {c: self._bound(c, turn) for c in firsts}
        following = self._settled(min(bounds, key=bounds.__getitem__), turn)[1]
        return self.best(turn) if following is None else following

    def best(self, turn: Turn) -> int:
        """The cheapest by the times that are known."""
        found = [self._settled(c, turn)[0] for c in _firsts(turn)]
        return min(found, key=lambda c: self._cost(c, turn))

    def may_compare(self, promises: bool) -> bool:
        """Always: the rule does not ask what the belief expects."""
        return True

    def _settled(self, first: int, turn: Turn) -> tuple[int, int | None]:
        """The fewest channels known to be good enough, of the pair that ``first`` runs with NCCL's own number; and what
        is to be measured before fewer can be told."""
        found = first
        for config in _fewer(first, turn):
            if _lacks_time(config, turn):
                return found, config
            if not turn.call[config] <= self.slower * _time(first, turn):
                break
            found = config
        return found, None

    def _cost(self, config: int, turn: Turn) -> float:
        channels = CHANNELS[config % N_CHANNELS] or turn.own_channels
        return _time(config, turn) * (1 + self.price * channels)

    def _bound(self, first: int, turn: Turn) -> float:
        """What a pair costs at least: fewer channels are taken to be no faster."""
        found, following = self._settled(first, turn)
        return self._cost(found, turn) if following is None else _time(first, turn) * (1 + 2 * self.price)


def _firsts(turn: Turn) -> list[int]:
    """AUTO and each open pair with NCCL's own number of channels."""
    return [int(c) for c in turn.open if c % N_CHANNELS == 0]


def _fewer(first: int, turn: Turn) -> list[int]:
    """Open configs of the same pair with even numbers of channels below the default's, from the most on."""
    row = N_CHANNELS * (1 + turn.own) if first == 0 else first
    fewer = [k for k, n in enumerate(CHANNELS) if 0 < n < turn.own_channels and n % 2 == 0]
    return [row + k for k in reversed(fewer) if row + k in turn.open]


def _time(config: int, turn: Turn) -> float:
    """Of the slot's calls over the default's; infinite where it is not known."""
    if config == 0:
        return 1.0
    return float(np.nan_to_num(turn.call[config], nan=np.inf))


def _lacks_time(config: int, turn: Turn) -> bool:
    """A config whose calls were not sampled in two windows is left."""
    return bool(config > 0 and np.isnan(turn.call[config]) and turn.asked[config] < 2)


#: By name.
CLASSICAL: dict[str, type[Searcher]] = {
    "default": Default,
    "random": Random,
    "coordinate-descent": CoordinateDescent,
    "sweep": Sweep,
    "nvidia-price": NvidiaPrice,
}
