"""Tunes NCCL's algorithm, protocol and channel count for every reduce-scatter and all-gather of a running training job.

``import dynamiccl`` registers the Gymnasium environments, once Gymnasium is imported. The processes of a job that is
tuned import this as well; there it does nothing, so that nothing of Gymnasium's can trouble them.
"""

import os
from typing import Any

__all__ = ["__version__"]

# pytest imports this file once more, by the name of the folder that it lies in.
if __name__ == "dynamiccl" and not {"DYNAMICCL_RUN", "DYNAMICCL_CLUSTER"} & os.environ.keys():
    from .envs.registration import register_envs

    register_envs()


def __getattr__(name: str) -> Any:
    """``__version__``, read from the installation when somebody asks."""
    if name == "__version__":
        from importlib.metadata import version

        return version("dynamiccl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
