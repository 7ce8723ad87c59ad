"""The job whose collectives are tuned: ZeRO stages 0 to 3 by hand, on asynchronous ``torch.distributed`` collectives.

``README.md`` beside this file leads through it, from ``loss.backward()`` to the last collective.
"""

from .zero import Engine, zero

__all__ = ["Engine", "zero"]
