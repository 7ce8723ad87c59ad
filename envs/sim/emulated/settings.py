"""Which emulated cluster a job without GPUs runs on: said on a command line, found again in the job's environment."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Emulated:
    """An emulated cluster, and how far its messages and its compute are from the job's own.

    The defaults of the scales are our own job's: bytes are stretched so that a block weighs what a 2.7B model's does in
    bf16 (160 MB), compute so that it keeps the proportion to communication of a ZeRO-3 step with a small batch.
    Raises ValueError for a scale that is not above 0 and finite, and for a negative seed.
    """

    cluster: str = "dgx-h100-2x8"  # a preset's name or a TOML file: see ``clusters.cluster``
    bytes_scale: float = 360.0  # emulated bytes for each byte of the job
    compute_scale: float = 400.0  # emulated operations for each of the job's
    seed: int = 0

    def __post_init__(self) -> None:
        for scale in (self.bytes_scale, self.compute_scale):
            if not 0 < scale < math.inf:
                raise ValueError("bytes-scale and compute-scale must be above 0 and finite")
        if self.seed < 0:
            raise ValueError(f"the seed must be 0 or above, not {self.seed}")

    def env(self) -> dict[str, str]:
        """What tells the job's processes."""
        return {
            "DYNAMICCL_CLUSTER": self.cluster,
            "DYNAMICCL_BYTES_SCALE": repr(self.bytes_scale),
            "DYNAMICCL_COMPUTE_SCALE": repr(self.compute_scale),
            "DYNAMICCL_SEED": str(self.seed),
        }

    @classmethod
    def from_env(cls) -> Emulated:
        """What :meth:`env` said; scales are 1 where nothing is said. Raises ValueError for what is no number."""
        bytes_scale = _read("BYTES_SCALE", "1", float)
        compute_scale = _read("COMPUTE_SCALE", "1", float)
        seed = _read("SEED", "0", int)
        return cls(os.environ["DYNAMICCL_CLUSTER"], bytes_scale, compute_scale, seed)


def _read(name: str, default: str, kind: Callable[[str], Number]) -> Number:
    text = os.environ.get(f"DYNAMICCL_{name}", default)
    try:
        return kind(text)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(f"DYNAMICCL_{name} must be a {whole}number, not {text!r}") from None
