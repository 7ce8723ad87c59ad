"""``dynamiccl/Live-v0``: the search over a running job as an environment. Time is real."""

from __future__ import annotations

from typing import Any

from .live.windows import LiveWindows
from .search.config import SearchConfig
from .search.interfaces import Windows
from .search_env import SearchEnv


class LiveEnv(SearchEnv):
    """Tune a running job (see :class:`search_env.SearchEnv`).

    ## Arguments
    ``job``: a :class:`dynamiccl.envs.live.job.Job`; ``config``: how the search is run; others:
    :class:`live.windows.LiveWindows`.

    ## Starting State
    Some default steps, from which the slots are found. Raises ValueError where there is none to tune, JobEnded where
    the job is over.

    ## Episode End
    As everywhere. The confirmed table stays until the next :meth:`reset`, also after :meth:`close`.
    """

    def __init__(
        self,
        job: Any = None,
        config: SearchConfig | None = None,
        render_mode: str | None = None,
        **windows: Any,
    ) -> None:
        if job is None:
            raise ValueError(
                'dynamiccl/Live-v0 tunes a running job: gymnasium.make("dynamiccl/Live-v0", job=JOB), where JOB is a '
                "dynamiccl.envs.live.job.Job"
            )
        super().__init__(config, render_mode=render_mode)
        self.job, self.options = job, windows

    def open(self) -> Windows:
        """Windows of the job, whose trials stay in force for as long as the environment is not closed."""
        if self.job.confirmed:
            self.job.confirm({})
        return LiveWindows(self.job, profile_steps=self.config.profile_steps, **self.options)

    def close(self) -> None:
        """Leave the job under what was confirmed."""
        self.job.release()
