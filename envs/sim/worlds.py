"""Where jobs run, and what jobs of some worlds have beyond a schedule: effects between slots, stragglers, congestion
that moves.

All of it is drawn: no public figure says how large such effects are on real machines (single collectives that jump 50
to 280 fold: NVIDIA/nccl#361; a change of one CTA that costs half the speed: NVIDIA/nccl#2307). What a config meets is a
random function of the job, the slot and the config, worked out where it is needed: a table of every pair of configs of
every pair of slots would be larger than all else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy import arange, asarray, full, ones, take_along_axis, where, zeros

from ...traces.spaces import N_CHANNELS
from ..nccl_model.clusters import ClusterArrays
from ..nccl_model.columns import Columns
from .fabric.params import FabricParams
from .noise import Range, log_uniform
from .step import Law

Array = np.ndarray[Any, Any]
#: Groups of slots of a job whose configs act on the step together.
N_GROUPS = 3
#: Weight of one congestion in that of the present, where it is worked out for the mean of a whole period. Two values
#: are enough: a sine's mean is a Gauss-Chebyshev sum.
USUAL = (0.5 - 0.5**1.5, 0.5 + 0.5**1.5)


@dataclass(frozen=True)
class Extra:
    """What the extras of jobs are drawn from. Ranges are (low, high), even on a log scale; 0 is none."""

    joint: Range = (0.0, 0.0)  # what a group of slots may help or disturb, part of the step
    group: int = 2  # slots of a group
    often: float = 0.3  # probability that some configs of a group do so
    straggle: float = 0.0  # probability that a config has stragglers ...
    late_often: Range = (0.002, 0.01)  # ... of a slot in this share of steps ...
    late_size: Range = (0.5, 2.0)  # ... which take this much longer, in steps
    by_channels: bool = False  # stragglers come with many channels, not with some configs
    moves: Range = (0.0, 0.0)  # log size of congestion that moves from some configs to others
    period: Range = (4_000, 40_000)  # steps until it is back
    sudden: float = 0.5  # probability that it jumps rather than swings


@dataclass
class Extras(Columns):
    """Of ``n`` jobs; arrays (n,) unless the comment says more. 0 is none."""

    key: Array  # uint64: what their random functions begin with
    groups: Array  # (n, N_GROUPS, slots of a group)
    joint: Array
    often: Array
    straggle: Array  # (n, N_CHANNELS) probability that a config on so many channels has stragglers
    late_often: Array
    late_size: Array
    moves: Array
    period: Array
    phase: Array
    sudden: Array

    @classmethod
    def draw(cls, kind: Extra, n_slots: Array, rng: np.random.Generator) -> Extras:
        """Of jobs with ``n_slots`` (n,)."""
        n = len(n_slots)
        of_job = n_slots[:, None, None]
        shape = n, N_GROUPS, 16
        there = arange(16) < of_job
        drawn = rng.random(shape)
        drawn = where(there, drawn, 2.0)
        order = drawn.argsort(axis=2)
        rising = np.linspace(0, 2, N_CHANNELS)
        by_channels = rising if kind.by_channels else ones(N_CHANNELS)
        # Groups are of three slots at most; where a job has fewer, the first stands for the rest.
        place = np.minimum(arange(3), of_job - 1)
        place = np.broadcast_to(place, (n, N_GROUPS, 3))
        groups = take_along_axis(order, place, axis=2)
        groups[:, :, kind.group :] = groups[:, :, :1]
        return cls(
            key=rng.integers(0, 2**63, n).astype(np.uint64),
            groups=groups,
            joint=_sizes(rng, kind.joint, n),
            often=full(n, kind.often),
            straggle=np.tile(kind.straggle * by_channels, (n, 1)),
            late_often=log_uniform(rng, kind.late_often, n),
            late_size=log_uniform(rng, kind.late_size, n),
            moves=_sizes(rng, kind.moves, n),
            period=log_uniform(rng, kind.period, n),
            phase=rng.random(n),
            sudden=rng.random(n) < kind.sudden,
        )

    def together(self, configs: Array, pair: Array) -> Array:
        """Log effect (n,) on the step of what slots run side by side; ``configs`` and the ``pair`` that runs (n, S).

        Configs of a group get along or do not by the product of their traits, of which a part is its pair's, and a few
        combinations besides for no reason.
        """
        job = arange(len(self))
        place = job[:, None, None], self.groups
        group = arange(1, N_GROUPS + 1, dtype=np.uint64)
        key = self.key[:, None] + group
        member_key, member = key[:, :, None], arange(3)
        members = configs[place]  # (n, N_GROUPS, 3)
        by_pair = chance(member_key, 1, member, pair[place])
        by_config = chance(member_key, 2, member, members)
        trait = 1.2 * by_pair + 0.8 * by_config - 1

        # Where a slot stands for the third as well, the third changes nothing.
        stands_in = self.groups[:, :, :2] == self.groups[:, :, 2:]
        is_pair = stands_in.any(axis=2)
        trait[:, :, 2] = where(is_pair, 1.0, trait[:, :, 2])

        cells = np.moveaxis(members, 2, 0)
        u = chance(key, 3, *cells) / self.often[:, None]
        by_chance = where(u < 1, 2 * u - 1, 0.0)
        found = 2 * trait.prod(axis=2) + by_chance
        effect = found.sum(axis=1) * self.joint
        return asarray(effect / N_GROUPS)

    def late(self, configs: Array, used: Array) -> tuple[Array, Array]:
        """Probability that a step straggles and by how much, in steps, each (n,); ``used`` (n, S): places with a
        slot."""
        slot = arange(configs.shape[1])
        has = chance(self.key[:, None], 10, slot, configs)
        count = configs % N_CHANNELS
        share = take_along_axis(self.straggle, count, axis=1)
        straggling = used & (has < share)
        often = self.late_often * straggling.sum(axis=1)
        return often, self.late_size

    def congestion(self, configs: Array, pair: Array, weight: Array) -> Array:
        """Log of by how much calls take longer, (n, S), where one congestion weighs ``weight`` (n,), another the
        rest; what the one slows most the other slows least."""
        key = self.key[:, None]
        w = weight[:, None]
        by_pair = 0.6 * chance(key, 20, pair)
        by_count = 0.4 * chance(key, 21, pair, configs % N_CHANNELS)
        one = by_pair + by_count
        log = w * one + (1 - w) * (1 - one)
        return asarray(self.moves[:, None] * log)

    def weight(self, at: Array) -> Array:
        """Of the one congestion at step ``at`` (n,)."""
        turn = at / self.period + self.phase
        sine = np.sin(2 * np.pi * turn)
        return where(self.sudden, sine > 0, 0.5 + 0.5 * sine)

    def usual_weights(self) -> tuple[Array, Array]:
        """Two weights (n,) whose mean effect is the mean of a period."""
        return tuple(where(self.sudden, round(w), w) for w in USUAL)  # type: ignore[return-value]


@dataclass
class SampledClusters(Columns):
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: ClusterArrays
    truth: FabricParams
    #: (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    other: Array
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Law
    world: Array  # index into WORLDS
    extras: Extras

    def truth_at(self, rows: Array, n_bytes: Array) -> FabricParams:
        """The fabrics at ``rows`` (m,), with what the formulas miss of messages of ``n_bytes`` (m,) there."""
        truth = self.truth.take(rows)
        shard = n_bytes / self.fleet.n_ranks[rows]
        octave = np.log2(shard)
        turned = self.turn[rows] * (octave - 20.0)
        angle = turned[:, None, None, None]
        here = np.cos(angle) * truth.effect
        elsewhere = np.sin(angle) * self.other[rows]
        return replace(truth, effect=here + elsewhere)


#: SplitMix64's multipliers and shifts.
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_MIX_AGAIN = np.uint64(0x94D049BB133111EB)
_27, _31, _11 = np.array([27, 31, 11], np.uint64)


def chance(key: Array, salt: int, *cells: Array) -> Array:
    """A number in [0, 1) for each key (uint64) and cell (whole numbers), the same each time.

    The mixing step is SplitMix64's (Steele, Lea and Flood 2014).
    """
    x = key + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    for cell in (np.int64(0), *cells):
        number = asarray(cell).astype(np.uint64)
        x = (x ^ number) * _MIX
        x = (x ^ (x >> _27)) * _MIX_AGAIN
        x = x ^ (x >> _31)
    return asarray((x >> _11) * 2.0**-53)


def _sizes(rng: np.random.Generator, bounds: Range, n: int) -> Array:
    _, most = bounds
    if most > 0:
        return log_uniform(rng, bounds, n)
    return zeros(n)
