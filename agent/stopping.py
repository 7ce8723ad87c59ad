"""When the search on a slot is over, and when it begins anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..envs import spaces
from ..envs.arena import Policy
from ..envs.spaces import HORIZON, N_MASK
from ..traces.fingerprint import N_FEATURES

Array = np.ndarray[Any, Any]

#: Times running that a policy asks for the best config before its search is over.
PATIENCE = 2
#: Windows of one config that :func:`dropped` looks at: the newest, and most in all.
RECENT, KEPT = 5, 24
#: Drop of the median, in standard errors, that is taken for a change of the network or the job.
CHANGE_Z = 5.0


class StopRule:
    """When the search on one slot is over, and the best config so far is what it gives.

    It ends when the policy asks ``patience`` times running for the config that is already the best (it has nothing
    left to try), or after ``horizon`` trials. A policy may set its own (an exhaustive sweep needs a horizon).

    Call it with each action before it is run; the answer True means: do not run it, commit the best.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.horizon = int(getattr(policy, "horizon", HORIZON))
        asked = int(getattr(policy, "patience", PATIENCE))
        # On the board some play best without ever ending; beside a job the next slot waits for its turn.
        self.patience, self.repeats = asked if asked <= HORIZON else PATIENCE, 0

    def __call__(self, observation: Array, action: Array) -> bool:
        """``observation`` (N_OBSERVATION,) and the (deterministic) ``action`` (2,) that the policy took on it."""
        seen = spaces.seen(observation[None])
        best = int(spaces.config_index(np.asarray(action)[None])[0]) == int(seen.best[0])
        self.repeats = self.repeats + 1 if best else 0
        return self.repeats >= self.patience or int(seen.n_trials[0]) >= self.horizon


@dataclasses.dataclass
class Search:
    """The state of searches on ``n`` slots."""

    inner: Any  # the policy's own state
    trials: spaces.Trials  # of the search that runs; what was measured before it began is left out
    repeats: Array  # (n,) times running that the best config was asked for
    over: Array  # (n,) bool
    savings: Array  # (n, KEPT) of the last windows under one config, newest first; NaN: there were fewer

    @classmethod
    def start(cls, n: int) -> Search:
        """Searches that have not begun."""
        trials = spaces.Trials.start(n)
        return cls(None, trials, np.zeros(n, np.int64), np.zeros(n, bool), np.full((n, KEPT), np.nan))

    def copy(self) -> Search:
        """Nothing in common with this one but the policy's own state, which policies do not change in place."""
        trials = spaces.Trials(**{name: np.array(value) for name, value in vars(self.trials).items()})
        return Search(self.inner, trials, self.repeats.copy(), self.over.copy(), self.savings.copy())

    def restart(self, which: Array) -> None:
        """Begin anew where ``which`` (n,) is True."""
        self.trials.restart(which)
        self.repeats[which], self.over[which], self.savings[which] = 0, False, np.nan

    def see(self, seen: spaces.Seen) -> None:
        """Add the last window, where there was one (in all searches or in none)."""
        if (seen.last_config < 0).any():
            return
        other = seen.last_config != self.trials.last_config
        self.trials.record(seen.last_config, seen.last_saving)
        self.savings[other] = np.nan
        self.savings = np.concatenate([seen.last_saving[:, None], self.savings[:, :-1]], axis=1)


class Stopping:
    """A policy with the :class:`StopRule` built in, for whole batches: once a search is over it asks for its result.

    That is the config with the best mean at the time: windows go on being measured after the search, and one that only
    luck had put in front falls back behind. Where its savings drop for good, see :func:`dropped`, what was measured
    holds no longer, and the search begins anew.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.horizon = int(getattr(policy, "horizon", HORIZON))
        self.patience = int(getattr(policy, "patience", PATIENCE))

    def predict(
        self,
        observation: Array,
        state: Search | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Search]:
        """See :class:`dynamiccl.envs.arena.Policy`."""
        rows = np.atleast_2d(np.asarray(observation))
        search = Search.start(len(rows)) if state is None else state.copy()
        begun = np.zeros(len(rows), bool) if episode_start is None else np.atleast_1d(episode_start).astype(bool)
        search.see(spaces.seen(rows))
        begun |= dropped(search.savings, search.over)
        search.restart(begun)
        told = spaces.observe(rows[:, :N_FEATURES], rows[:, -N_MASK:], search.trials)
        actions, search.inner = self.policy.predict(told, search.inner, begun, deterministic)
        best = search.trials.best()
        search.repeats = np.where(spaces.config_index(actions) == best, search.repeats + 1, 0)
        search.over |= (search.repeats >= self.patience) | (search.trials.n_trials >= self.horizon)
        actions = np.where(search.over[:, None], spaces.actions_of(best), actions)
        return (actions if np.ndim(observation) == 2 else actions[0]), search


def dropped(savings: Array, over: Array) -> Array:
    """Where the newest RECENT of ``savings`` (n, KEPT; newest first, NaN = none) lie below all before them, (n,) bool.

    Looked at only where the search is ``over`` (n,). Medians and the median absolute deviation: step times have a heavy
    tail, and one slow window is no change.
    """
    out = np.zeros(len(savings), bool)
    enough = over & np.isfinite(savings[:, : 2 * RECENT]).all(axis=1)
    if not enough.any():
        return out
    new, old = savings[enough, :RECENT], savings[enough, RECENT:]
    middle = np.nanmedian(old, axis=1, keepdims=True)
    spread = 1.4826 * np.nanmedian(np.abs(old - middle), axis=1)
    # A median's standard error is 1.25 times a mean's.
    error = 1.25 * np.maximum(spread, 1e-3) * np.sqrt(1 / RECENT + 1 / np.isfinite(old).sum(axis=1))
    out[enough] = np.median(new, axis=1) < middle[:, 0] - CHANGE_Z * error
    return out
