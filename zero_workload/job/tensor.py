"""Tensor parallelism: ranks share each matrix of a transformer's blocks (Shoeybi et al., Megatron-LM, 2019).

Attention is cut by heads and the MLP by its inner width, so that a block needs two all-reduces in forward and two in
backward, each of the block's whole output.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from .model import Transformer


class _Copy(torch.autograd.Function):
    """Identity, whose gradients are summed: each rank's matrix contributes a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, whose gradient is everybody's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return grad, None


def _part(weight: torch.Tensor, dim: int, group: ProcessGroup) -> nn.Parameter:
    """This rank's part of a matrix, or of a bias."""
    ranks = group.size()
    parts = weight.detach().chunk(ranks, dim)
    rank = group.rank()
    mine = nn.Parameter(parts[rank].clone())
    mine.is_part = True  # type: ignore[attr-defined]  # zero() refuses optimizers that need the whole
    return mine


class ColumnLinear(nn.Module):
    """``linear`` with its outputs cut over ``group``: [..., in] to [..., out / N]."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 0, group)
        self.bias = _part(linear.bias, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        same = _Copy.apply(x, self.group)
        return F.linear(same, self.weight, self.bias)


class RowLinear(nn.Module):
    """``linear`` with its inputs cut over ``group``: [..., in / N] to [..., out], which all ranks have alike."""

    def __init__(self, linear: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 1, group)
        bias = linear.bias.detach()
        self.bias = nn.Parameter(bias.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole outputs."""
        part = F.linear(x, self.weight)
        whole: torch.Tensor = _Sum.apply(part, self.group)
        return whole + self.bias


def cut_matrices(model: Transformer, group: ProcessGroup) -> None:
    """Cut attention and MLP of each block of ``model``, built alike on all ranks of ``group``, in place.

    Parameters that all ranks of the group keep whole are marked (``model_copies``), for the gradient's norm.

    Raises:
        ValueError: the heads cannot be divided evenly.
    """
    heads = model.config.heads
    size = group.size()
    if heads % size:
        raise ValueError(f"{heads} heads are not a multiple of {size} ranks that share matrices")
    parts = set[nn.Parameter]()
    for block in model.blocks:
        attention: Any = block.attention
        mlp: Any = block.mlp
        qkv = ColumnLinear(attention.qkv, group)
        out = RowLinear(attention.out, group)
        up = ColumnLinear(mlp.up, group)
        down = RowLinear(mlp.down, group)
        attention.qkv = qkv
        attention.out = out
        mlp.up = up
        mlp.down = down
        for column in (qkv, up):
            parts |= {column.weight, column.bias}
        for row in (out, down):
            parts |= {row.weight}  # each rank has the whole bias
    for param in model.parameters():
        if param not in parts:
            param.model_copies = size  # type: ignore[attr-defined]
