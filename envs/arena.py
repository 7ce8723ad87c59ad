"""Fixed suites of tasks, and the arena in which policies play them.

A task is the search on one slot: what the policy may see of it (fingerprint, mask), what every config truly saves, how
much the slot weighs in the step, and how noisy a window is. A suite is an array file of tasks with a version, so that a
later simulator does not move old scores. All figures are means over windows of the *expected* step time: noise reaches
the policy, not the score.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..traces.records import format_bytes
from . import spaces
from .spaces import N_CONFIGS

Array = np.ndarray[Any, Any]

#: Windows played per task.
WINDOWS = 64


class Policy(Protocol):
    """Whatever chooses: SB3's ``predict``. One episode is the search on one slot.

    ``observation`` is (N_OBSERVATION,) or (n, N_OBSERVATION); the action is ``[pair, channels]``, int64, (2,) or
    (n, 2). ``state`` is what the last call returned (None at first), ``episode_start`` (n,) is True where a search
    begins.
    """

    def predict(
        self,
        observation: Array,
        state: Any = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, Any]:
        """The action and the state to pass next time."""
        ...


@dataclass
class Suite:
    """``n`` tasks. Savings are in units of the slot's share of the step, see ``spaces.scale_saving``."""

    name: str
    features: Array  # (n, N_FEATURES) fingerprint
    mask: Array  # (n, N_MASK)
    truth: Array  # (n, N_CONFIGS) expected saving of each config
    share: Array  # (n,) of the step
    noise: Array  # (n,) standard deviation of one window's relative step time saved
    label: Array  # (n,) str: cluster and workload
    later: Array = field(default_factory=lambda: np.zeros((0, N_CONFIGS)))  # (n, N_CONFIGS) truth after a drift
    drift_at: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,) window of the drift; WINDOWS = none
    alone: Array = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,) fastest alone, if known

    def __post_init__(self) -> None:
        n = len(self.share)
        if not len(self.later):
            self.later, self.drift_at = self.truth.copy(), np.full(n, WINDOWS)
        allowed = self.allowed
        for name, table in (("truth", self.truth), ("later", self.later)):
            if table.shape != (n, N_CONFIGS) or not np.isfinite(table[allowed]).all():
                raise ValueError(f"suite {self.name}: {name} must be finite for every config that may be chosen")

    def __len__(self) -> int:
        return len(self.share)

    @property
    def allowed(self) -> Array:
        """(n, N_CONFIGS) bool: configs that may be chosen."""
        return spaces.config_mask(np.asarray(self.mask))

    def truth_at(self, window: int) -> Array:
        """(n, N_CONFIGS) expected savings in that window, -inf for what is masked."""
        now = np.where((window >= self.drift_at)[:, None], self.later, self.truth)
        return np.where(self.allowed, now, -np.inf)

    @property
    def digest(self) -> str:
        """Twelve hex digits that change with any number in the suite."""
        sha = hashlib.sha256()
        for key, value in sorted(vars(self).items()):
            sha.update(
                key.encode() + (value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())
            )
        return sha.hexdigest()[:12]

    def save(self, path: str | Path) -> None:
        """Write an .npz."""
        arrays = {key: value for key, value in vars(self).items() if key != "name"}
        np.savez_compressed(path, name=np.array(self.name), **arrays)

    @classmethod
    def of(cls, name: str, batch: Any) -> Suite:
        """The tasks that a simulator's batch holds just after its ``reset``."""
        truth = np.where(spaces.config_mask(np.asarray(batch.mask)), batch.truth, 0.0)
        seen = batch.tasks.fingerprint if hasattr(batch, "tasks") else batch.fingerprint
        label = [
            f"{int(nodes)} x {int(ranks // nodes)} {'reduce_scatter' if rs else 'all_gather'} {format_bytes(size)}"
            for nodes, ranks, rs, size in zip(
                seen.n_nodes, seen.n_ranks, seen.is_reduce_scatter, seen.n_bytes, strict=True
            )
        ]
        features, mask, saved, share, noise = (
            np.asarray(a, np.float32) for a in (batch.features, batch.mask, truth, batch.share, batch.noise)
        )
        suite = cls(name, features, mask, saved, share, noise, np.array(label))
        if hasattr(batch, "tasks"):
            suite.later = np.where(suite.allowed, batch.tasks.later, 0.0).astype(np.float32)
            suite.drift_at, suite.alone = np.minimum(batch.tasks.drift_at, WINDOWS), batch.tasks.alone.copy()
        return suite

    @classmethod
    def load(cls, path: str | Path) -> Suite:
        """Read an .npz. Raises ValueError when it is not a suite."""
        source = Path(path)
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {key: arrays[key] for key in arrays.files}
            return cls(str(found.pop("name")), **found)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is not a suite of tasks: {error}") from error


class Arena:
    """``repeats`` independent runs of every task of a suite, played side by side: row = repeat * len(suite) + task.

    The same interface as the simulator's batch. Noise is drawn per (seed, task, repeat, window) before anything is
    played, so all entrants meet the same noise, and one that plays twice gets the same outcome twice.
    """

    def __init__(self, suite: Suite, repeats: int = 1, seed: int = 0, windows: int = WINDOWS) -> None:
        self.suite, self.windows = suite, windows
        self.n = repeats * len(suite)
        self.task = np.tile(np.arange(len(suite)), repeats)
        rng = np.random.default_rng([seed, len(suite)])
        # Student's t with 4 degrees of freedom, scaled to unit variance: step times have a heavy tail.
        self.noise = rng.standard_t(4, (windows, self.n)) / np.sqrt(2) * suite.noise[self.task]

    def reset(self) -> Array:
        """First observations, (n, N_OBSERVATION)."""
        self.window = 0
        self.trials = spaces.Trials.start(self.n)  # what policies see
        self.since = spaces.Trials.start(self.n)  # the same since the drift: what the judge goes by
        return self.observe()

    def observe(self) -> Array:
        """Observations now."""
        return spaces.observe(self.suite.features[self.task], self.suite.mask[self.task], self.trials)

    def step(self, actions: Array) -> tuple[Array, Array, Array]:
        """One window. Returns observations, expected savings over the window (n,), configs (n,).

        Raises ValueError on a masked or impossible action.
        """
        actions = np.asarray(actions)
        if actions.shape != (self.n, 2) or not np.issubdtype(actions.dtype, np.integer):
            raise ValueError(f"actions must be integers of shape {(self.n, 2)}, not {actions.dtype} {actions.shape}")
        if (actions < 0).any() or (actions >= [spaces.N_PAIRS, spaces.N_CHANNELS]).any():
            raise ValueError("an action lies outside the action space")
        configs = spaces.config_index(actions)
        expected = self.suite.truth_at(self.window)[self.task, configs]
        if np.isneginf(expected).any():
            bad = int(np.flatnonzero(np.isneginf(expected))[0])
            raise ValueError(
                f"masked action {actions[bad].tolist()} in window {self.window} of {self.suite.label[self.task[bad]]}"
            )
        share = self.suite.share[self.task]
        noise = self.noise[self.window] * spaces.noise_factor(expected, share)
        measured = spaces.scale_saving(expected * share + noise, share)
        self.since.restart(self.suite.drift_at[self.task] == self.window)
        for trials in (self.trials, self.since):
            trials.record(configs, measured)
        self.window += 1
        return self.observe(), spaces.in_window(expected, share), configs


class Recorded:
    """Plays decisions again that were recorded, (windows, n) config indices."""

    def __init__(self, configs: Array) -> None:
        self.configs, self.window = np.asarray(configs, np.int64), 0

    def predict(
        self, observation: Array, state: Any = None, episode_start: Array | None = None, deterministic: bool = True
    ) -> tuple[Array, Any]:
        """The next recorded row, whatever is observed. Raises ValueError when there is none of that length left."""
        if self.window >= len(self.configs) or self.configs.shape[1] != len(observation):
            raise ValueError(f"the record has {self.configs.shape} decisions, not one per window and row")
        self.window += 1
        return spaces.actions_of(self.configs[self.window - 1]), state


@dataclass
class Played:
    """One entrant on one arena: (windows, n) arrays, n = repeats x tasks; savings in units of the slot's share."""

    configs: Array
    expected: Array  # saving of each window
    oracle: Array  # saving of the best config at that time
    best: Array  # saving of the config that a stop would commit after this window
    share: Array  # (n,) of the slot in the step
    noise: Array  # (n,) standard deviation of one window's relative step time
    decision_us: float  # mean time of one decision

    @property
    def regret(self) -> Array:
        """(windows, n): cost of the slot over the oracle's, as a part of the oracle's; exploration included."""
        return np.asarray((self.oracle - self.expected) / np.maximum(1 - self.oracle, 0.05))

    @property
    def gap(self) -> Array:
        """(windows, n): as ``regret``, of the config that a stop would commit."""
        return np.asarray((self.oracle - self.best) / np.maximum(1 - self.oracle, 0.05))


def play(policy: Policy, arena: Arena, limit_us: float = 1e6) -> Played:
    """Play all windows of an arena. Raises ValueError when the policy returns an invalid action or is too slow
    (``limit_us`` per decision, over a whole window); what it raises itself passes through."""
    obs, state, start = arena.reset(), None, np.ones(arena.n, bool)
    rows = np.arange(arena.n)
    configs, expected, oracle, best = (np.zeros((arena.windows, arena.n)) for _ in range(4))
    spent = 0.0
    for t in range(arena.windows):
        begin = time.perf_counter()
        actions, state = policy.predict(obs, state=state, episode_start=start, deterministic=True)
        took = time.perf_counter() - begin
        spent += took
        if took / arena.n > limit_us * 1e-6:
            raise ValueError(f"a decision took {took / arena.n * 1e6:.0f} us, the limit is {limit_us:.0f}")
        truth = arena.suite.truth_at(t)[arena.task]
        obs, expected[t], configs[t] = arena.step(actions)
        oracle[t], best[t] = truth.max(axis=1), truth[rows, arena.since.best()]
        start = np.zeros(arena.n, bool)
    share, noise = arena.suite.share[arena.task], arena.suite.noise[arena.task]
    return Played(configs.astype(np.int64), expected, oracle, best, share, noise, 1e6 * spent / arena.windows / arena.n)
