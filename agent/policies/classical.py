"""Search without a learned policy, for comparison: NCCL's default, random, descent, sweep, Optuna's TPE.

Each decides for all slots of a job in every window, as the search asks it to (``envs.search.turns``): the slots'
trials run
side by side, and what a config saved is what the belief makes of all windows and durations, the same for every entrant.
So each of them has the best estimate of its own trials that there is; which config to try next is its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from ...envs.search import turns
from ...traces.fingerprint import N_FEATURES
from ...traces.records import CHANNELS, PAIRS
from ...traces.spaces import N_CHANNELS, N_CONFIGS
from .rule import is_sure, promises, shunned

Array = np.ndarray[Any, Any]

#: Where the prices of the pairs begin in a slot's features, see ``traces.fingerprint.Fingerprint.vector``; before them
#: lie single figures, among them (log2 / 6) the channels of NCCL's own choice; after them which pair that is.
_PRICES = N_FEATURES - 2 * len(PAIRS)
_OWN_CHANNELS = 8


@dataclass
class Turn:
    """One slot's turn, as a searcher sees it; savings are in units of the slot's share of the step."""

    slot: int
    is_last: bool  # of the slots
    round: int  # windows of the search so far
    open: Array  # (a,) configs that may be chosen
    mean: Array  # (N_CONFIGS,) saving of what was tried; -inf: not tried; AUTO's is 0
    asked: Array  # (N_CONFIGS,) times that it was chosen
    saved: float  # part of the step that the last window saved
    own: tuple[int, int]  # NCCL's own choice: index of the pair, channels
    price: Array  # (len(PAIRS),) log2 of NCCL's price against its best, / 3

    @property
    def best(self) -> int:
        """The best of what was tried."""
        return int(self.open[self.mean[self.open].argmax()])

    @property
    def untried(self) -> list[int]:
        """What may be chosen and was not tried yet."""
        return [int(c) for c in self.open if np.isneginf(self.mean[c])]

    def first(self, configs: Sequence[int]) -> int:
        """The first of ``configs`` that was not tried yet, the best where there is none. Last comes what was asked for
        before: that window was given up, maybe for what ran in another slot."""
        allowed = self.untried
        return min((c for c in configs if c in allowed), key=lambda c: self.asked[c], default=self.best)


@dataclass
class Memo:
    """What a searcher remembers of one job."""

    asked: dict[int, Array] = field(default_factory=dict)  # see Turn, by slot
    plans: dict[int, Any] = field(default_factory=dict)  # the searcher's own, by slot
    study: Any = None  # Optuna's, and the trial that runs
    trial: Any = None
    is_done: bool = False  # what it found is compared, or was


class Searcher:
    """Base: takes observations apart; a subclass has :meth:`choose`."""

    #: Windows running under one table that say that it is done; at once, where nothing is left to chance.
    patience = 1
    #: Windows after which it keeps to the best it has tried.
    horizon = 30

    def __init__(self, seed: int = 0, horizon: int | None = None, patience: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.horizon, self.patience = horizon or self.horizon, patience or self.patience

    def choose(self, turn: Turn, memo: Memo) -> int:
        """Config to run next in this slot."""
        raise NotImplementedError

    def predict(
        self,
        observation: Array,
        state: list[Memo] | None = None,
        episode_start: Array | None = None,
        deterministic: bool = True,
    ) -> tuple[Array, list[Memo]]:
        """See ``envs.search.windows.Policy``. ``state`` is changed in place; ``deterministic`` makes no difference."""
        rows = np.atleast_2d(np.asarray(observation))
        seen = turns.seen(rows)
        starts = np.zeros(len(rows), bool) if episode_start is None else np.atleast_1d(episode_start)
        state = [Memo() for _ in rows] if state is None else state
        chosen = np.zeros(len(rows), np.int64)
        what, early, ends = np.zeros(len(rows), np.int64), is_sure(seen), promises(seen)
        allowed = ~shunned(seen)  # all have the rule's care, and its word on what is worth a comparison
        for i in range(len(rows)):
            if starts[i]:
                state[i] = Memo()
            turn = _turn(seen, i, allowed[i])
            turn.asked = state[i].asked.setdefault(turn.slot, turn.asked)
            if early[i]:  # the harness's help: what the belief is sure of is confirmed before the search goes on
                chosen[i], what[i] = np.where(allowed[i], seen.ahead[i], -np.inf).argmax(), turns.COMPARE
                continue
            chosen[i] = turn.best if turn.round >= self.horizon else self.choose(turn, state[i])
            turn.asked[chosen[i]] += 1
            if state[i].is_done or seen.context["refining"][i] > 0.5:
                what[i] = turns.LEAVE
            elif turn.is_last and seen.last[i, chosen[i]] and 4 * seen.context["idle"][i] >= self.patience:
                what[i], state[i].is_done = turns.COMPARE if ends[i] else turns.LEAVE, True
        actions = turns.actions_of(chosen, what)
        return actions if np.ndim(observation) == 2 else actions[0], state


def _turn(seen: turns.Seen, i: int, allowed: Array) -> Turn:
    context, features = {key: float(value[i]) for key, value in seen.context.items()}, seen.features[i]
    n_slots = round(8 * context["slots"])
    share = max(context["share"], 0.01)
    mean = np.where(seen.count[i] > 0, (seen.ahead[i] - seen.ahead[i, 0]) / share, -np.inf)
    mean[0] = 0.0
    price, own = np.split(features[_PRICES:], 2)
    return Turn(
        slot=round(context["place"] * n_slots),
        is_last=round(context["place"] * n_slots) == n_slots - 1,
        round=round(16 * context["round"]),
        open=np.flatnonzero(allowed),
        mean=mean,
        asked=np.zeros(N_CONFIGS),
        saved=context["last_saving"] / 5,
        own=(int(own.argmax()), round(2 ** (6 * features[_OWN_CHANNELS]))),
        price=price,
    )


class Default(Searcher):
    """Leaves everything to NCCL."""

    def choose(self, turn: Turn, memo: Memo) -> int:
        """AUTO."""
        return 0


class Random(Searcher):
    """Any config that may be chosen, all equally likely, for ``horizon`` windows."""

    horizon = 8

    def choose(self, turn: Turn, memo: Memo) -> int:
        """A random one."""
        return int(self.rng.choice(turn.open))


def _of_pair(pair: int, turn: Turn) -> list[int]:
    """Configs of a pair from the fewest channels to NCCL's own count; of NCCL's own pair those of AUTO too."""
    rows = [1 + pair] + ([0] if pair == turn.own[0] else [])
    found = [c for c in turn.open if int(c) // N_CHANNELS in rows]
    return [int(c) for c in sorted(found, key=lambda c: CHANNELS[c % N_CHANNELS] or 99)]


class CoordinateDescent(Searcher):
    """One knob at a time, as AutoCCL does within its subspaces, in all slots at once: all pairs, then channel counts
    outwards from the best until they get worse, then pairs again at that count, until nothing gains."""

    def choose(self, turn: Turn, memo: Memo) -> int:
        """The next untried neighbour of the best config, else the best."""
        best = turn.best
        pair, channel = turn.own[0] if best < N_CHANNELS else best // N_CHANNELS - 1, best % N_CHANNELS
        pairs = list(range(channel, N_CONFIGS, N_CHANNELS))
        row = _of_pair(pair, turn)
        at = row.index(best)
        counts = [row[k] for k in (at - 1, at - 2 if channel == 0 else at + 1) if 0 <= k < len(row)]
        return turn.first(pairs + counts if channel == 0 else counts + pairs)


class Sweep(Searcher):
    """Every config once, in order, then the best (as FlagCX); with ``hysteresis`` the config in force is left only for
    one that is better by that much."""

    def __init__(self, seed: int = 0, hysteresis: float = 0.0, **ends: Any) -> None:
        super().__init__(seed, **ends)
        self.hysteresis = hysteresis

    def choose(self, turn: Turn, memo: Memo) -> int:
        """The first untried one, else the best."""
        if turn.untried:
            return turn.first(turn.untried)
        kept = memo.plans.get(turn.slot, 0)
        if turn.mean[turn.best] > turn.mean[kept] + self.hysteresis:
            memo.plans[turn.slot] = turn.best
        return int(memo.plans.get(turn.slot, 0))


class Tpe(Searcher):
    """Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), one study a job: the config of each slot is a
    categorical parameter, a window is a trial, and its value is what the window saved of the step. Needs the extra
    ``[optuna]``."""

    horizon = 24

    def __init__(self, seed: int = 0, startup: int = 6, candidates: int = 24, **ends: Any) -> None:
        """``startup``: random trials before the model has a say; ``candidates``: drawn from it for each choice.

        Raises ValueError, with the cure, when Optuna is not installed.
        """
        super().__init__(seed, **ends)
        try:
            import optuna
        except ImportError as error:
            raise ValueError("the policy tpe needs Optuna: pip install 'dynamiccl[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna = optuna
        self.options: dict[str, Any] = {"n_startup_trials": startup, "n_ei_candidates": candidates}

    def choose(self, turn: Turn, memo: Memo) -> int:
        """What the study asks for, slot by slot; it is told how the window went before the next one begins."""
        if memo.study is None:
            sampler = self.optuna.samplers.TPESampler(**self.options, seed=int(self.rng.integers(2**31)))
            memo.study = self.optuna.create_study(direction="maximize", sampler=sampler)
        if turn.slot == 0:
            if memo.trial is not None:
                memo.study.tell(memo.trial, turn.saved)
            memo.trial = memo.study.ask()
        options = memo.plans.setdefault(turn.slot, turn.open.tolist())  # a parameter keeps its choices
        config = int(memo.trial.suggest_categorical(f"slot {turn.slot}", options))
        return config if config in turn.open else 0


#: By name; ``tpe`` beside them needs the extra ``[optuna]``.
CLASSICAL: dict[str, type[Searcher]] = {
    "default": Default,
    "random": Random,
    "coordinate-descent": CoordinateDescent,
    "sweep": Sweep,
}


@cache
def best_settings() -> dict[str, dict[str, Any]]:
    """Settings of each as ``tests/fit_classical.py`` found them, on jobs that no suite holds."""
    text = resources.files(__package__).joinpath("classical.json").read_text()
    return {name: found["settings"] for name, found in json.loads(text)["entrants"].items()}


def make_classical(name: str, seed: int = 0, settings: dict[str, Any] | None = None) -> Searcher:
    """One of CLASSICAL (or ``tpe``) with these settings, its best ones where none are given.

    Raises ValueError with the cure where a package is missing.
    """
    kind = Tpe if name == "tpe" else CLASSICAL[name]
    return kind(seed, **(best_settings().get(name, {}) if settings is None else settings))
