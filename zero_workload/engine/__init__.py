"""The engine: ``zero()`` and what it is made of."""

from .engine import Engine, zero

__all__ = ["Engine", "zero"]
