"""Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) as a policy; needs the extra ``[optuna]``."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..envs.spaces import N_CHANNELS
from .baselines import Episode, Searcher

Array = np.ndarray[Any, Any]


class Tpe(Searcher):
    """One Optuna study a slot, over the pair and the channel count as two categorical parameters."""

    def __init__(self, seed: int = 0, startup: int = 4, candidates: int = 24, multivariate: bool = True) -> None:
        """``startup``: random trials before the model has a say; ``candidates``: drawn from it for each choice.

        Raises ValueError, with the cure, when Optuna is not installed.
        """
        super().__init__(seed)
        try:
            import optuna
        except ImportError as error:
            raise ValueError("the policy tpe needs Optuna: pip install 'dynamiccl[optuna]'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.optuna = optuna
        self.options = {"n_startup_trials": startup, "n_ei_candidates": candidates, "multivariate": multivariate}

    def choose(self, episode: Episode, valid: Array, mean: Array, last: int) -> int:
        """What the study asks for, once it was told how the last window went."""
        optuna = self.optuna
        if episode.plan is None:
            import warnings

            pairs, channels = (sorted({int(c) for c in part}) for part in np.divmod(valid, N_CHANNELS))
            space = {
                "pair": optuna.distributions.CategoricalDistribution(pairs),
                "channels": optuna.distributions.CategoricalDistribution(channels),
            }
            with warnings.catch_warnings():  # "multivariate" is called experimental at every use
                warnings.simplefilter("ignore")
                sampler = optuna.samplers.TPESampler(**self.options, seed=int(self.rng.integers(2**31)))
            study = optuna.create_study(direction="maximize", sampler=sampler)
            auto = {"pair": 0, "channels": 0}
            study.add_trial(optuna.trial.create_trial(params=auto, distributions=space, value=0.0))
            episode.plan = [study, space, None]
        study, space, asked = episode.plan
        if asked is not None:
            study.tell(asked, episode.last_saving)
        asked = episode.plan[2] = study.ask(space)
        return int(asked.params["pair"] * N_CHANNELS + asked.params["channels"])
