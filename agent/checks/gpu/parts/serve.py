"""A rank's program: ``python -m dynamiccl.agent.checks.gpu.parts.serve JSON``; the JSON is what :class:`Rank` takes."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from .contention import contention
from .host import host
from .joint import joint
from .noise import noise
from .rank import Rank
from .sweep import smoke, sweep
from .truth import truth

PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "smoke": smoke,
    "sweep": sweep,
    "contention": contention,
    "noise": noise,
    "truth": truth,
    "joint": joint,
    "host": host,
}


def main() -> None:
    """Do the parts that standard input names."""
    status = 0
    try:
        Rank(**json.loads(sys.argv[1])).serve(PARTS)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()
