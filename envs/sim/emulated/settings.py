"""Which emulated cluster a job without GPUs runs on: said on a command line, found again in the job's environment."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...nccl_model.clusters import Cluster


@dataclass(frozen=True)
class Emulated:
    """An emulated cluster, and how far its messages and its compute are from the job's own.

    The defaults of the scales are our own job's: bytes are stretched so that a block weighs what a 2.7B model's does in
    bf16 (160 MB), compute so that it keeps the proportion to communication of a ZeRO-3 step with a small batch.
    """

    cluster: str = "dgx-h100-2x8"  # a preset's name or a TOML file
    bytes_scale: float = 360.0  # emulated bytes for each byte of the job
    compute_scale: float = 400.0  # emulated operations for each of the job's
    seed: int = 0
    weather: str = ""  # see :meth:`Weather.parse`

    def env(self) -> dict[str, str]:
        """What tells the job's processes."""
        return {
            "DYNAMICCL_CLUSTER": self.cluster,
            "DYNAMICCL_BYTES_SCALE": repr(self.bytes_scale),
            "DYNAMICCL_COMPUTE_SCALE": repr(self.compute_scale),
            "DYNAMICCL_SEED": str(self.seed),
            "DYNAMICCL_WEATHER": self.weather,
        }

    @classmethod
    def from_env(cls) -> Emulated:
        """What :meth:`env` said; scales are 1 where nothing is said. Raises ValueError for what is no number."""
        numbers = {}
        for name, default in (("BYTES_SCALE", "1"), ("COMPUTE_SCALE", "1"), ("SEED", "0")):
            text = os.environ.get(f"DYNAMICCL_{name}", default)
            try:
                numbers[name] = float(text)
            except ValueError:
                raise ValueError(f"DYNAMICCL_{name} must be a number, not {text!r}") from None
        if numbers["BYTES_SCALE"] <= 0 or numbers["COMPUTE_SCALE"] <= 0:
            raise ValueError("DYNAMICCL_BYTES_SCALE and DYNAMICCL_COMPUTE_SCALE must be above 0")
        weather = os.environ.get("DYNAMICCL_WEATHER", "")
        scales = numbers["BYTES_SCALE"], numbers["COMPUTE_SCALE"]
        return cls(os.environ["DYNAMICCL_CLUSTER"], *scales, int(numbers["SEED"]), weather)

    def check(self) -> None:
        """Refuse what no job could run on, before one is started. Raises ValueError, OSError."""
        _ = self.place, self.sky
        if self.bytes_scale <= 0 or self.compute_scale <= 0:
            raise ValueError("bytes-scale and compute-scale must be above 0")

    @functools.cached_property
    def place(self) -> Cluster:
        """The cluster, as NCCL sees it. Raises ValueError when there is none."""
        from ...nccl_model.clusters import cluster

        return cluster(self.cluster)

    @functools.cached_property
    def sky(self) -> Weather:
        """The weather there. Raises ValueError when it is none."""
        return Weather.parse(self.weather, self.seed)


@dataclass(frozen=True)
class Weather:
    """How the network changes with time: slow drift, congestion bursts, a neighbour's job. All zero: always fair.

    A pure function of the seed and the time, so that every rank of an emulated cluster sees the same network without
    talking about it. All of it is drawn, none measured.
    """

    seed: int = 0
    drift: float = 0.0  # the slow swing reaches 1 + drift
    period_s: float = 600.0  # of the slowest part of the swing
    burst: float = 0.0  # a burst multiplies by 1 + burst ...
    burst_share: float = 0.05  # ... for this part of the time ...
    burst_s: float = 2.0  # ... so many seconds at a stretch
    neighbour: float = 0.0  # a job beside ours multiplies by 1 + neighbour ...
    neighbour_s: float = 60.0  # ... for half of every such period

    def __post_init__(self) -> None:
        sizes = (self.drift, self.burst, self.neighbour)
        if min(sizes) < 0 or not all(map(math.isfinite, sizes)) or not 0 <= self.burst_share <= 1:
            raise ValueError("drift, burst and neighbour are at least 0, burst_share lies in 0..1")
        if min(self.period_s, self.burst_s, self.neighbour_s) <= 0:
            raise ValueError("period_s, burst_s and neighbour_s must be above 0 seconds")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Weather:
        """From ``drift=0.2,burst=1,neighbour=0.5``: any of the fields but the seed; '' is fair weather.

        Raises ValueError naming what is wrong.
        """
        known = [field.name for field in fields(cls) if field.name != "seed"]
        values = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, number = part.partition("=")
            try:
                values[name] = float(number)
            except ValueError:
                raise ValueError(f"weather is NAME=NUMBER,..., not {part!r}; names: {', '.join(known)}") from None
            if name not in known:
                raise ValueError(f"weather has no {name!r}; names: {', '.join(known)}")
        return cls(seed=seed, **values)

    def factor(self, seconds: float) -> float:
        """By how much a collective that starts at ``seconds`` takes longer than on a quiet network."""
        out = 1.0
        if self.drift:
            phases = _phases(self.seed)
            # Three sines of unrelated periods, scaled to lie in 0..1.
            swing = sum(
                math.sin(2 * math.pi * seconds * k / self.period_s + p) for k, p in zip(_PACES, phases, strict=True)
            )
            out *= 1.0 + self.drift * (swing / len(_PACES) + 1.0) / 2.0
        if self.burst and _hit(self.seed, int(seconds // self.burst_s), self.burst_share):
            out *= 1.0 + self.burst
        if self.neighbour and (seconds / self.neighbour_s + _phases(self.seed)[0]) % 1.0 < 0.5:
            out *= 1.0 + self.neighbour
        return out


_PACES = (1.0, 1.618, 2.77)


@functools.lru_cache(maxsize=256)
def _phases(seed: int) -> tuple[float, ...]:
    import numpy as np  # here: a job does not wait for it to have its weather checked

    return tuple(float(x) for x in np.random.default_rng((seed, 1)).uniform(0, 2 * math.pi, len(_PACES)))


@functools.lru_cache(maxsize=4096)
def _hit(seed: int, cell: int, share: float) -> bool:
    import numpy as np

    return bool(np.random.default_rng((seed, 2, cell & 0xFFFFFFFF)).random() < share)
