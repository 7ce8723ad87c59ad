"""Which environment variables are this product's."""

from __future__ import annotations

from .....envs.nccl.plugin.build import named

#: What the emulated cluster needs; it is no part of the tuner.
_EMULATION = ("CLUSTER", "BYTES_SCALE", "COMPUTE_SCALE", "SEED")


def is_ours(name: str, value: str) -> bool:
    """Whether a variable is this product's: DYNAMICCL_*, save those of the emulation, or one that names the plugin."""
    if name.startswith("DYNAMICCL_"):
        return name.removeprefix("DYNAMICCL_") not in _EMULATION
    return name.startswith("NCCL_") and named(value)
