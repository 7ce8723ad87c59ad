"""What is believed of a whole job: how long every slot's calls take under every config, and what the step feels of it.

One Gaussian over the log time of each slot's calls under each config (against NCCL's own choice), over each slot's
*exposure* (the part of a call's time that the step waits for), over what is left of a config's effect on the step,
and over the default's step time now. Its prior comes from a small network that has seen many simulated jobs
(``tests/tools/fit_prior.py`` fits it): a mean, factors that all slots of the job share, factors of one slot, and a
variance of its own for each figure. Durations of calls and step times turn it into the posterior by an extended
Kalman filter (Rasmussen and Williams 2006, chapter 2; Sarkka 2013, chapter 5). Numpy only.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...traces.fingerprint import N_FEATURES
from ...traces.spaces import N_CONFIGS
from .interactions import Interactions
from .normal import above, expected_improvement, within

Array = np.ndarray[Any, Any]

#: Figures of a slot: log times (N_CONFIGS), residual effects (N_CONFIGS), exposure.
N_FIGURES = 2 * N_CONFIGS + 1
#: Standard deviation of a window's log duration of calls, what it is off beyond that, and what a joint effect may miss,
#: as a part of it.
CALL_NOISE, CALL_FLOOR, MISFIT = 0.03, 0.03, 0.2
#: What the sum of the slots' effects may miss that is no interaction, as a part of it.
ADDED = 0.1
#: Rounds over all slots in which the best table is looked for, where slots interact.
ROUNDS = 3
#: The prior's variances are those of a mixture of worlds, and few are as wild as the whole: so much of them is taken.
DOUBT = 0.7
#: Standard deviation by which the default's log step time may wander, a step.
WANDER = 3e-4
#: A step time further off than so many standard deviations counts for less: step times have heavy tails.
OUTLIER = 4.0
#: Logs of call times are clipped to this range, in training as well; above FAR none is believed to save anything.
LOG_RANGE, FAR = (-3.0, 2.0), 1.0
#: Of calls that are far too long: standard deviations are so many times as wide, after so much is added (log). Of 5,091
#: first windows in 300 simulated jobs 11 % were, where above 10 % was expected, 6 % where 0.1 to 10, 0.1 % where less.
WIDER, BROAD = 1.4, 0.1
#: The least that a step or a call can take, as a part of the default's.
LEAST = 0.05
#: What is not to be had is taken to save this, as a part of the step.
LOST = -9.0


class Prior:
    """The network: features and mask of a slot -> mean, own variance and loadings of its N_FIGURES figures.

    ``weights`` (float32): ``w0``, ``b0``, ``w1``, ``b1`` of two tanh layers, ``w2`` (m, N_FIGURES * (2 + k)), ``b2``;
    ``n_shared``: how many of the k factors all slots of a job share.
    """

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = {k: np.asarray(v, np.float32) for k, v in weights.items() if k != "n_shared"}
        self.n_shared = int(weights["n_shared"])
        self.n_factors = len(self.weights["b2"]) // N_FIGURES - 2
        if len(self.weights["w0"]) != N_FEATURES + N_CONFIGS:
            raise ValueError(
                "the prior was fitted to other features: fit anew (python tests/tools/fit_prior.py)"
            )

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prior:
        """The shipped prior, or the one in ``path``. Raises ValueError when it is none of this version."""
        source = Path(path) if path is not None else resources.files(__package__).joinpath("prior.npz")
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls({key: arrays[key] for key in arrays.files})
        except (OSError, KeyError) as error:
            raise ValueError(f"{source} holds no prior: {error}") from error

    def __call__(self, features: Array, mask: Array) -> tuple[Array, Array, Array]:
        """``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) -> mean (s, N_FIGURES), own variance (s, N_FIGURES),
        loadings (s, N_FIGURES, k)."""
        w = self.weights
        x = np.concatenate([features, mask], axis=1).astype(np.float32)
        for layer in "01":
            x = np.tanh(x @ w["w" + layer] + w["b" + layer])
        out = (x @ w["w2"] + w["b2"]).astype(np.float64)
        mean, own, loadings = np.split(out, [N_FIGURES, 2 * N_FIGURES], axis=1)
        own = np.exp(np.clip(own, -9.0, 3.0)) + 1e-5
        return mean, own, loadings.reshape(len(out), N_FIGURES, self.n_factors)


class _Effects(NamedTuple):
    """What the ``a`` arms of a slot save, as parts of the step."""

    mean: Array  # (a,)
    cov: Array  # (a, a)
    by_exposure: Array  # (a,) slopes by the slot's exposure ...
    by_log: Array  # (a,) ... and by each arm's own log time
    with_logs: Array  # (a, a) covariance of every arm's effect with every arm's log time


class Belief:
    """The belief over one job of ``s`` slots.

    ``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) bool with aliases folded, ``share`` (s,) of the step.
    Effects are parts of the default's step time that a config saves; AUTO saves 0.
    """

    def __init__(self, prior: Prior, features: Array, mask: Array, share: Array) -> None:
        self.share = np.asarray(share, np.float64)
        self.arms = [np.flatnonzero(row[1:]) + 1 for row in np.asarray(mask, bool)]
        mean, own, loadings = prior(features, mask)
        picks, self.parts, at = [], [], 1
        for arms in self.arms:
            picks.append(np.concatenate([[2 * N_CONFIGS], arms, N_CONFIGS + arms]))
            self.parts.append(slice(at, at + len(picks[-1])))
            at += len(picks[-1])
        self.mean, self.cov = np.zeros(at), np.zeros((at, at))
        shared = np.zeros((at, prior.n_shared))
        for s, (pick, part) in enumerate(zip(picks, self.parts, strict=True)):
            self.mean[part] = mean[s, pick]
            shared[part] = loadings[s, pick, : prior.n_shared]
            alone = loadings[s, pick, prior.n_shared :]
            self.cov[part, part] = alone @ alone.T + np.diag(own[s, pick])
        self.cov += shared @ shared.T
        self.cov *= DOUBT
        self.cov[0, 0] = 1e-4
        self.config = [np.full(N_CONFIGS, -1) for _ in self.arms]
        for index, arms in zip(self.config, self.arms, strict=True):
            index[arms] = np.arange(len(arms))
        self._effects: list[_Effects | None] = [None] * len(self.arms)
        self.interactions = Interactions(features, self.share)
        self._best: Array | None = None
        self.wander = WANDER
        # How far the last window was from what was expected of it, in standard deviations: the step, each slot's calls.
        self.off_step, self.off_calls = 0.0, np.zeros(len(self.arms))
        self.reveal, self.has_calls = 0.005, True  # what a window is expected to show

    # -- reading -----------------------------------------------------------------------------------------------

    def _effect(self, slot: int) -> _Effects:
        kept = self._effects[slot]
        if kept is not None:
            return kept
        part, share, a = self.parts[slot], self.share[slot], len(self.arms[slot])
        m, p = self.mean[part], self.cov[part, part]
        exposure, logs, rest = min(max(float(m[0]), 0.0), 1.3), m[1 : a + 1], m[a + 1 :]
        time = np.exp(within(logs, *LOG_RANGE))
        by_exposure, by_log = share * (1 - time), -share * exposure * time
        # Of an arm's effect with every figure of the slot: only three of them have a slope.
        cross = by_exposure[:, None] * p[0] + by_log[:, None] * p[1 : a + 1] + share * p[a + 1 :]
        cov = cross[:, :1] * by_exposure + cross[:, 1 : a + 1] * by_log + share * cross[:, a + 1 :]
        variance, with_exposure = p.diagonal()[1 : a + 1], p[0, 1 : a + 1]
        wait = exposure * (1 - time * (1 + np.minimum(variance, 1.0) / 2)) - with_exposure * time
        mean = share * (wait + rest)
        mean = np.where(
            logs > FAR, np.minimum(mean, 0.0), mean
        )  # no call that takes e times as long saves anything
        self._effects[slot] = found = _Effects(mean, cov, by_exposure, by_log, cross[:, 1 : a + 1])
        return found

    def figures(self, slot: int) -> tuple[Array, Array]:
        """Mean and standard deviation (N_CONFIGS,) of what a slot's configs save; zeros for AUTO and what is masked."""
        found, out = self._effect(slot), np.zeros((2, N_CONFIGS))
        out[:, self.arms[slot]] = found.mean, np.sqrt(np.maximum(found.cov.diagonal(), 0))
        return out[0], out[1]

    def too_long(self, slot: int, times: float) -> Array:
        """(N_CONFIGS,) how likely each config of a slot is to make a step take more than so many default steps; zeros
        for AUTO and what is masked.

        How long the calls become decides it: what they save is normal only near the mean. The longer a call, the less
        there is to hide it behind: of one that fills a step, as much is waited for as lies half-way to all of it.
        """
        part, arms = self.parts[slot], self.arms[slot]
        own = slice(part.start + 1, part.start + 1 + len(arms))
        waited = self.share[slot] * (1 + min(max(float(self.mean[part.start]), 0.0), 1.0)) / 2
        limit = math.log(1 + (times - 1) / max(waited, 1e-3))
        deviation = WIDER * np.sqrt(self.cov.diagonal()[own] + BROAD**2)
        out = np.zeros(N_CONFIGS)
        out[arms] = above((limit - self.mean[own]) / deviation)
        return out

    def ahead(
        self, slot: int, table: Array, beside: float = 0.0, lost: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Of all configs (N_CONFIGS,): mean against the best, what a window under it is expected to teach of that
        (standard deviation of the change of the mean), and the knowledge gradient: by how much the best mean is
        expected to rise for it (Frazier et al. 2008).

        ``table`` (s,) is what the other slots run. A window shows both the duration of the slot's calls and, less
        surely, the step: ``beside`` is the variance of what the other slots are doing to that meanwhile. ``lost``
        (N_CONFIGS,) bool: what is not to be had, and so not the best.
        """
        arms = self.arms[slot]
        mean, learned, worth = np.zeros(N_CONFIGS), np.zeros(N_CONFIGS), np.zeros(N_CONFIGS)
        if not len(arms):
            return mean, learned, worth
        effects, cov, _, _, logs = self._effect(slot)
        if self.interactions.is_there:
            joint, also = self.interactions.effects(table, slot, np.concatenate([[0], arms]))
            effects = effects - (joint[1:] - joint[0])
            cov = cov + also[1:, 1:] - also[1:, :1] - also[:1, 1:] + also[0, 0]
        at, a = self.parts[slot].start + 1, len(arms)
        lost = np.zeros(N_CONFIGS, bool) if lost is None else lost
        able, auto = np.where(lost[arms], LOST, effects), LOST if lost[0] else 0.0
        b = int(able.argmax())
        best = max(float(able[b]), auto)
        own = cov.diagonal() + self.reveal**2 + beside
        own_log = self.cov.diagonal()[at : at + a] + CALL_FLOOR**2 + CALL_NOISE**2
        both = logs.diagonal()
        k1, k2 = cov.diagonal(), both  # covariance of every arm's lead with its effect, and with its log time
        if best > auto:
            k1, k2 = k1 - cov[b], k2 - logs[b]
            # Of the best itself: against the runner-up.
            able[b] = LOST
            r = int(able.argmax())
            second = max(float(able[r]), auto)
            k1[b], k2[b] = cov[b, b], logs[b, b]
            if second > auto:
                k1[b], k2[b] = k1[b] - cov[r, b], k2[b] - logs[r, b]
        if not self.has_calls:
            told = k1**2 / own
        else:
            det = np.maximum(own * own_log - both**2, 1e-18)
            told = (k1**2 * own_log - 2 * k1 * k2 * both + k2**2 * own) / det
        deviation = np.sqrt(np.maximum(told, 0.0))
        gap = effects - best
        if best > auto:
            gap[b] = second - best
        worth[arms], learned[arms] = expected_improvement(gap, deviation), deviation
        mean[arms] = effects
        return mean - best, learned, worth

    @property
    def exposure(self) -> tuple[Array, Array]:
        """Mean and standard deviation (s,) of the part of each slot's time that the step waits for."""
        at = [part.start for part in self.parts]
        return np.clip(self.mean[at], 0.0, 1.3), np.sqrt(np.maximum(self.cov[at, at], 0))

    def saving(self, configs: Array) -> tuple[float, float]:
        """Mean and standard deviation of what a whole table (s,) of configs saves, as a part of the step."""
        total, at, slopes = self._linear(configs)
        joint, unsure = self._joint(configs)
        variance = float(slopes @ self.cov[np.ix_(at, at)] @ slopes)
        return total - joint, math.sqrt(max(variance, 0.0) + unsure)

    def _linear(self, configs: Array) -> tuple[float, Array, Array]:
        """Mean of what a table (s,) saves; figures (indices into ``mean``) that it has a slope by, and the slopes."""
        total, at, slopes = 0.0, list[int](), list[float]()
        for s, config in enumerate(configs):
            i = self.config[s][int(config)]
            if i >= 0:
                effect, start = self._effect(s), self.parts[s].start
                total += float(effect.mean[i])
                at += [start, start + 1 + i, start + 1 + len(self.arms[s]) + i]
                slopes += [effect.by_exposure[i], effect.by_log[i], self.share[s]]
        return total, np.array(at, np.int64), np.array(slopes, np.float64)

    def best(self) -> Array:
        """The table of best means, (s,)."""
        if self._best is None:
            self._best = np.zeros(len(self.arms), np.int64)
            for s, arms in enumerate(self.arms):
                mean = self._effect(s).mean
                if len(arms) and mean.max() > 0:
                    self._best[s] = arms[mean.argmax()]
            if self.interactions.is_there:
                self._best = self._climb(self._best)
        return self._best.copy()

    def saving_mean(self, table: Array) -> float:
        """Mean of :meth:`saving` alone."""
        return self._linear(table)[0] - self._joint(table)[0]

    def _climb(self, start: Array) -> Array:
        """From a table on, slot by slot, to one that no other config of a single slot makes better."""
        table = start.copy()
        for _ in range(ROUNDS):
            before = table.copy()
            for s, arms in enumerate(self.arms):
                configs = np.concatenate([[0], arms])
                joint = self.interactions.means(table, s)[configs]
                table[s] = configs[(np.concatenate([[0.0], self._effect(s).mean]) - joint).argmax()]
            if np.array_equal(table, before):
                break
        return table

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, configs: Array, log_step: float, noise: float, call_logs: Array, steps: int) -> None:
        """One window under ``configs`` (s,): the log of its step time over the first default's (NaN: not measured),
        the standard deviation of that, logs of the slots' call times over their default's (s,; NaN: not sampled), and
        the steps since the last window."""
        self.cov[0, 0] += self.wander**2 * steps
        self.off_step, self.off_calls = 0.0, np.zeros(len(self.arms))
        seen, misses, noises = [], [], []
        for s, config in enumerate(configs):
            i = self.config[s][int(config)]
            if i >= 0 and np.isfinite(call_logs[s]):
                at = self.parts[s].start + 1 + i
                seen.append(at)
                misses.append(float(np.clip(call_logs[s], *LOG_RANGE)) - self.mean[at])
                noises.append(CALL_NOISE**2 + CALL_FLOOR**2)
                self.off_calls[s] = misses[-1] / math.sqrt(self.cov[at, at] + noises[-1])
        if seen:  # first: they say where to set the tangent for the step
            self._see(np.array(seen), np.array(misses), np.array(noises))
        if np.isfinite(log_step):
            total, figures, slopes = self._linear(configs)
            joint, unsure = self._joint(configs)
            level, variance = float(self.mean[0]), noise**2 + (MISFIT * total) ** 2 + unsure
            took = max(math.exp(log_step - level - joint), LEAST)  # the slope is that here: the log bends
            row = np.append(figures, 0), np.append(-slopes / took, 1.0)
            self.off_step = self._see_step(*row, 1 - (1 - total) / took, variance)
            self._see_table(configs, log_step - level, noise)

    def _joint(self, table: Array) -> tuple[float, float]:
        """Mean and variance of what a table (s,) does beyond the sum of its slots, as a log of the step."""
        return self.interactions.effect(table) if self.interactions.is_there else (0.0, 0.0)

    def _see_table(self, table: Array, log_step: float, noise: float) -> None:
        """A window under a table (s,), for what slots do to each other: the log of its step over the default's now."""
        self.interactions.see(table, log_step, noise)
        tables = self.interactions.tables
        total, variance = (
            np.zeros(len(tables)),
            np.zeros(len(tables)),
        )  # of what their slots save, each for itself
        for s, index in enumerate(self.config):
            at, effect = index[tables[:, s]], self._effect(s)
            runs = np.flatnonzero(at >= 0)
            total[runs] += effect.mean[at[runs]]
            variance[runs] += effect.cov[at[runs], at[runs]]
        left = np.maximum(1 - total, LEAST)
        self.interactions.fit(np.log(left), ((ADDED * total) ** 2 + variance) / left**2)
        self._best = None  # the slots' own effects are as they were

    def compare(self, table: Array, beside: Array, log_ratio: float, noise: float) -> None:
        """``log_ratio``: of the step under ``beside`` (s,) over that under ``table`` (s,), one window after the other;
        ``noise``: its standard deviation. What the two have in common cancels. Unlike in :meth:`observe` the slope is
        that at what was expected: most pairs differ by little, where the log hardly bends."""
        total, at, slopes = self._linear(table)
        other, at_other, slopes_other = self._linear(beside)
        left, rest = max(1 - total, LEAST), max(1 - other, LEAST)
        joint, unsure = self._joint(table)
        joint_other, unsure_other = self._joint(beside)
        row = np.concatenate([at, at_other]), np.concatenate([slopes / left, -slopes_other / rest])
        expected = math.log(rest / left) + joint_other - joint
        variance = noise**2 + (MISFIT * (total - other)) ** 2
        self._see_step(*row, log_ratio - expected, variance + unsure + unsure_other)
        self._see_table(table, math.log(rest) + joint_other - log_ratio, noise)

    def _see_step(self, at: Array, slopes: Array, miss: float, variance: float) -> float:
        """What goes by ``slopes`` of the figures ``at`` was off by ``miss``; by how many standard deviations that was.
        An outlier counts for less."""
        cross = slopes @ self.cov[at]
        expected = max(float(cross[at] @ slopes), 0.0)
        off = miss / math.sqrt(expected + variance)
        spread = expected + max(off**2 / OUTLIER**2, 1.0) * variance
        gain = cross / spread
        self.mean = self.mean + gain * miss
        self.cov -= np.outer(gain, cross)
        self.touched()
        return off

    def _see(self, at: Array, misses: Array, variances: Array) -> None:
        """The figures ``at`` (k,) themselves were off by ``misses``."""
        cross = self.cov[at].T
        spread = cross[at] + np.diag(variances)
        gain = np.linalg.solve(spread, cross.T).T
        self.mean = self.mean + gain @ misses
        self.cov -= gain @ cross.T
        self.touched()

    def touched(self) -> None:
        """``mean`` or ``cov`` have been changed: what was worked out from them no longer holds."""
        self._effects = [None] * len(self.arms)
        self._best = None

    def learn(self, at: Array | list[int], values: Array | list[float], noise: Array | list[float]) -> None:
        """Figures ``at`` (indices into ``mean``) were seen otherwise than by a window: values, standard deviations."""
        at = np.asarray(at, np.int64)
        self._see(at, np.asarray(values) - self.mean[at], np.asarray(noise) ** 2)
