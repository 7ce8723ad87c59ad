"""The belief over a whole job: how long each slot's calls take under each config, and what of that the step waits for.

One Gaussian over the log time of each slot's calls under each config (against NCCL's own choice), each slot's
*exposure* (the part of a call's time that the step waits for), the remaining effect of each config on the step, and
the default's step time now. Its prior comes from a network: a mean, factors that all slots of the job share, factors
of one slot, and a variance of each figure. Measured calls and step times turn it into the posterior by an extended
Kalman filter (Rasmussen and Williams 2006, chapter 2; Sarkka 2013, chapter 5). Numpy only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....traces.spaces import N_CONFIGS
from .effects import Effects, Known, Places, Savings
from .normal import above, expected_improvement, within
from .prior import Prior

Array = np.ndarray[Any, Any]

#: Standard deviation of a window's log call time, as windows of one table scatter in the simulator.
CALL_NOISE = 0.03
#: What the log call time is off beyond that: the mean of a window is not the mean of the job.
CALL_FLOOR = 0.03
#: What the predicted effect of a table may miss, as a part of it: slots overlap, which the sum over slots leaves out.
MISFIT = 0.2
#: Part of the prior's variances that is taken: they are those of a mixture of worlds, and few are as wild as the whole.
DOUBT = 0.7
#: Standard deviation by which the default's log step time may drift in a step, at least ...
DRIFT = 3e-4
#: ... and as a part of a window's noise: a noisy job drifts more.
DRIFT_PART = 0.1
#: Noise that a window's worth is predicted with, before the job's own is known.
REVEAL = 0.005
#: Variance of the default's log step time at first: the few default steps give it within 1 %.
DEFAULT_VARIANCE = 1e-4
#: A step time further off than this many standard deviations counts for less: step times have heavy tails.
OUTLIER = 4.0
#: Logs of call times are clipped to this range, in training as well: beyond, a linear model of the step fails.
LOG_RANGE = (-3.0, 2.0)
#: A config with a larger log call time is believed to save nothing: its calls take e times as long.
FAR = 1.0
#: Calls that are far too long: standard deviations are multiplied by WIDER after BROAD (log) is added. Of 5,091 first
#: windows in 300 simulated jobs 11 % were too slow if more than 10 % was predicted, 6 % if 0.1 to 10, 0.1 % if less.
WIDER, BROAD = 1.4, 0.1
#: The least that a step or a call can take, as a part of the default's: logs must stay finite.
LEAST = 0.05
#: Saving of a config that cannot be had, as a part of the step: below any that can.
LOST = -9.0
#: Most of a slot's exposure: calls may hold up a step for a little longer than they take.
MOST_EXPOSURE = 1.3
#: Largest variance of a log call time in the mean saving: beyond, the expansion of exp fails.
MOST_VARIANCE = 1.0
#: Smallest share of a slot, and smallest determinant: both keep divisions finite.
TINY_SHARE, TINY_DETERMINANT = 1e-3, 1e-18
#: Rows of the covariance that are updated together, so that what is subtracted stays in the processor's cache.
ROWS = 64


class Belief:
    """The belief over one job of ``s`` slots.

    ``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) bool with aliases folded, ``share`` (s,) of the step.
    Savings are parts of the default's step time; AUTO saves 0. ``mean`` (m,) and ``cov`` (m, m): figure 0 is the
    default's log step time now; the part of slot s holds its exposure, then the log times and the remaining effects
    of its configs.
    """

    def __init__(self, prior: Prior, features: Array, mask: Array, share: Array) -> None:
        self.share = np.asarray(share, np.float64)
        self.arms = [
            np.flatnonzero(row[1:]) + 1 for row in np.asarray(mask, bool)
        ]  # (a,) configs of each slot
        self.parts = list[slice]()  # of ``mean``, by slot
        self._set_prior(prior, features, mask)
        self.config = [np.full(N_CONFIGS, -1) for _ in self.arms]  # config -> index among the slot's configs
        for index, arms in zip(self.config, self.arms, strict=True):
            index[arms] = np.arange(len(arms))
        self._places = Places.of(self.arms, self.parts, self.share)
        self._known = Known([None] * len(self.arms))
        # Standard deviations that the last window was off its prediction: the step, and each slot's calls.
        self.off_step = 0.0
        self.off_calls = np.zeros(len(self.arms))
        self.reveal, self.drift, self.has_calls = REVEAL, DRIFT, True  # see :meth:`begin`

    def _set_prior(self, prior: Prior, features: Array, mask: Array) -> None:
        mean, own, loadings = prior(features, mask)
        picks, size = list[Array](), 1
        for arms in self.arms:
            picks.append(np.concatenate([[2 * N_CONFIGS], arms, N_CONFIGS + arms]))
            self.parts.append(slice(size, size + len(picks[-1])))
            size += len(picks[-1])
        self.mean, self.cov = np.zeros(size), np.zeros((size, size))
        shared = np.zeros((size, prior.n_shared))
        for slot, part in enumerate(self.parts):
            pick = picks[slot]
            self.mean[part] = mean[slot, pick]
            shared[part] = loadings[slot, pick, : prior.n_shared]
            alone = loadings[slot, pick, prior.n_shared :]
            self.cov[part, part] = alone @ alone.T + np.diag(own[slot, pick])
        self.cov += shared @ shared.T
        self.cov *= DOUBT
        self.cov[0, 0] = DEFAULT_VARIANCE

    def begin(self, noise: float, reveal: float, has_calls: bool) -> None:
        """``noise``: standard deviation of a window's log step time; ``reveal``: part of it that a window's worth is
        predicted with; ``has_calls``: kernels are sampled on this job."""
        self.reveal = reveal * noise
        self.has_calls = has_calls
        # The default's own step time is no surer than a window of it, nor steadier.
        self.cov[0, 0] = max(self.cov[0, 0], noise**2)
        self.drift = max(DRIFT, DRIFT_PART * noise)

    # -- reading -----------------------------------------------------------------------------------------------

    def _effect(self, slot: int) -> Effects:
        kept = self._known.effects[slot]
        if kept is not None:
            return kept
        part, share = self.parts[slot], self.share[slot]
        a = len(self.arms[slot])
        m, p = self.mean[part], self.cov[part, part]
        exposure = min(max(float(m[0]), 0.0), MOST_EXPOSURE)
        logs, rest = m[1 : a + 1], m[a + 1 :]
        time = np.exp(within(logs, *LOG_RANGE))
        by_exposure = share * (1 - time)
        by_log = -share * exposure * time
        # Covariance of each saving with every figure of the slot: only three of these have a slope.
        cross = by_exposure[:, None] * p[0] + by_log[:, None] * p[1 : a + 1] + share * p[a + 1 :]
        with_logs = cross[:, 1 : a + 1]
        cov = cross[:, :1] * by_exposure + with_logs * by_log + share * cross[:, a + 1 :]
        variance = p.diagonal()[1 : a + 1]
        longer = 1 + np.minimum(variance, MOST_VARIANCE) / 2  # the mean of exp
        wait = exposure * (1 - time * longer) - p[0, 1 : a + 1] * time
        mean = share * (wait + rest)
        mean = np.where(logs > FAR, np.minimum(mean, 0.0), mean)
        found = Effects(mean, cov, by_exposure, by_log, with_logs)
        self._known.effects[slot] = found
        return found

    def _all_savings(self) -> Savings:
        """Of all configs at once: the means of :meth:`_effect` without its covariances, which cost ten times as
        much."""
        if self._known.savings is None:
            places = self._places
            exposure = within(self.mean[places.exposure], 0.0, MOST_EXPOSURE)
            logs = self.mean[places.log]
            time = np.exp(within(logs, *LOG_RANGE))
            variance = self.cov[places.log, places.log]
            longer = 1 + np.minimum(variance, MOST_VARIANCE) / 2
            wait = exposure * (1 - time * longer) - self.cov[places.exposure, places.log] * time
            mean = places.share * (wait + self.mean[places.rest])
            mean = np.where(logs > FAR, np.minimum(mean, 0.0), mean)
            self._known.savings = Savings(mean, places.share * (1 - time), -places.share * exposure * time)
        return self._known.savings

    def figures(self, slot: int) -> tuple[Array, Array]:
        """Mean and standard deviation (N_CONFIGS,) of what a slot's configs save; zeros for AUTO and what is masked."""
        found, arms = self._effect(slot), self.arms[slot]
        mean, deviation = np.zeros(N_CONFIGS), np.zeros(N_CONFIGS)
        mean[arms] = found.mean
        deviation[arms] = np.sqrt(np.maximum(found.cov.diagonal(), 0))
        return mean, deviation

    def too_long(self, slot: int, times: float) -> Array:
        """(N_CONFIGS,) probability that each config of a slot makes a step take more than so many default steps; zeros
        for AUTO and what is masked.

        The length of the calls decides it: savings are normal only near the mean. The longer a call, the less there is
        to hide it behind: of one that fills a step, the step waits for the mean of its exposure and all of it.
        """
        part, arms = self.parts[slot], self.arms[slot]
        own = slice(part.start + 1, part.start + 1 + len(arms))
        exposure = min(max(float(self.mean[part.start]), 0.0), 1.0)
        waited = self.share[slot] * (1 + exposure) / 2
        limit = math.log(1 + (times - 1) / max(waited, TINY_SHARE))
        deviation = WIDER * np.sqrt(self.cov.diagonal()[own] + BROAD**2)
        out = np.zeros(N_CONFIGS)
        out[arms] = above((limit - self.mean[own]) / deviation)
        return out

    def outlook(
        self, slot: int, variance: float = 0.0, lost: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Of all configs of a slot, each (N_CONFIGS,): the mean saving against the best; by how much a window under the
        config is expected to change that (standard deviation); and the knowledge gradient: by how much the best mean
        is expected to rise through it (Frazier et al. 2008).

        A window shows the slot's call time and, less surely, the step: ``variance`` is that of the other slots' effect
        on the step meanwhile. ``lost`` (N_CONFIGS,) bool: what cannot be had, and so is not the best.
        """
        arms = self.arms[slot]
        mean, learned, worth = np.zeros(N_CONFIGS), np.zeros(N_CONFIGS), np.zeros(N_CONFIGS)
        if not len(arms):
            return mean, learned, worth
        effect = self._effect(slot)
        lost = np.zeros(N_CONFIGS, bool) if lost is None else lost
        able = np.where(lost[arms], LOST, effect.mean)
        auto = LOST if lost[0] else 0.0
        leader, best = int(able.argmax()), max(float(able.max()), auto)
        able[leader] = LOST
        rival, second = int(able.argmax()), max(float(able.max()), auto)
        leads = best > auto  # else AUTO does
        lead = self._lead(effect, leader if leads else -1, rival if second > auto else -1)
        deviation = self._learned(slot, effect, variance, *lead)
        gap = effect.mean - best
        if leads:
            gap[leader] = second - best
        worth[arms] = expected_improvement(gap, deviation)
        learned[arms] = deviation
        mean[arms] = effect.mean
        return mean - best, learned, worth

    @staticmethod
    def _lead(effect: Effects, leader: int, rival: int) -> tuple[Array, Array]:
        """Covariance (a,) of each config's lead over the best with its own saving, and with its own log time. The best
        itself leads over the second best. -1: that is AUTO, which is certain."""
        savings, logs = effect.cov.diagonal(), effect.with_logs.diagonal()
        if leader < 0:
            return savings, logs
        with_savings = savings - effect.cov[leader]
        with_logs = logs - effect.with_logs[leader]
        with_savings[leader] = effect.cov[leader, leader]
        with_logs[leader] = effect.with_logs[leader, leader]
        if rival >= 0:
            with_savings[leader] -= effect.cov[rival, leader]
            with_logs[leader] -= effect.with_logs[rival, leader]
        return with_savings, with_logs

    def _learned(
        self, slot: int, effect: Effects, variance: float, with_savings: Array, with_logs: Array
    ) -> Array:
        """(a,) Standard deviation of the change of each config's mean lead through a window under it."""
        start, a = self.parts[slot].start + 1, len(self.arms[slot])
        of_step = effect.cov.diagonal() + self.reveal**2 + variance
        if not self.has_calls:
            explained = with_savings**2 / of_step
            return np.sqrt(np.maximum(explained, 0.0))
        of_log = self.cov.diagonal()[start : start + a] + CALL_FLOOR**2 + CALL_NOISE**2
        both = effect.with_logs.diagonal()
        determinant = np.maximum(of_step * of_log - both**2, TINY_DETERMINANT)
        squares = with_savings**2 * of_log + with_logs**2 * of_step
        explained = (squares - 2 * with_savings * with_logs * both) / determinant
        return np.sqrt(np.maximum(explained, 0.0))

    @property
    def exposure(self) -> tuple[Array, Array]:
        """Mean and standard deviation (s,) of the part of each slot's time that the step waits for."""
        if self._known.exposure is None:
            at = [part.start for part in self.parts]
            variance = np.maximum(self.cov[at, at], 0)
            self._known.exposure = np.clip(self.mean[at], 0.0, MOST_EXPOSURE), np.sqrt(variance)
        return self._known.exposure

    def saving(self, configs: Array) -> tuple[float, float]:
        """Mean and standard deviation of what a table (s,) saves, as a part of the step."""
        total, at, slopes = self._linear(configs)
        variance = float(slopes @ self.cov[np.ix_(at, at)] @ slopes)
        return total, math.sqrt(max(variance, 0.0))

    def saving_mean(self, table: Array) -> float:
        """Mean of :meth:`saving` alone."""
        return self._linear(table)[0]

    def _linear(self, configs: Array) -> tuple[float, Array, Array]:
        """Mean of what a table (s,) saves; the figures (indices into ``mean``) that it depends on, and the slopes."""
        total, at, slopes = 0.0, list[int](), list[float]()
        savings = self._all_savings()
        for slot, config in enumerate(configs):
            i = self.config[slot][int(config)]
            if i < 0:
                continue
            place, start = self._places.first[slot] + i, self.parts[slot].start
            total += float(savings.mean[place])
            log = start + 1 + i
            at += [start, log, log + len(self.arms[slot])]
            slopes += [savings.by_exposure[place], savings.by_log[place], self.share[slot]]
        return total, np.array(at, np.int64), np.array(slopes, np.float64)

    def best(self) -> Array:
        """The table of best means, (s,)."""
        if self._known.best is None:
            self._known.best = np.zeros(len(self.arms), np.int64)
            all_means, first = self._all_savings().mean, self._places.first
            for slot, arms in enumerate(self.arms):
                mean = all_means[first[slot] : first[slot + 1]]
                if len(arms) and mean.max() > 0:
                    self._known.best[slot] = arms[mean.argmax()]
        return self._known.best.copy()

    def best_saving(self) -> tuple[float, float]:
        """:meth:`saving` of the table of best means."""
        if self._known.best_saving is None:
            self._known.best_saving = self.saving(self.best())
        return self._known.best_saving

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, configs: Array, log_step: float, noise: float, call_logs: Array, steps: int) -> None:
        """Take in one window under ``configs`` (s,): the log of its step time over the first default's (NaN: not
        measured), the standard deviation of that, logs of the slots' call times over their default's (s,; NaN: not
        sampled), and the steps since the last window."""
        self.cov[0, 0] += self.drift**2 * steps
        self.off_step = 0.0
        self._observe_calls(configs, call_logs)  # first: they say where to set the tangent for the step
        if np.isfinite(log_step):
            self._observe_step(configs, log_step, noise)

    def _observe_calls(self, configs: Array, call_logs: Array) -> None:
        self.off_calls = np.zeros(len(self.arms))
        at, misses = list[int](), list[float]()
        noise = CALL_NOISE**2 + CALL_FLOOR**2
        for slot, config in enumerate(configs):
            i = self.config[slot][int(config)]
            if i < 0 or not np.isfinite(call_logs[slot]):
                continue
            log = self.parts[slot].start + 1 + i
            miss = float(np.clip(call_logs[slot], *LOG_RANGE)) - self.mean[log]
            at.append(log)
            misses.append(miss)
            self.off_calls[slot] = miss / math.sqrt(self.cov[log, log] + noise)
        if at:
            self._see(np.array(at), np.array(misses), np.full(len(at), noise))

    def _observe_step(self, configs: Array, log_step: float, noise: float) -> None:
        total, at, slopes = self._linear(configs)
        variance = noise**2 + (MISFIT * total) ** 2
        took = max(math.exp(log_step - float(self.mean[0])), LEAST)  # the slope is taken there: the log bends
        miss = 1 - (1 - total) / took
        self.off_step = self._see_step(np.append(at, 0), np.append(-slopes / took, 1.0), miss, variance)

    def compare(
        self, table: Array, reference: Array, log_ratio: float, noise: float, is_far: bool = False
    ) -> None:
        """Take in the steps under two tables (s,): the log of the step under ``reference`` over that under ``table``,
        and its standard deviation. What the two have in common cancels. The slope is that at the prediction: most pairs
        differ by little, and the log hardly bends there. If they may differ by much (``is_far``) it is taken at what
        was measured, as in :meth:`observe`."""
        total, at, slopes = self._linear(table)
        other, other_at, other_slopes = self._linear(reference)
        left, other_left = max(1 - total, LEAST), max(1 - other, LEAST)
        miss = log_ratio - math.log(other_left / left)
        if is_far:
            took = max(other_left * math.exp(-log_ratio), LEAST)
            left, miss = took, left / took - 1
        figures = np.concatenate([at, other_at])
        by_figure = np.concatenate([slopes / left, -other_slopes / other_left])
        variance = noise**2 + (MISFIT * (total - other)) ** 2
        off = self._see_step(figures, by_figure, miss, variance)
        self.off_step = off if is_far else self.off_step

    def _see_step(self, at: Array, slopes: Array, miss: float, variance: float) -> float:
        """A quantity with these slopes by the figures ``at`` was off by ``miss``. Returns by how many standard
        deviations. An outlier counts for less."""
        cross = slopes @ self.cov[at]
        expected = max(float(cross[at] @ slopes), 0.0)
        off = miss / math.sqrt(expected + variance)
        spread = expected + max(off**2 / OUTLIER**2, 1.0) * variance
        gain = cross / spread
        self.mean = self.mean + gain * miss
        for first in range(0, len(gain), ROWS):
            self.cov[first : first + ROWS] -= gain[first : first + ROWS, None] * cross
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
        """``mean`` or ``cov`` have been changed: nothing computed from them holds."""
        self._known = Known([None] * len(self.arms))

    def learn(self, at: Array | list[int], values: Array | list[float], noise: Array | list[float]) -> None:
        """Figures ``at`` (indices into ``mean``) were seen otherwise than by a window: values, standard deviations."""
        at = np.asarray(at, np.int64)
        self._see(at, np.asarray(values) - self.mean[at], np.asarray(noise) ** 2)
