"""Recomputation: keep a part of the model's input only, run its forward again in backward; and where the input lies."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ..buffers.comm import Collectives

#: What is recomputed: nothing; whole blocks; attention and MLP by themselves; the attention probabilities alone.
MODES = ("none", "block", "sub-block", "selective")


class _Kept:
    """A row of the arena, for as long as autograd holds it."""

    def __init__(self, arena: "Checkpoints", row: int, shape: torch.Size) -> None:
        self.arena = arena
        self.row = row
        self.shape = shape

    def __del__(self) -> None:
        self.arena.free.append(self.row)


class Checkpoints:
    """One arena in which the inputs of recomputed blocks lie, so that they do not fragment memory (ZeRO's M_D).

    Args:
        count: rows of the arena: checkpoints of one micro-batch. More get memory of their own.
        group: ranks of tensor parallelism, which hold equal inputs: each keeps its part, and backward gathers it
            (ZeRO's P_a). Inputs of data parallelism cannot be divided.
    """

    def __init__(self, count: int, group: dist.ProcessGroup | None = None) -> None:
        self.count = count
        self.comm = Collectives(group) if group else None
        self.arena: torch.Tensor | None = None  # [count, elements of a part], of the first checkpoint's size
        self.free: list[int] = []

    def save(self, tensor: torch.Tensor) -> Any:
        """This rank's part of ``tensor`` in a row of the arena; or the tensor itself where it does not fit."""
        size = self.comm.size if self.comm else 1
        if not tensor.is_floating_point() or tensor.numel() % size:
            return tensor
        rank = self.comm.rank if self.comm else 0
        flat = tensor.detach().reshape(-1)
        part = flat.chunk(size)[rank]
        numel = part.numel()
        if self.arena is None:
            rows = range(self.count)
            self.arena = part.new_empty(self.count, numel)
            self.free = list(rows)
        same_size = numel == self.arena.shape[1]
        same_dtype = part.dtype == self.arena.dtype
        if not (same_size and same_dtype and self.free):
            return tensor
        row = self.free.pop()
        self.arena[row].copy_(part)
        return _Kept(self, row, tensor.shape)

    def load(self, kept: Any) -> torch.Tensor:
        """The whole tensor again; with a group, a collective of its ranks."""
        if isinstance(kept, torch.Tensor):
            return kept
        assert self.arena is not None
        part = self.arena[kept.row]
        if self.comm is None:
            copied = part.clone()
            return copied.view(kept.shape)
        numel = part.numel() * self.comm.size
        whole = part.new_empty(numel)
        gather = self.comm.all_gather(whole, part)
        gather.wait()
        return whole.view(kept.shape)


def recomputed(
    function: Callable[..., torch.Tensor], *args: Any, keep: Checkpoints | None = None
) -> torch.Tensor:
    """``function(*args)``, whose inner activations are recomputed in backward; its inputs lie in ``keep``."""
    # The hooks see what checkpoint() itself saves, that is the inputs; inside it installs its own.
    hooks: AbstractContextManager[None] = nullcontext()
    if keep:
        hooks = saved_tensors_hooks(keep.save, keep.load)
    with hooks:
        return checkpoint(function, *args, use_reentrant=False)
