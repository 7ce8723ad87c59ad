"""Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) as a searcher; needs the extra ``[optuna]``."""

from __future__ import annotations

from typing import Any

from .classical import Memo, Searcher, Turn


class Tpe(Searcher):
    """One Optuna study a job: the config of each slot is a categorical parameter, a window is a trial, and its value is
    what the window saved of the step."""

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
        self.options = {"n_startup_trials": startup, "n_ei_candidates": candidates}

    def choose(self, turn: Turn, memo: Memo) -> int:
        """What the study asks for, slot by slot; it is told how the window went before the next one begins."""
        optuna = self.optuna
        if memo.plan is None:
            sampler = optuna.samplers.TPESampler(**self.options, seed=int(self.rng.integers(2**31)))
            memo.plan = optuna.create_study(direction="maximize", sampler=sampler)
            memo.plan = [memo.plan, None]
        study, trial = memo.plan
        if turn.slot == 0:
            if trial is not None:
                study.tell(trial, turn.saved)
            trial = memo.plan[1] = study.ask()
        options = memo.plans.setdefault(turn.slot, turn.open.tolist())  # a parameter keeps its choices
        config = int(trial.suggest_categorical(f"slot {turn.slot}", options))
        return config if config in turn.open else 0
