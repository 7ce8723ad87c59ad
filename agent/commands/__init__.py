"""One file per command of ``dynamiccl``: its options and help text; the work lies in the package that owns it."""

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong and how to cure it, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
