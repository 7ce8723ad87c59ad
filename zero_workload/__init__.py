"""The job whose collectives are tuned: ZeRO stages 0 to 3 by hand, on asynchronous ``torch.distributed`` collectives.

``README.md`` beside this file leads through it, from ``loss.backward()`` to the last collective. PyTorch is imported
when ``zero`` is first asked for: ``formulas`` does without.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, zero

__all__ = ["Engine", "zero"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"{__name__} has no {name}")
    from . import engine

    return getattr(engine, name)
