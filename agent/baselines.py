"""Policies without a network, for comparison: NCCL's default, random, sweeps, bandits, coordinate descent, a GP.

All speak SB3's ``predict`` and see what the LSTM sees: the price-list mask and the outcomes of their own trials.
Savings are in units of the slot's share of the step (see ``envs.spaces.scale_saving``); larger is better.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from ..envs import spaces
from ..envs.arena import Policy
from ..envs.spaces import N_CHANNELS, N_CONFIGS, Seen
from ..traces.records import CHANNELS
from .policy import LstmPolicy

Array = np.ndarray[Any, Any]

#: Spread of a window's scaled saving that the bandits assume where ``baselines.json`` says nothing else.
NOISE = 0.1


@dataclass
class Episode:
    """What a searcher remembers of one slot."""

    count: Array = field(default_factory=lambda: np.zeros(N_CONFIGS))  # windows per config, exact
    plan: Any = None  # the searcher's own
    last_saving: float = 0.0  # of the last window


class Searcher:
    """Base of the baselines: turns batches into single episodes and counts windows; a subclass has :meth:`choose`."""

    #: Trials after which the search of a slot ends, and the best config so far is what it gives.
    horizon: int = spaces.HORIZON
    #: The search also ends when it asks so many times running for the best config so far (see ``stopping.StopRule``).
    patience: int = 2

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """Config to run next. ``valid``: indices that may be chosen; ``mean``: (N_CONFIGS,), -inf = not tried;
        ``last``: config of the last window, -1 before the first."""  # fmt: skip
        raise NotImplementedError

    def predict(
        self,
        observation: Array,
        state: list[Episode] | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, list[Episode]]:
        """One action per observation: (N_OBSERVATION,) -> (2,), or (n, N_OBSERVATION) -> (n, 2), int64.

        ``state`` is what the last call returned (one search each; it is changed in place), ``episode_start`` (n,) is
        True where a new search begins. ``deterministic`` makes no difference.
        """
        rows = np.atleast_2d(np.asarray(observation))
        seen = spaces.seen(rows)
        starts = np.zeros(len(rows), bool) if episode_start is None else np.atleast_1d(episode_start).astype(bool)
        if state is None:
            state = [Episode() for _ in rows]
        configs = np.zeros(len(rows), np.int64)
        for i in range(len(rows)):
            if starts[i]:
                state[i] = Episode()
            configs[i] = self._choose(state[i], seen, i)
        actions = spaces.actions_of(configs)
        return (actions if np.ndim(observation) == 2 else actions[0]), state

    def _choose(self, episode: Episode, seen: Seen, i: int) -> int:
        last = int(seen.last_config[i])
        if last >= 0:
            episode.count[last] += 1
        # Counts in the observation stop at 4; ours go on, and know of windows measured before this search began.
        np.maximum(episode.count, seen.count[i], out=episode.count)
        episode.last_saving = float(seen.last_saving[i])
        if seen.n_trials[i] >= self.horizon:
            return int(seen.mean[i].argmax())
        return self.choose(episode, np.flatnonzero(seen.configs[i]), seen.mean[i], last)


class Default(Searcher):
    """Leaves everything to NCCL."""

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """AUTO."""
        return 0


class Random(Searcher):
    """Any valid config, all equally likely."""

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """A random one."""
        return int(self.rng.choice(valid))


class Exhaustive(Searcher):
    """Each valid config once, in order, then the best of them: the oracle's sweep (FlagCX's way).

    With ``hysteresis`` the config in force is left only for one that is better by that much.
    """

    horizon = N_CONFIGS + 2

    def __init__(self, seed: int = 0, hysteresis: float = 0.0) -> None:
        super().__init__(seed)
        self.hysteresis = hysteresis

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """The first untried one, else the best."""
        untried = valid[np.isneginf(mean[valid])]
        if len(untried):
            return int(untried[0])
        best = int(mean.argmax())
        if episode.plan is None or mean[best] > mean[episode.plan] + self.hysteresis:
            episode.plan = best
        return int(episode.plan)


class CoordinateDescent(Searcher):
    """One knob at a time, as AutoCCL does within its subspaces: all pairs at NCCL's channel count, then channel counts
    outwards from the best until they get worse, then pairs again at that count, until nothing gains."""

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """The next untried neighbour of the best config, else the best."""
        best = int(mean.argmax())
        pair, channel = divmod(best, N_CHANNELS)
        allowed = set(valid.tolist())
        pairs = [c for c in range(channel, N_CONFIGS, N_CHANNELS) if c in allowed]
        counts = self._steps(pair, channel, allowed)
        order = pairs + counts if channel == 0 else counts + pairs
        return next((c for c in order if np.isneginf(mean[c])), best)

    @staticmethod
    def _steps(pair: int, channel: int, allowed: set[int]) -> list[int]:
        """The next channel counts down and up from ``channel`` (from NCCL's own, unset: the largest and its half)."""
        row = [c for c in range(1, N_CHANNELS) if pair * N_CHANNELS + c in allowed]
        if not row:
            return []
        if channel == 0:
            return [pair * N_CHANNELS + c for c in reversed(row)][:2]
        return [pair * N_CHANNELS + c for c in (channel - 1, channel + 1) if c in row]


class Thompson(Searcher):
    """Gaussian Thompson sampling: a config's saving is N(mean, noise^2 / count); prior N(prior_mean, prior_std^2)."""

    def __init__(self, seed: int = 0, noise: float = NOISE, prior_mean: float = -0.1, prior_std: float = 0.3) -> None:
        super().__init__(seed)
        self.noise, self.prior_mean, self.prior_std = noise, prior_mean, prior_std

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """The largest of one draw per config."""
        count, prior = episode.count[valid], (self.noise / self.prior_std) ** 2
        measured = np.where(count > 0, mean[valid], 0.0)
        centre = (prior * self.prior_mean + count * measured) / (prior + count)
        draws = centre + self.noise / np.sqrt(prior + count) * self.rng.standard_normal(len(valid))
        return int(valid[draws.argmax()])


class Ucb1(Searcher):
    """UCB1 with the given exploration weight; untried configs first, in random order."""

    def __init__(self, seed: int = 0, weight: float = NOISE) -> None:
        super().__init__(seed)
        self.weight = weight

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """The largest mean + weight * sqrt(2 log t / count)."""
        untried = valid[np.isneginf(mean[valid])]
        if len(untried):
            return int(self.rng.choice(untried))
        count = episode.count[valid]
        return int(valid[(mean[valid] + self.weight * np.sqrt(2 * np.log(count.sum()) / count)).argmax()])


def config_points() -> Array:
    """Configs as points for a kernel, (N_CONFIGS, 1 + pairs): log2 channels (unset: a place apart), pair one-hot."""
    channels = np.array([7.0 if c == 0 else np.log2(c) for c in CHANNELS])
    pairs = np.eye(spaces.N_PAIRS)
    return np.array([[channels[c % N_CHANNELS], *pairs[c // N_CHANNELS]] for c in range(N_CONFIGS)])


class GaussianProcess(Searcher):
    """GP with a squared-exponential kernel over (pair, log2 channels), choosing by upper confidence bound.

    Same pair: correlation falls with the distance in log2 channels over ``length``; another pair: times ``across``.
    The posterior is the textbook one (Rasmussen & Williams 2006, eq. 2.23 f.) on mean outcomes with noise^2 / count.
    """

    def __init__(
        self,
        seed: int = 0,
        noise: float = NOISE,
        scale: float = 0.4,
        length: float = 2.0,
        across: float = 0.5,
        weight: float = 1.0,
        mean: float = 0.0,
    ) -> None:
        """``mean``: saving expected of a config before anything is known of it."""
        super().__init__(seed)
        self.noise, self.weight, self.mean = noise, weight, mean
        points = config_points()
        apart = (points[:, :1] - points[:, :1].T) / length
        same = points[:, 1:] @ points[:, 1:].T
        self.kernel = scale**2 * np.exp(-0.5 * apart**2) * np.where(same > 0, 1.0, across)

    def posterior(self, count: Array, mean: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of every config's saving, each (N_CONFIGS,), given counts and mean outcomes."""
        tried = np.flatnonzero((count > 0) & np.isfinite(mean))
        across = self.kernel[:, tried]
        gram = self.kernel[np.ix_(tried, tried)] + np.diag(self.noise**2 / count[tried])
        solved = np.linalg.solve(gram, np.column_stack([mean[tried] - self.mean, across.T]))
        variance = np.diag(self.kernel) - np.einsum("ij,ji->i", across, solved[:, 1:])
        return self.mean + across @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-12))

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """The largest posterior mean + weight * deviation."""
        centre, deviation = self.posterior(episode.count, mean)
        return int(valid[(centre + self.weight * deviation)[valid].argmax()])


#: Baselines by name; ``lstm`` is the trained policy, ``tpe`` needs the extra ``[optuna]``.
BASELINES: dict[str, type[Searcher]] = {
    "default": Default,
    "random": Random,
    "coordinate-descent": CoordinateDescent,
    "thompson": Thompson,
    "ucb1": Ucb1,
    "gp": GaussianProcess,
    "exhaustive": Exhaustive,
}
POLICIES = ("lstm", *BASELINES, "tpe")


@cache
def best_settings() -> dict[str, dict[str, Any]]:
    """Settings of each baseline as ``dynamiccl bench --fit`` found them, on tasks that no suite holds."""
    text = resources.files(__package__).joinpath("baselines.json").read_text()
    return {name: found["settings"] for name, found in json.loads(text)["entrants"].items()}


def make_baseline(name: str, seed: int = 0, settings: dict[str, Any] | None = None) -> Searcher:
    """A baseline (or ``tpe``) with these settings, its best ones where none are given. ``horizon`` and ``patience`` say
    when its search ends. Raises ValueError with the cure where a package is missing."""
    kind: type[Searcher]
    if name == "tpe":
        from .tpe import Tpe as kind
    else:
        kind = BASELINES[name]
    given = dict(best_settings().get(name, {}) if settings is None else settings)
    ends = {key: given.pop(key) for key in ("horizon", "patience") if key in given}
    policy = kind(seed, **given)
    for key, value in ends.items():
        setattr(policy, key, value)
    return policy


def make_policy(name: str, seed: int = 0) -> Policy:
    """Policy by name, or by ``MODULE:NAME`` (a class or function called without arguments, or an object).

    Raises ValueError, with the known names, when there is none such.
    """
    if name == "lstm":
        return LstmPolicy.load(seed=seed)
    if name in POLICIES:
        return make_baseline(name, seed)
    module, colon, attribute = name.partition(":")
    known = f"known: {', '.join(POLICIES)}, or MODULE:NAME of your own"
    if not colon:
        raise ValueError(f"no policy {name!r}; {known}")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load policy {name!r} ({error}); {known}") from error
    if isinstance(made, type) or not hasattr(made, "predict"):
        made = made() if callable(made) else made
    if not callable(getattr(made, "predict", None)):
        raise ValueError(f"policy {name!r} has no predict(observation, state, episode_start, deterministic)")
    return made  # type: ignore[no-any-return]
