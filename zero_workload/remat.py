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
    """Saves tensors that are equal on all ranks of ``group`` in parts.

    Args:
        group: the tensor-parallel ranks.
        arena: a flat tensor, allocated beforehand, for the parts of its dtype, so that long-lived checkpoints do not
            lie between short-lived activations (ZeRO-R's M_D); what does not fit is allocated by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None, arena: torch.Tensor | None = None) -> None:
        self.comm = Collectives(group)
        self.arena = torch.empty(0) if arena is None else arena
        self._used = self._live = 0

    def save(self, tensor: torch.Tensor) -> Any:
        """This rank's part of ``tensor``, or the tensor itself where it cannot be cut evenly."""
        n = tensor.numel() // self.comm.size
        if not tensor.is_floating_point() or tensor.numel() % self.comm.size:
            return tensor
        mine = tensor.detach().reshape(-1)[self.comm.rank * n : (self.comm.rank + 1) * n]
        if mine.dtype != self.arena.dtype or self._used + n > self.arena.numel():
            return mine.clone(), tensor.shape, False
        part = self.arena[self._used : self._used + n].copy_(mine)
        self._used, self._live = self._used + n, self._live + 1
        return part, tensor.shape, True

    def load(self, saved: Any) -> torch.Tensor:
        """The whole tensor again; a collective of all ranks of the group."""
        if isinstance(saved, torch.Tensor):
            return saved
        part, shape, in_arena = saved
        whole: torch.Tensor = part.new_empty(part.numel() * self.comm.size)
        self.comm.all_gather(whole, part).wait()
        if in_arena:
            self._live -= 1
            self._used = self._used if self._live else 0  # all are back: the arena starts afresh
        return whole.view(shape)


def remat(function: Callable[..., torch.Tensor], *args: Any, partition: Partition | None = None) -> torch.Tensor:
    """``function(*args)``, whose inner activations are recomputed in backward and not kept."""
    # The hooks see what checkpoint() itself saves, that is the inputs; inside it installs its own.
    with torch.autograd.graph.saved_tensors_hooks(partition.save, partition.load) if partition else nullcontext():
        return checkpoint(function, *args, use_reentrant=False)
