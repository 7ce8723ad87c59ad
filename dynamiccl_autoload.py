"""What ``import torch`` calls at its end (entry point group ``torch.backends``): nothing, unless a run asks for it.

A module beside the packages, of the standard library alone: every ``import torch`` in the environment passes through
it, and must not fail, nor become slower, for anything that is wrong with the rest.
"""

import os


def autoload() -> None:
    """Attach to the job where the environment of a run asks for it; never raises."""
    if "DYNAMICCL_RUN" not in os.environ and "DYNAMICCL_CLUSTER" not in os.environ:
        return
    try:
        from dynamiccl.envs.nccl.autoload import autoload as attach

        attach()
    except (Exception, SystemExit) as error:
        try:  # noqa: SIM105 - contextlib would be one more import
            os.write(2, f"dynamiccl: not attached: {type(error).__name__}: {error}\n".encode(errors="replace"))
        except OSError:
            pass
