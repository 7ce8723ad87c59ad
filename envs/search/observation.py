"""What a policy sees at one turn, the same for Sim, Replay and Live: one table of names and scales encodes and decodes.

A turn is the decision for one slot. Effects are parts of the job's step time. In the observation each quantity is
multiplied by its scale, so that usual values are about 1, and clipped to -4 ... 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from ...traces.fingerprint import N_FEATURES
from ...traces.records import PAIRS
from ...traces.spaces import N_CHANNELS, N_CONFIGS
from .config import SearchConfig
from .interfaces import LEAVE, N_ACTIONS, WHAT, actions_of
from .state import Look, State

Array = np.ndarray[Any, Any]

#: Bounds of the observation: scaled values beyond them are as good as infinite to a policy.
LIMIT = 4.0
#: More measurements of a config than this are no news.
MOST_COUNTED = 16
#: Scale of effects on the step time: 5 % of the step is 1.
EFFECT = 20.0

#: Quantities of a turn, in the order of the observation, and their scales. Units are in :class:`Context`. An entry is
#: clipped at LIMIT: 64 slots, and the 180 windows that a job of 60 slots may have, are below.
CONTEXT = {
    "share": 1.0,
    "exposure": 1.0,
    "exposure_sd": 1.0,
    "noise": 50.0,
    "last_saving": 5.0,
    "best_saving": 5.0,
    "best_sd": 5.0,
    "round": 1 / 48,
    "slots": 1 / 16,
    "place": 1.0,
    "confirmed": 1.0,
    "comparisons": 1 / 4,
    "drift": 20.0,
    "off_step": 1 / 2,
    "off_calls": 1 / 2,
    "refining": 1.0,
    "promised": EFFECT,
    "exploring": 1.0,
    "beaten": 1.0,
    "idle": 1 / 4,
    "spent": 1.0,
    "last_call": 1.0,
    "last_long": 20.0,
}
#: Figures of each config, in the order of the observation, and their scales. Units are in :class:`Seen`.
FIGURES = {
    "saving": EFFECT,
    "learned": EFFECT,
    "worth": 10 * EFFECT,
    "count": 1 / 4,
    "last": 1.0,
    "current": 1.0,
    "risk": 1.0,
}
N_PER_CONFIG = len(FIGURES)
#: Entries of an observation that concern no single config.
N_CONTEXT = N_FEATURES + len(CONTEXT)
#: Entries of an observation with all configs; :data:`KEPT` of them can change and are what a policy gets.
N_EXPANDED = N_CONTEXT + N_PER_CONFIG * N_CONFIGS + N_CONFIGS
#: Scales as arrays, for encoding and decoding at once.
_CONTEXT_SCALES = np.array(list(CONTEXT.values()))
_FIGURE_SCALES = np.array(list(FIGURES.values()))[:, None]
#: Configs that are never open: AUTO with a channel count is another name for NCCL's own pair, and CollNet takes no
#: count (``nccl_model.arms``).
_COLLNET_ROW = N_CHANNELS * (1 + PAIRS.index(("collnet_direct", "simple")))
NEVER_OPEN = (*range(1, N_CHANNELS), *range(_COLLNET_ROW + 1, _COLLNET_ROW + N_CHANNELS))


def _kept() -> Array:
    """Indices of the entries that can change: of AUTO nothing is learned, and it is always open."""
    by_config = np.ones((N_PER_CONFIG + 1, N_CONFIGS), bool)
    by_config[:, list(NEVER_OPEN)] = False
    names = list(FIGURES)
    by_config[[names.index("learned"), names.index("worth"), N_PER_CONFIG], 0] = False
    return np.concatenate([np.arange(N_CONTEXT), N_CONTEXT + np.flatnonzero(by_config)])


KEPT = _kept()
N_OBSERVATION = len(KEPT)
#: What the other entries are: 0, but for AUTO, which is open.
BLANK = np.zeros(N_EXPANDED, np.float32)
BLANK[N_EXPANDED - N_CONFIGS] = 1.0
#: Fewer remaining slots than this are the last one.
_TWO_SLOTS = 1.5


@dataclass
class Context:
    """The quantities of a turn: numbers, or arrays (n,) of n observations."""

    share: Any  # share of the step time that the slot's collectives take
    exposure: Any  # fraction of the slot's time that the step waits for (posterior mean)
    exposure_sd: Any  # standard deviation of `exposure`
    noise: Any  # standard deviation of a window's log step time
    last_saving: Any  # log saving of the last window, compared with the first default steps
    best_saving: Any  # saving of the table with the best posterior means, as a fraction of the step time
    best_sd: Any  # standard deviation of `best_saving`
    round: Any  # exploring windows of this search
    slots: Any  # slots of the job
    place: Any  # index of this slot / number of slots
    confirmed: Any  # 1: the current table is not the default
    comparisons: Any  # comparisons of this search
    drift: Any  # log of the default step time now, compared with the first default steps
    off_step: Any  # difference of the last step time from its prediction, in standard deviations
    off_calls: Any  # the same of the time of the slot's collectives
    refining: Any  # 1: after the verdict
    promised: Any  # saving of the table with the best means beyond the current table, as a fraction of the step time
    exploring: Any  # 1: a slot before this one runs another setting than the best
    beaten: Any  # 1: the table with the best posterior means has lost its comparison
    idle: Any  # before the verdict: windows in a row under one table; after: 4 x passes over the slots without a trial
    spent: Any  # default steps lost / the budget
    last_call: Any  # log time of the slot's collectives in the last window, compared with the default
    last_long: Any  # cost of the long steps of the last window, as a fraction of its time

    @property
    def values(self) -> list[Any]:
        """In the order of :data:`CONTEXT`."""
        return [getattr(self, name) for name in CONTEXT]


@dataclass
class Seen:
    """Observations (n, N_OBSERVATION) decoded. All but the last two are (n, N_CONFIGS): float64, and bool for ``last``,
    ``current`` and ``open``."""

    saving: Array  # posterior mean of what the setting saves compared with the best one, as a fraction of the step time
    learned: Array  # expected change of `saving` by one more window (standard deviation)
    worth: Array  # expected rise of the best posterior mean by one more window
    count: Array  # windows measured, at most 16
    last: Array  # 1: chosen for the last exploring window; after the verdict: in the table of the verdict
    current: Array  # 1: in the current table
    risk: Array  # probability that it makes a step too slow; 1: it did so twice, or lost its comparison
    open: Array  # 1: may be chosen
    context: Context
    features: Array  # (n, N_FEATURES), see ``traces.fingerprint.FEATURES``

    @property
    def is_last_slot(self) -> Array:
        """(n,) bool: no other slot of the job has a turn after this one."""
        remaining = self.context.slots * (1 - self.context.place)
        return np.asarray(remaining < _TWO_SLOTS)

    @property
    def is_refining(self) -> Array:
        """(n,) bool: after the verdict."""
        return np.asarray(self.context.refining > 0.5)


def observation_space() -> gym.spaces.Box:
    """Fingerprint, context, figures of each config, and which configs may be chosen (0 / 1), see :func:`expand`."""
    return gym.spaces.Box(-LIMIT, LIMIT, (N_OBSERVATION,), np.float32)


def encode(features: Array, context: Context, figures: Array, open_: Array) -> Array:
    """One turn's observation (N_OBSERVATION,) float32 from its parts in their own units: (N_FEATURES,), the context,
    (N_PER_CONFIG, N_CONFIGS) in the order of :data:`FIGURES`, (N_CONFIGS,) bool."""
    scaled = np.array(context.values, np.float64) * _CONTEXT_SCALES
    shown = np.where(open_, figures * _FIGURE_SCALES, 0.0)
    parts = np.concatenate([features, scaled, shown.ravel(), open_])
    return np.clip(parts[KEPT], -LIMIT, LIMIT).astype(np.float32)


def expand(observations: Array) -> Array:
    """Observations (n, N_OBSERVATION) with the entries that never change, (n, N_EXPANDED) float32: N_CONTEXT, then
    N_PER_CONFIG times N_CONFIGS, then the mask of N_CONFIGS."""
    whole = np.tile(BLANK, (len(observations), 1))
    whole[:, KEPT] = observations
    return whole


def may_leave(context: Context) -> Array:
    """(n,) bool: the search, or after the verdict its trials, may end. They may not as long as a table that has not
    lost promises a gain that is worth a comparison; before the verdict one comparison is enough. A policy that knows
    nothing would else leave before it has seen what a search is: it may always pass instead."""
    is_compared = (context.refining < 0.5) & (context.comparisons > 0.5)
    has_promise = (context.promised >= SearchConfig.least_gain) & (context.beaten < 0.5)
    return np.asarray(is_compared | ~has_promise)


def masks_of(observations: Array) -> Array:
    """(..., N_ACTIONS) bool: what may be chosen at observations (..., N_OBSERVATION), without the further choices of
    ``SearchConfig.more_choices``."""
    seen = decode(observations)
    masks = np.zeros((len(seen.open), N_ACTIONS), bool)
    for what in WHAT:
        masks[:, actions_of(np.arange(N_CONFIGS), what)] = seen.open
    masks[:, actions_of(np.arange(N_CONFIGS), LEAVE)] &= may_leave(seen.context)[:, None]
    return masks.reshape(*np.shape(observations)[:-1], N_ACTIONS)


def decode(observations: Array) -> Seen:
    """The inverse of :func:`encode`, of (n, N_OBSERVATION) or one observation."""
    x = expand(np.atleast_2d(np.asarray(observations))).astype(np.float64)
    ends = np.cumsum([N_FEATURES, len(CONTEXT), N_PER_CONFIG * N_CONFIGS])
    features, scaled, figures, open_ = np.split(x, ends, axis=1)
    quantities = (scaled / _CONTEXT_SCALES).T
    context = Context(**dict(zip(CONTEXT, quantities, strict=True)))
    shaped = figures.reshape(len(x), N_PER_CONFIG, N_CONFIGS) / _FIGURE_SCALES
    figure = dict(zip(FIGURES, np.moveaxis(shaped, 1, 0), strict=True))
    return Seen(
        saving=figure["saving"],
        learned=figure["learned"],
        worth=figure["worth"],
        count=np.rint(figure["count"]),
        last=figure["last"] > 0.5,
        current=figure["current"] > 0.5,
        risk=figure["risk"],
        open=open_ > 0.5,
        context=context,
        features=features,
    )


def observe(state: State, look: Look) -> Array:
    """The observation of the slot whose turn it is, (N_OBSERVATION,) float32."""
    saving, learned, worth = look.outlook
    last, current = np.zeros((2, saving.size))
    last[look.chosen] = float(state.account.rounds > 0)
    current[state.current.configs[look.slot]] = 1.0
    by_name = {
        "saving": saving,
        "learned": learned,
        "worth": worth,
        "count": np.minimum(state.guard.windows[look.slot], MOST_COUNTED),
        "last": last,
        "current": current,
        "risk": look.risk,
    }
    figures = np.array([by_name[name] for name in FIGURES])
    features = state.job.features[look.slot]
    is_open = state.open[look.slot]
    return encode(features, _context(state, look), figures, is_open)


def _context(state: State, look: Look) -> Context:
    slot, belief = look.slot, state.belief
    exposure, exposure_sd = belief.exposure
    best = belief.best()
    saving, deviation = belief.best_saving()
    of_current = belief.saving_mean(state.current.configs)
    return Context(
        share=state.job.share[slot],
        exposure=exposure[slot],
        exposure_sd=exposure_sd[slot],
        noise=state.noise.of_window,
        last_saving=state.last.saving,
        best_saving=saving,
        best_sd=deviation,
        round=state.account.rounds,
        slots=state.n_slots,
        place=slot / state.n_slots,
        confirmed=float(not state.current.is_default),
        comparisons=state.comparisons.in_search,
        drift=belief.mean[0],
        off_step=belief.off_step,
        off_calls=belief.off_calls[slot],
        refining=float(look.is_refining),
        promised=saving - of_current,
        exploring=float(look.is_exploring),
        beaten=float(state.comparisons.has_lost(best)),
        idle=look.idle,
        spent=state.spent,
        last_call=state.last.calls[slot],
        last_long=state.last.long,
    )
