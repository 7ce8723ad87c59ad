"""Replay of a recorded trace (``dynamiccl/Replay-v0``): the same search without the machine it ran on."""

from __future__ import annotations

import os

from ..traces.files import Trace
from .live.windows import LiveWindows
from .replay import decisions as replay
from .replay.job import RecordedJob
from .search.config import SearchConfig
from .search.interfaces import Windows
from .search_env import SearchEnv


class ReplayEnv(SearchEnv):
    """Tune a recorded job again, see :class:`search_env.SearchEnv`.

    The default answers with its recorded steps, measured configs with what they saved, others as a model predicts.

    ## Arguments
    ``trace``: a folder, or a :class:`dynamiccl.traces.files.Trace`; ``min_share``: slots with a smaller share are left
    out; ``config``: how the search is run. Raises ValueError without a trace, TraceError if it cannot be tuned.
    """

    def __init__(
        self,
        trace: Trace | str | os.PathLike[str] | None = None,
        min_share: float = 0.01,
        config: SearchConfig | None = None,
        render_mode: str | None = None,
    ) -> None:
        if trace is None:
            raise ValueError(
                'dynamiccl/Replay-v0 plays a recorded run: gymnasium.make("dynamiccl/Replay-v0", trace=FOLDER); '
                "dynamiccl demo leaves runs/demo/trace"
            )
        super().__init__(config, render_mode=render_mode)
        self.trace = trace if isinstance(trace, Trace) else Trace.read(trace)
        self.min_share = min_share
        self.recorded = replay.load(self.trace, min_share)

    def open(self) -> Windows:
        """Windows of the recorded job, from a random place in the record on."""
        job = RecordedJob(self.trace, self.recorded, int(self.np_random.integers(2**31)))
        return LiveWindows(job, self.config.profile_steps, self.min_share)
