"""The simulated environment (``dynamiccl/Sim-v0``): the search over a random job on a random cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from .search.config import SearchConfig
from .search.interfaces import Windows
from .search_env import SearchEnv
from .sim.jobs import STANDARD, JobFamily, draw_jobs
from .sim.noise import NoiseStream
from .sim.windows import OneJob, SimWindows

Array = np.ndarray[Any, Any]


class SimEnv(SearchEnv):
    """Tune a simulated job (``dynamiccl/Sim-v0``), see :class:`search_env.SearchEnv`.

    ## Starting State
    A random job of the family, its first default steps behind it.

    ## Arguments
    ``family``: what jobs are drawn from; ``config``: how the search is run.
    """

    def __init__(
        self, family: JobFamily = STANDARD, config: SearchConfig | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__(config, render_mode=render_mode)
        self.family = family

    def open(self) -> Windows:
        """Windows of a new job. In its step t it meets the same noise, whatever is decided: policies that play the same
        seed can be compared."""
        rng = self.np_random
        self.jobs = draw_jobs(self.family, rng, 1)
        seed = int(rng.integers(2**31))
        noise = NoiseStream(seed, np.zeros(1), self.jobs.width)
        windows = SimWindows(self.jobs, noise)
        n_steps = self.config.profile_steps
        return OneJob(windows, n_steps)
