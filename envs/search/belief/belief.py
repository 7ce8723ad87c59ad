"""The belief over a whole job: how long each slot's calls take under each config, and what of that the step waits for.

One Gaussian over the log time of each slot's calls under each config (against NCCL's own choice), each slot's
*exposure* (the part of a call's time that the step waits for), the remaining effect of each config on the step, and
the default's step time now. Its prior comes from a network: a mean, factors that all slots of the job share, factors
of one slot, and a variance of each figure. Measured calls and step times turn it into the posterior by an extended
Kalman filter (Rasmussen and Williams 2006, chapter 2; Sarkka 2013, chapter 5). Numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....traces.spaces import N_CONFIGS
from .effects import LOG_RANGE, MOST_EXPOSURE, Effects, Known, Places, Savings
from .gaussian import begun, parts_of, see_figures, see_sum
from .normal import above, expected_improvement
from .outlook import CALL_FLOOR, CALL_NOISE, LOST, deviation_of_lead, highest, lead_of
from .prior import Prior

Array = np.ndarray[Any, Any]
Numbers = Array | Sequence[float]

#: What the predicted effect of a table may miss, as a part of it: slots overlap, which the sum over slots leaves out.
MISFIT = 0.2
#: Standard deviation by which the default's log step time may drift in a step, at least ...
DRIFT = 3e-4
#: ... and as a part of a window's noise: a noisy job drifts more.
DRIFT_PART = 0.1
#: Noise that a window's worth is predicted with, before the job's own is known.
REVEAL = 0.005
#: Calls that are far too long: standard deviations are multiplied by WIDER after BROAD (log) is added. Of 5,091 first
#: windows in 300 simulated jobs 11 % were too slow if more than 10 % was predicted, 6 % if 0.1 to 10, 0.1 % if less.
WIDER, BROAD = 1.4, 0.1
#: The least that a step or a call can take, as a part of the default's: logs must stay finite.
LEAST = 0.05
#: Smallest share of a slot: keeps a division finite.
TINY_SHARE = 1e-3


class Belief:
    """The belief over one job of ``s`` slots.

    ``features`` (s, N_FEATURES), ``mask`` (s, N_CONFIGS) bool with aliases folded, ``share`` (s,) of the step.
    Savings are parts of the default's step time; AUTO saves 0. ``mean`` (m,) and its covariance: figure 0 is the
    default's log step time now; the part of slot s holds its exposure, then the log times and the remaining effects
    of its configs.
    """

    def __init__(self, prior: Prior, features: Array, mask: Array, share: Array) -> None:
        share = np.asarray(share, np.float64)
        allowed = np.asarray(mask, bool)
        arms = [np.flatnonzero(row[1:]) + 1 for row in allowed]
        parts = parts_of(arms)
        self.share = share
        self.arms = arms  # (a,) configs of each slot
        self.parts = parts  # of ``mean``, by slot
        self.mean, self._cov = begun(prior, features, mask, arms, parts)
        self.config = list[Array]()  # of each slot: config -> index among its configs
        for configs in arms:
            index = np.full(N_CONFIGS, -1)
            index[configs] = np.arange(len(configs))
            self.config.append(index)
        self._places = Places.of(arms, parts, share)
        self.refused = np.zeros_like(allowed)  # by NCCL: may not be had, whatever they save
        self.touched()
        # Standard deviations that the last window was off its prediction: the step, and each slot's calls.
        self.off_step = 0.0
        self.off_calls = np.zeros(self.n_slots)
        self.reveal = REVEAL  # this and what follows: see :meth:`begin`
        self.drift = DRIFT
        self.has_calls = True

    def begin(self, noise: float, reveal: float, has_calls: bool) -> None:
        """``noise``: standard deviation of a window's log step time; ``reveal``: part of it that a window's worth is
        predicted with; ``has_calls``: kernels are sampled on this job."""
        self.reveal = reveal * noise
        self.has_calls = has_calls
        # The default's own step time is no surer than a window of it, nor steadier.
        self.cov[0, 0] = max(self.cov[0, 0], noise**2)
        by_noise = DRIFT_PART * noise
        self.drift = max(DRIFT, by_noise)

    def refuse(self, refused: Array) -> None:
        """NCCL does not obey these configs, (s, N_CONFIGS) bool: none of them is the best of its slot."""
        self.refused = refused
        self.touched()

    # -- reading -----------------------------------------------------------------------------------------------

    @property
    def cov(self) -> Array:
        """(m, m), of ``mean``."""
        return self._cov.whole()

    @property
    def n_slots(self) -> int:
        """Of the job."""
        return len(self.arms)

    def _effect(self, slot: int) -> Effects:
        """Savings of a slot's configs, computed once between two windows."""
        kept = self._known.effects[slot]
        if kept is not None:
            return kept
        part = self.parts[slot]
        mean = self.mean[part]
        cov = self._cov.block(part)
        share = self.share[slot]
        found = Effects.of(mean, cov, share)
        self._known.effects[slot] = found
        return found

    def _all_savings(self) -> Savings:
        """Of all configs at once: the means of :meth:`_effect` without its covariances, which cost ten times as
        much."""
        found = self._known.savings
        if found is None:
            found = Savings.of(self.mean, self._cov, self._places)
            self._known.savings = found
        return found

    def _log_times(self, slot: int) -> Array:
        """Where the log times of a slot's configs lie in ``mean``: after its exposure."""
        return self.parts[slot].start + 1 + np.arange(len(self.arms[slot]))

    def _variances(self, at: Array) -> Array:
        """(k,) of the figures ``at`` (k,)."""
        return self._cov.between(at, at)

    def figures(self, slot: int) -> tuple[Array, Array]:
        """Mean and standard deviation (N_CONFIGS,) of what a slot's configs save; zeros for AUTO and what is masked."""
        arms = self.arms[slot]
        found = self._effect(slot)
        mean = np.zeros(N_CONFIGS)
        mean[arms] = found.mean
        variance = np.maximum(found.cov.diagonal(), 0)
        deviation = np.zeros(N_CONFIGS)
        deviation[arms] = np.sqrt(variance)
        return mean, deviation

    def too_long(self, slot: int, times: float) -> Array:
        """(N_CONFIGS,) probability that each config of a slot makes a step take more than so many default steps; zeros
        for AUTO and what is masked.

        The length of the calls decides it: savings are normal only near the mean. The longer a call, the less there is
        to hide it behind: of one that fills a step, the step waits for the mean of its exposure and all of it.
        """
        start = self.parts[slot].start
        believed = float(self.mean[start])
        exposure = min(max(believed, 0.0), 1.0)
        share = self.share[slot]
        waited = share * (1 + exposure) / 2
        part = max(waited, TINY_SHARE)
        longest = 1 + (times - 1) / part  # call, in the default's calls
        limit = math.log(longest)
        logs = self._log_times(slot)
        variance = self._variances(logs) + BROAD**2
        deviation = WIDER * np.sqrt(variance)
        distance = limit - self.mean[logs]
        found = np.zeros(N_CONFIGS)
        arms = self.arms[slot]
        found[arms] = above(distance / deviation)
        return found

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
        mean = np.zeros(N_CONFIGS)
        learned = np.zeros(N_CONFIGS)
        worth = np.zeros(N_CONFIGS)
        if not len(arms):
            return mean, learned, worth
        effect = self._effect(slot)
        savings = effect.mean
        refused = self.refused[slot]
        if lost is None:
            lost = refused
        is_lost = lost[arms] | refused[arms]
        able = np.where(is_lost, LOST, savings)
        auto = LOST if lost[0] else 0.0
        leader, best = highest(able, auto)
        able[leader] = LOST
        rival, second = highest(able, auto)
        leads = best > auto  # else AUTO does
        follows = second > auto
        if not leads:
            leader = -1
        if not follows:
            rival = -1
        lead = lead_of(effect, leader, rival)
        deviation = self._learned(slot, effect, variance, *lead)
        gap = savings - best
        if leads:
            gap[leader] = second - best
        worth[arms] = expected_improvement(gap, deviation)
        learned[arms] = deviation
        mean[arms] = savings
        return mean - best, learned, worth

    def _learned(
        self, slot: int, effect: Effects, variance: float, with_savings: Array, with_logs: Array
    ) -> Array:
        """(a,) Standard deviation of the change of each config's mean lead through a window under it."""
        of_savings = effect.cov.diagonal()
        of_step = of_savings + self.reveal**2 + variance
        if not self.has_calls:
            explained = with_savings**2 / of_step
            return np.sqrt(np.maximum(explained, 0.0))
        of_log = self._variances(self._log_times(slot)) + CALL_FLOOR**2 + CALL_NOISE**2
        return deviation_of_lead(effect, of_step, of_log, with_savings, with_logs)

    @property
    def exposure(self) -> tuple[Array, Array]:
        """Mean and standard deviation (s,) of the part of each slot's time that the step waits for."""
        known = self._known
        if known.exposure is None:
            at = np.array([part.start for part in self.parts])
            means = self.mean[at]
            variances = self._variances(at)
            exposures = np.clip(means, 0.0, MOST_EXPOSURE)
            deviations = np.sqrt(np.maximum(variances, 0))
            known.exposure = exposures, deviations
        return known.exposure

    def saving(self, configs: Array) -> tuple[float, float]:
        """Mean and standard deviation of what a table (s,) saves, as a part of the step."""
        total, at, slopes = self._linear(configs)
        variance = float(slopes @ self._cov.block(at) @ slopes)
        variance = max(variance, 0.0)
        return total, math.sqrt(variance)

    def saving_mean(self, table: Array) -> float:
        """Mean of :meth:`saving` alone."""
        return self._linear(table)[0]

    def _linear(self, configs: Array) -> tuple[float, Array, Array]:
        """Mean of what a table (s,) saves; the figures (indices into ``mean``) that it depends on, and the slopes."""
        total = 0.0
        at = list[int]()
        slopes = list[float]()
        savings = self._all_savings()
        for slot, config in enumerate(configs):
            index = self.config[slot]
            i = index[int(config)]
            if i < 0:
                continue
            place = self._places.first[slot] + i
            total += float(savings.mean[place])
            exposure = self.parts[slot].start
            log = exposure + 1 + i
            rest = log + len(self.arms[slot])
            at += [exposure, log, rest]
            by_exposure = savings.by_exposure[place]
            by_log = savings.by_log[place]
            slopes += [by_exposure, by_log, self.share[slot]]
        figures = np.array(at, np.int64)
        by_figure = np.array(slopes, np.float64)
        return total, figures, by_figure

    def best(self) -> Array:
        """The table of best means, (s,), without what NCCL refused."""
        known = self._known
        if known.best is None:
            best = np.zeros(self.n_slots, np.int64)
            all_means = self._all_savings().mean
            first = self._places.first
            for slot, arms in enumerate(self.arms):
                own = slice(first[slot], first[slot + 1])
                is_lost = self.refused[slot, arms]
                mean = np.where(is_lost, LOST, all_means[own])
                if len(arms) and mean.max() > 0:
                    best[slot] = arms[mean.argmax()]
            known.best = best
        return known.best.copy()

    def best_saving(self) -> tuple[float, float]:
        """:meth:`saving` of the table of best means."""
        known = self._known
        if known.best_saving is None:
            table = self.best()
            known.best_saving = self.saving(table)
        return known.best_saving

    # -- learning ----------------------------------------------------------------------------------------------

    def observe(self, configs: Array, log_step: float, noise: float, call_logs: Array, steps: int) -> None:
        """Take in one window under ``configs`` (s,): the log of its step time over the first default's (NaN: not
        measured), the standard deviation of that, logs of the slots' call times over their default's (s,; NaN: not
        sampled), and the steps since the last window."""
        self._cov.add(0, self.drift**2 * steps)
        self.off_step = 0.0
        self._observe_calls(configs, call_logs)  # first: they say where to set the tangent for the step
        if np.isfinite(log_step):
            self._observe_step(configs, log_step, noise)

    def _observe_calls(self, configs: Array, call_logs: Array) -> None:
        self.off_calls = np.zeros(self.n_slots)
        at = list[int]()
        slots = list[int]()
        misses = list[float]()
        noise = CALL_NOISE**2 + CALL_FLOOR**2
        for slot, config in enumerate(configs):
            index = self.config[slot]
            i = index[int(config)]
            seen = call_logs[slot]
            if i < 0 or not np.isfinite(seen):
                continue
            log = self.parts[slot].start + 1 + i
            near = float(np.clip(seen, *LOG_RANGE))
            miss = near - self.mean[log]
            at.append(log)
            slots.append(slot)
            misses.append(miss)
        if at:
            figures = np.array(at)
            off = np.array(misses)
            self.off_calls[slots] = off / np.sqrt(self._variances(figures) + noise)
            variances = np.full(len(at), noise)
            self._see(figures, off, variances)

    def _observe_step(self, configs: Array, log_step: float, noise: float) -> None:
        total, at, slopes = self._linear(configs)
        misfit = MISFIT * total
        variance = noise**2 + misfit**2
        default_now = float(self.mean[0])
        ratio = math.exp(log_step - default_now)
        took = max(ratio, LEAST)  # the slope is taken there: the log bends
        expected = 1 - total
        miss = 1 - expected / took
        figures = np.append(at, 0)
        by_table = -slopes / took
        by_figure = np.append(by_table, 1.0)
        self.off_step = self._see_step(figures, by_figure, miss, variance)

    def compare(
        self, table: Array, reference: Array, log_ratio: float, noise: float, is_far: bool = False
    ) -> None:
        """Take in the steps under two tables (s,): the log of the step under ``reference`` over that under ``table``,
        and its standard deviation. What the two have in common cancels. The slope is that at the prediction, as most
        pairs differ by little; if they may differ by much (``is_far``), that at what was measured."""
        total, at, slopes = self._linear(table)
        other, other_at, other_slopes = self._linear(reference)
        left = max(1 - total, LEAST)
        other_left = max(1 - other, LEAST)
        expected = math.log(other_left / left)
        miss = log_ratio - expected
        if is_far:
            ratio = math.exp(-log_ratio)
            took = max(other_left * ratio, LEAST)
            miss = left / took - 1
            left = took
        figures = np.concatenate([at, other_at])
        by_table = slopes / left
        by_reference = -other_slopes / other_left
        by_figure = np.concatenate([by_table, by_reference])
        misfit = MISFIT * (total - other)
        variance = noise**2 + misfit**2
        off = self._see_step(figures, by_figure, miss, variance)
        if is_far:
            self.off_step = off

    def _see_step(self, at: Array, slopes: Array, miss: float, variance: float) -> float:
        """A quantity with these slopes by the figures ``at`` was off by ``miss``. Returns by how many standard
        deviations."""
        mean, off = see_sum(self.mean, self._cov, at, slopes, miss, variance)
        self.mean = mean
        self.touched()
        return off

    def _see(self, at: Array, misses: Array, variances: Array) -> None:
        """The figures ``at`` (k,) themselves were off by ``misses``."""
        self.mean = see_figures(self.mean, self._cov, at, misses, variances)
        self.touched()

    def touched(self) -> None:
        """``mean`` or ``cov`` have been changed: nothing computed from them holds."""
        self._known = Known([None] * self.n_slots)

    def learn(self, at: Numbers, values: Numbers, noise: Numbers) -> None:
        """Figures ``at`` (indices into ``mean``) were seen otherwise than by a window: values, standard deviations."""
        at = np.asarray(at, np.int64)
        seen = np.asarray(values)
        believed = self.mean[at]
        misses = seen - believed
        deviations = np.asarray(noise)
        self._see(at, misses, deviations**2)
