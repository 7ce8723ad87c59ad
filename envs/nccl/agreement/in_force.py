"""What runs on each communicator, as rank 0 knows it from its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..plugin.bindings import Span
from ..shm import decides, rows_of, trial_of
from .protocol import Vote


@dataclass
class InForce:
    """What runs on the communicators that have ever had a table, as rank 0 has decided it."""

    #: Rows of what is there to stay. Two tables with the same rows are no two ways.
    rows: dict[int, bytes] = field(default_factory=dict)
    trials: dict[int, int] = field(default_factory=dict)  # the count at which the last trial ends, until seen

    def decided(self, message: bytes, switches: Mapping[int, Span]) -> None:
        """A round is over."""
        is_trial = trial_of(message).trial_steps > 0
        rows = rows_of(message)
        for comm, span in switches.items():
            if is_trial:
                self.rows.setdefault(comm, b"")
                self.trials[comm] = span.until
            else:
                self.rows[comm] = rows
                self.trials.pop(comm, None)

    def sees(self, counts: Mapping[int, int]) -> None:
        """``counts``: collectives made on each communicator of rank 0."""
        for comm, until in list(self.trials.items()):
            if counts.get(comm, 0) >= until:
                del self.trials[comm]

    def hears(self, votes: Sequence[Vote]) -> None:
        """The last votes of the other ranks: where rank 0 does not count, all members must be past the trial's end."""
        for comm, until in list(self.trials.items()):
            n_ranks = -1
            n_past = 0
            for vote in votes:
                word = vote.comms.get(comm)
                if word is None:
                    continue
                n_ranks = word.n_ranks
                if word.newest >= until:
                    n_past += 1
            if n_past == n_ranks:
                del self.trials[comm]

    def is_default(self) -> bool:
        """Whether NCCL is left untouched everywhere, for good."""
        return not (any(map(decides, self.rows.values())) or self.trials)

    def differs(self, comm: int, message: bytes) -> bool:
        """Whether a communicator runs another table than this one, or may run a trial."""
        if comm in self.trials:
            return True
        rows = rows_of(message)
        return self.rows.get(comm, rows) != rows
