"""How full the memory of this process's GPU is, as the CUDA driver says."""

from __future__ import annotations

import time
from typing import Any

#: Seconds between two looks: one takes some tens of microseconds.
EVERY_S = 2.0


class Memory:
    """Looks at the current CUDA device, in the thread that calls: from another one it could break a graph's capture.

    ``cuda`` is torch.cuda, initialised.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._last, self._looked = (0, 0), float("-inf")

    def latest(self) -> tuple[int, int]:
        """Bytes used by all processes on the GPU and bytes there are, at most ``EVERY_S`` old; zeros: unknown.

        Never raises: what fails once is not asked again.
        """
        now = time.monotonic()
        if now - self._looked > EVERY_S:
            self._looked = now
            try:
                free, total = self._cuda.mem_get_info()
                self._last = total - free, total
            except Exception:
                self._last, self._looked = (0, 0), float("inf")
        return self._last
