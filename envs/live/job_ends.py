"""What ends the tuning of a job, as exceptions."""

from __future__ import annotations

#: Fewer steps than these seldom reach a verdict: such a job is told so, here and at the command line.
FEWEST_STEPS = 100


class JobEnded(Exception):
    """There is nothing more to tune: the job is over (its exit status is in ``Job.status``), or see the subclasses."""


class Closed(JobEnded):
    """The job goes on, and its ranks change no table any more; the message says why."""


class Stopped(Closed):
    """``dynamiccl stop`` was called."""


class Withdrawn(Closed):
    """Ranks ran one collective two ways: a failure. The table is taken back where this is the node of rank 0, whose
    probe reads it; elsewhere the message says who has to do that."""


class OtherJob(JobEnded):
    """What was known of the job holds no more, as the message says: a search over it has to begin anew."""
