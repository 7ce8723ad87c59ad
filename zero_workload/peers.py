"""The library implementations behind the engine's two calls, so that the same job can run on either."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from .zero import OptimizerOf

#: Peer -> the ZeRO stage that it is a peer of.
PEERS = {"ddp": 0, "zero-optimizer": 1, "fsdp2-no-reshard": 2, "fsdp2": 3}


class Peer:
    """``model`` under a library's data parallelism: ``backward(loss)`` and ``step()`` as the engine's.

    Args:
        name: one of ``PEERS``.
        model: a ``Transformer``; at FSDP2 each of its blocks is a unit, as at our stage 3.
        optimizer: makes the optimizer from parameters.
        param_dtype: of FSDP2's parameters in use; the others train in the model's dtype.
        max_norm: clip the global gradient norm to this.
        gradient_accumulation: backward passes a step; gradients are reduced in each, as at stages 2 and 3.
        mesh: FSDP2's device mesh; ``None``: all ranks.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: OptimizerOf,
        *,
        param_dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 25 * 2**20,
        max_norm: float | None = None,
        gradient_accumulation: int = 1,
        mesh: Any = None,
    ) -> None:
        if name not in PEERS:
            raise ValueError(f"a peer is one of {', '.join(PEERS)}, not {name!r}")
        self.model, self.max_norm, self.accumulation = model, max_norm, gradient_accumulation
        if name.startswith("fsdp2"):  # imported where used: it takes seconds
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype)
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "fsdp2")
            fully_shard(model, mesh=mesh, mp_policy=policy)
        else:
            self.model = nn.parallel.DistributedDataParallel(
                model.to(param_dtype), bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True
            )
        make: Any = optimizer
        if name == "zero-optimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            make = partial(ZeroRedundancyOptimizer, optimizer_class=make, parameters_as_bucket_view=True)
        self.optimizer: torch.optim.Optimizer = make(list(model.parameters()))

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps."""
        (loss / self.accumulation).backward()

    def step(self) -> torch.Tensor | None:
        """Clip, update, forget the gradients; called after the last micro-batch. Returns the norm if clipping."""
        norm = None
        if self.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm
