"""When NCCL tells of a collective: at once, or later and from a thread of CUDA's, as each rank decides by itself.

Where launches block, or a communicator has captured graphs, what goes over the network is told by a host function of
CUDA's: on one thread of its own, in order, and maybe when the program has long asked about other calls. Whether that is
so depends on how far the host stream has come, so each rank tells otherwise.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

#: In the environment: a seed. Communicators made from then on tell later, at random.
TELLS_LATE = "STAND_IN_TELLS_LATE"
#: The chance that a group is told later, if nothing else is said, and that the thread comes to the next one at some
#: moment.
LATE, COMES = 0.5, 0.3


class Told:
    """A collective that is told of later, and what the plugin said to it then."""

    def __init__(self, start: Callable[[], int | None], stop: Callable[[int | None], None]) -> None:
        self._start, self._stop = start, stop
        self.handle: int | None = None

    def tell(self) -> None:
        """On the thread that tells."""
        self.handle = self._start()
        self._stop(self.handle)


class HostStream:
    """The thread of CUDA's that tells late, of one rank's communicator."""

    def __init__(self, seed: str, late: float = LATE) -> None:
        """``late``: the chance that a group is told later."""
        self._random, self._waiting, self._late = random.Random(seed), deque[Told](), late
        self._thread = ThreadPoolExecutor(1)

    @classmethod
    def of(cls, name: object) -> HostStream | None:
        """One for the rank and communicator of that name, if the environment asks for it."""
        seed = os.environ.get(TELLS_LATE)
        return cls(f"{seed} {name}") if seed else None

    def draws(self) -> bool:
        """Whether the next group is told of later: by chance, or since one before waits."""
        return bool(self._waiting) or self._random.random() < self._late

    def add(self, start: Callable[[], int | None], stop: Callable[[int | None], None]) -> Told:
        """Another collective, behind those that wait."""
        self._waiting.append(Told(start, stop))
        return self._waiting[-1]

    def comes(self) -> None:
        """Some moment in the life of the program: maybe the thread tells of what waits."""
        while self._waiting and self._random.random() < COMES:
            self._tell_one()

    def catches_up(self, until: Told | None = None) -> None:
        """It tells of all that waits, or until one."""
        while self._waiting and (until is None or until in self._waiting):
            self._tell_one()

    def ends(self) -> None:
        """The communicator is destroyed, when all is told."""
        self.catches_up()
        self._thread.shutdown()

    def _tell_one(self) -> None:
        self._thread.submit(self._waiting.popleft().tell).result()
