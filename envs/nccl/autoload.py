"""What ``import torch`` calls at its end (entry point group ``torch.backends``): nothing, unless a run asks for it."""

import os
import sys


def autoload() -> None:
    """Register the emulated backend and install the probe where the run's environment asks for them; never raises."""
    try:
        if "DYNAMICCL_CLUSTER" in os.environ:
            from ..sim.backend import register

            register()
        if "DYNAMICCL_RUN" in os.environ:
            from .probe import install

            install()
    except Exception as error:  # an exception here would break `import torch` for the user
        print(f"dynamiccl: not attached: {error}", file=sys.stderr)
