"""What ends the tuning of a job, as exceptions."""

from __future__ import annotations

from ...traces.reasons import Why

#: Fewer steps than these seldom reach a verdict: such a job is told so, here and at the command line.
FEWEST_STEPS = 100


class JobEnded(Exception):
    """There is nothing more to tune: the job is over (its exit status is in ``Job.status``), or see the subclasses."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


class Closed(JobEnded):
    """The job goes on, and nothing of it is tuned: fail_closed.py says what holds then."""


class OtherJob(JobEnded):
    """What was known of the job holds no more, as ``why`` says: a search over it has to begin anew."""


class NothingToTune(ValueError):
    """Not for good: first steps are long, and a job may begin with another part."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why
