"""Policies of the races: one table is compared with NCCL untouched, by ``dynamiccl tune`` on an ordinary job."""

from __future__ import annotations

from ....traces.records import CHANNELS
from ....traces.spaces import N_CHANNELS
from ...policies.searcher import Searcher, Turn


class Fixed(Searcher):
    """NCCL's own pair with at most so many channels, in all slots. It is compared whatever a first look at it says."""

    horizon = 1

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def choose(self, turn: Turn) -> int:
        """The most channels that are allowed; NCCL's own choice where it has no more than that."""
        if turn.own_channels <= self.channels:
            return 0
        row = N_CHANNELS * (1 + turn.own)
        counts = [
            place for place, n in enumerate(CHANNELS) if 0 < n <= self.channels and row + place in turn.open
        ]
        return row + counts[-1] if counts else 0

    def best(self, turn: Turn) -> int:
        """The same."""
        return self.choose(turn)

    def may_compare(self, promises: bool) -> bool:
        """Always: the race is the question."""
        return True


def at_most_4() -> Fixed:
    """For the emulated cluster, whose NCCL runs 16 channels."""
    return Fixed(4)


def at_most_8() -> Fixed:
    """A table of 8 channels."""
    return Fixed(8)


def at_most_16() -> Fixed:
    """A table of 16 channels."""
    return Fixed(16)


def at_most_32() -> Fixed:
    """A table of 32 channels."""
    return Fixed(32)
