"""Search without a learned policy, for comparison: NCCL's default, random, descent, sweep, NVIDIA's price of an SM.

Each decides for all slots of a job in every window, as the search asks it to (``envs.search.interfaces``): the slots'
trials run side by side, and what a config saved is what the belief makes of all windows and durations, the same for
every entrant. So each of them has the best estimate of its own trials that there is; which config to try next is its
own. ``horizon``, ``patience`` and ``care`` lost the least of what ``tests/tools/fit_classical.py`` tried on jobs that
no suite holds.
"""

from __future__ import annotations

import math

import numpy as np

from ...traces.records import CHANNELS
from ...traces.spaces import N_CHANNELS, N_CONFIGS
from .searcher import Searcher, Turn
from .thompson import Thompson


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
        unknown = [config for config in firsts if _lacks_time(config, turn)]
        if unknown:
            return min(unknown, key=lambda config: turn.asked[config])
        cheapest = min(firsts, key=lambda first: self._bound(first, turn))
        _, following = self._settled(cheapest, turn)
        if following is None:
            return self.best(turn)
        return following

    def best(self, turn: Turn) -> int:
        """The cheapest by the times that are known."""
        found = []
        for first in _firsts(turn):
            config, _ = self._settled(first, turn)
            found.append(config)
        return min(found, key=lambda config: self._cost(config, turn))

    def may_compare(self, promises: bool) -> bool:
        """Always: the rule does not ask what the belief expects."""
        return True

    def _settled(self, first: int, turn: Turn) -> tuple[int, int | None]:
        """The fewest channels known to be good enough, of the pair that ``first`` runs with NCCL's own number; and what
        is to be measured before fewer can be told."""
        found = first
        with_most = _time(first, turn)
        allowed = self.slower * with_most
        for config in _fewer(first, turn):
            if _lacks_time(config, turn):
                return found, config
            if _time(config, turn) > allowed:
                break
            found = config
        return found, None

    def _cost(self, config: int, turn: Turn) -> float:
        channels = CHANNELS[config % N_CHANNELS]
        if not channels:
            channels = turn.own_channels
        factor = 1 + self.price * channels
        return _time(config, turn) * factor

    def _bound(self, first: int, turn: Turn) -> float:
        """What a pair costs at least: fewer channels are taken to be no faster."""
        found, following = self._settled(first, turn)
        if following is None:
            return self._cost(found, turn)
        fewest = 2
        factor = 1 + self.price * fewest
        return _time(first, turn) * factor


def _firsts(turn: Turn) -> list[int]:
    """AUTO and each open pair with NCCL's own number of channels."""
    is_first = turn.open % N_CHANNELS == 0
    return turn.open[is_first].tolist()


def _fewer(first: int, turn: Turn) -> list[int]:
    """Open configs of the same pair with even numbers of channels below the default's, from the most on."""
    row = first
    if first == 0:
        row = N_CHANNELS * (1 + turn.own)
    found = []
    for place, channels in enumerate(CHANNELS):
        is_fewer = 0 < channels < turn.own_channels
        is_even = channels % 2 == 0
        config = row + place
        if is_fewer and is_even and config in turn.open:
            found.append(config)
    found.reverse()
    return found


def _time(config: int, turn: Turn) -> float:
    """Of the slot's calls over the default's; infinite where it is not known."""
    if config == 0:
        return 1.0
    time = turn.call[config]
    if np.isnan(time):
        return math.inf
    return float(time)


def _lacks_time(config: int, turn: Turn) -> bool:
    """A config whose calls were not sampled in two windows is left."""
    if config == 0:
        return False
    is_unknown = np.isnan(turn.call[config])
    return bool(is_unknown and turn.asked[config] < 2)


#: By name.
CLASSICAL: dict[str, type[Searcher] | type[Thompson]] = {
    "default": Default,
    "random": Random,
    "coordinate-descent": CoordinateDescent,
    "sweep": Sweep,
    "nvidia-price": NvidiaPrice,
    "thompson": Thompson,
}
