"""Tunes NCCL's algorithm, protocol and channel count for every reduce-scatter and all-gather of a running training job.

``dynamiccl.tune(command)``, ``attach``, ``apply`` and ``advise`` do what the commands of these names do:
``help(dynamiccl.tune)`` lists their arguments, ``help(dynamiccl.Run)`` what a run can be asked. ``import dynamiccl``
registers the Gymnasium environments, once Gymnasium is imported. In the processes of a tuned job the import registers
nothing, so Gymnasium cannot disturb the job.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent.api import Run, advise, apply, attach, tune

__all__ = ["Run", "__version__", "advise", "apply", "attach", "tune"]

# pytest imports this file once more, by the name of the folder that it lies in.
if __name__ == "dynamiccl" and not any(map(os.environ.get, ("DYNAMICCL_RUN", "DYNAMICCL_CLUSTER"))):
    from .envs.registration import register_envs

    register_envs()


def __getattr__(name: str) -> Any:
    """The Python API and ``__version__``, imported when somebody asks."""
    if name == "__version__":
        from importlib.metadata import version

        return version("dynamiccl")
    if name in __all__:
        from .agent import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the Python API too, though they are not imported yet."""
    return sorted({*globals(), *__all__})
