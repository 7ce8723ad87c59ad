"""The job: ZeRO stages 0 to 3, written out on asynchronous collectives."""

from .zero import Engine, zero

__all__ = ["Engine", "zero"]
