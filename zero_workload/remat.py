"""Activation checkpointing: keep a segment's input only, run its forward again in backward.

With a tensor-parallel ``group`` whose ranks hold the same activations, each keeps 1/n of the input and gathers it back
when needed (ZeRO-R's P_a: checkpoint memory divided by the tensor-parallel degree, for one all-gather a segment).
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from .comm import Collectives


class Partition:
    """Saves tensors that are equal on all ranks of ``group``, the tensor-parallel ones, in parts."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.comm = Collectives(group)

    def save(self, tensor: torch.Tensor) -> Any:
        """This rank's part of ``tensor``, or the tensor itself where it cannot be cut evenly."""
        n = tensor.numel() // self.comm.size
        if not tensor.is_floating_point() or tensor.numel() % self.comm.size:
            return tensor
        mine = tensor.detach().reshape(-1)[self.comm.rank * n : (self.comm.rank + 1) * n]
        return mine.clone(), tensor.shape

    def load(self, saved: Any) -> torch.Tensor:
        """The whole tensor again; a collective of all ranks of the group."""
        if isinstance(saved, torch.Tensor):
            return saved
        part, shape = saved
        whole: torch.Tensor = part.new_empty(part.numel() * self.comm.size)
        self.comm.all_gather(whole, part).wait()
        return whole.view(shape)


def remat(function: Callable[..., torch.Tensor], *args: Any, partition: Partition | None = None) -> torch.Tensor:
    """``function(*args)``, whose inner activations are recomputed in backward and not kept."""
    # The hooks see what checkpoint() itself saves, that is the inputs; inside it installs its own.
    with torch.autograd.graph.saved_tensors_hooks(partition.save, partition.load) if partition else nullcontext():
        return checkpoint(function, *args, use_reentrant=False)
