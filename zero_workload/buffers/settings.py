"""The settings of ``zero()``, and what each may be."""

from dataclasses import dataclass

import torch

#: A module outside the repeated blocks gets a gather unit of its own from this many elements on: 1 MiB in bf16, which
#: takes a wire of 100 GB/s as long as a collective's latency. Smaller modules stay gathered with the root.
MIN_UNIT = 2**19
#: A fresh float16 run scales its loss by this, as torch.amp.GradScaler does.
LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class Settings:
    """Settings of ``zero()``, which describes them. Raises ValueError where one is out of range."""

    stage: int
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    param_dtype: torch.dtype = torch.bfloat16
    gradient_accumulation: int = 1
    max_norm: float | None = None
    unit: str = "block"
    min_unit: int = MIN_UNIT
    hybrid: int | None = None
    keep_last: bool = True
    reduce_dtype: torch.dtype | None = None
    classic: bool = False
    offload: bool = False
    loss_scale: float = LOSS_SCALE

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.reduce_dtype or self.param_dtype

    @property
    def master(self) -> torch.dtype:
        """The dtype that the optimizer updates: float32, or the parameters' where that has more digits."""
        return torch.promote_types(torch.float32, self.param_dtype)

    @property
    def sums(self) -> torch.dtype:
        """The dtype of a gradient shard at stages 2 and 3: sums over micro-batches have the master's digits."""
        return self.wire if self.gradient_accumulation == 1 else self.master

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: small gradients would be 0 in float16."""
        return torch.float16 in (self.param_dtype, self.wire)

    def __post_init__(self) -> None:
        self._check_each()
        self._check_together()

    def _check_each(self) -> None:
        natural, positive = "a whole number from 0 up", "a whole number from 1 up"
        floating = "a floating-point dtype of 16 bits or more"
        reduced, clipped = self.reduce_dtype, self.max_norm
        for name, allowed, fine in (
            ("stage", "0, 1, 2 or 3", _whole(self.stage) and self.stage <= 3),
            ("prefetch", natural, _whole(self.prefetch)),
            ("gradient_accumulation", positive, _whole(self.gradient_accumulation, 1)),
            ("bucket_bytes", positive, _whole(self.bucket_bytes, 1)),
            ("min_unit", natural, _whole(self.min_unit)),
            ("hybrid", f"{natural}, or None", self.hybrid is None or _whole(self.hybrid)),
            ("param_dtype", floating, _floating(self.param_dtype)),
            ("reduce_dtype", f"{floating}, or None", reduced is None or _floating(reduced)),
            ("max_norm", "above 0, or None", clipped is None or clipped > 0),
            ("loss_scale", "from 1 up", 1 <= self.loss_scale < 2.0**127),
            ("unit", "'block' or 'layer'", self.unit in ("block", "layer")),
        ):
            if not fine:
                raise ValueError(f"{name} is {allowed}, not {getattr(self, name)!r}")

    def _check_together(self) -> None:
        if self.stage != 3 and self.hybrid is not None:
            raise ValueError("hybrid says which units stay replicated at stage 3")
        if self.classic and self.stage != 1:
            raise ValueError(f"classic is a form of stage 1, not of stage {self.stage}")
        if self.offload and self.stage == 0:
            raise ValueError("offload moves optimizer shards to the host: take stage 1, 2 or 3")


def _whole(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize >= 2
