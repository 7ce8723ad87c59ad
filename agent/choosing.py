"""Policies by name for the search over a job, and the policies of single slots in it, slot by slot."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from ..envs import spaces, turns
from ..envs.job_arena import Policy
from .classical import CLASSICAL, make_classical
from .policy import LstmPolicy
from .rules import ExpectedImprovement, ThompsonSampling

Array = np.ndarray[Any, Any]

#: What decides where nothing else is asked for: the best that was measured, see the README.
DEFAULT = "expected-improvement"
RULES = (DEFAULT, "thompson-sampling")


class SlotBySlot:
    """A policy of single slots in the search over a job: each slot is a task of its own to it.

    It is told of a config what the belief makes of its windows, in units of the slot's share of the step, and how
    often it ran. Once it asks twice for what is best already, or has had ``horizon`` trials, it is asked
    no more.
    """

    by_belief, patience, horizon = False, 3, spaces.HORIZON

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def predict(
        self, observation: Array, state: Any = None, episode_start: Array | None = None, deterministic: bool = True
    ) -> tuple[Array, Any]:
        """See ``envs.arena.Policy``; the state is a dictionary by row and slot."""
        rows = np.atleast_2d(np.asarray(observation))
        seen = turns.seen(rows)
        state = {} if state is None else dict(state)
        place = np.rint(seen.context["place"] * np.rint(8 * seen.context["slots"])).astype(int)
        chosen = np.zeros(len(rows), np.int64)
        for i in range(len(rows)):
            key = (i, int(place[i]))
            begun = key not in state or (episode_start is not None and bool(np.atleast_1d(episode_start)[i]))
            inner, repeats = (None, 0) if begun else state[key]
            trials = self._trials(seen, i)
            mask = self._mask(seen.open[i])
            told = spaces.observe(seen.features[i : i + 1].astype(np.float32), mask[None], trials)
            best = int(trials.best()[0])
            if repeats >= 2 or trials.n_trials[0] >= self.horizon:
                chosen[i], state[key] = best, (inner, repeats)
                continue
            action, inner = self.policy.predict(told, inner, np.array([begun]), deterministic)
            chosen[i] = int(spaces.config_index(np.atleast_2d(action))[0])
            if not seen.open[i, chosen[i]]:  # folded into another: on to what has not run yet
                fresh = np.flatnonzero(seen.open[i] & (seen.count[i] == 0))
                chosen[i] = fresh[0] if len(fresh) else best
            state[key] = inner, repeats + 1 if chosen[i] == best else 0
        actions = spaces.actions_of(chosen)
        return (actions if np.ndim(observation) == 2 else actions[0]), state

    @staticmethod
    def _trials(seen: turns.Seen, i: int) -> spaces.Trials:
        trials = spaces.Trials.start(1)
        count = seen.count[i].copy()
        count[0] = max(count[0], 1)
        share = max(float(seen.context["share"][i]), 0.01)
        saving = spaces.scale_saving(seen.ahead[i] - seen.ahead[i, 0], share)
        trials.count[0], trials.total[0] = count, np.where(count > 0, count * saving, 0.0)
        trials.n_trials[0] = int(np.rint(16 * seen.context["round"][i]))
        last = np.flatnonzero(seen.last[i])
        if len(last):
            trials.last_config[0], trials.last_saving[0] = last[0], saving[last[0]]
        return trials

    @staticmethod
    def _mask(open_: Array) -> Array:
        """(N_MASK,) pairs and channel counts of which at least one config is open."""
        grid = open_.reshape(spaces.N_PAIRS, spaces.N_CHANNELS)
        pairs, channels = np.asarray(grid.any(axis=1)), np.asarray(grid.any(axis=0))
        pairs[0] = channels[0] = True
        return np.concatenate([pairs, channels])


#: Policies that can be asked for by name.
POLICIES = (*RULES, *CLASSICAL, "tpe", "lstm")


def make_chooser(name: str, seed: int = 0) -> Policy:
    """A policy for :class:`envs.search.Search`: one of POLICIES, or MODULE:NAME (a class or function called without
    arguments, or an object), found where Python looks and in the current folder.

    Raises ValueError, with the known names, when there is none such.
    """
    if name == DEFAULT:
        return ExpectedImprovement()
    if name == RULES[1]:
        return ThompsonSampling(seed)
    if name in CLASSICAL or name == "tpe":
        return make_classical(name, seed)
    if name == "lstm":
        return SlotBySlot(LstmPolicy.load(seed=seed))
    module, colon, attribute = name.partition(":")
    known = f"known: {', '.join(POLICIES)}, or MODULE:NAME of your own"
    if not colon:
        raise ValueError(f"no policy {name!r}; {known}")
    look_here()
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load policy {name!r} ({error}); {known}") from error
    if isinstance(made, type) or not hasattr(made, "predict"):
        made = made() if callable(made) else made
    if not callable(getattr(made, "predict", None)):
        raise ValueError(f"policy {name!r} has no predict(observation, state, episode_start, deterministic)")
    return made  # type: ignore[no-any-return]


def look_here() -> None:
    """Let Python find modules in the current folder: a command does not look where it is called, as ``python`` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
