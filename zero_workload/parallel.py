"""What a job cuts up besides the batch: matrices (tensor parallelism), the sequence, and experts."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def subgroup(shape: Sequence[int], *dims: int) -> dist.ProcessGroup:
    """A new communicator of the ranks that differ from this one along ``dims`` only, when all ranks are laid out in
    ``shape``, in order. Every rank has to call it, with the same arguments in the same order.
    """
    places = torch.arange(dist.get_world_size()).view(*shape).movedim(dims, tuple(range(-len(dims), 0)))
    groups = places.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()
    mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]
    return mine


def tensor_parallel(model: nn.Module, mesh: Any, *, sequence: bool = False) -> None:
    """Cut attention (by heads) and MLP of each block of a ``Transformer`` over ``mesh``; their weights become DTensors.

    Args:
        model: changed in place; built alike on all ranks of the mesh.
        mesh: one-dimensional device mesh of the tensor-parallel ranks.
        sequence: between these a rank holds its part of the sequence only, and reduce-scatters and all-gathers take
            the place of all-reduces (Korthikanti et al., Reducing Activation Recomputation, MLSys 2023).

    Raises:
        ValueError: heads, or the sequence, cannot be cut evenly, or the model has experts.
    """
    from torch.distributed.tensor import Replicate, Shard  # imported where used: it takes seconds
    from torch.distributed.tensor.parallel import ColwiseParallel as Columns
    from torch.distributed.tensor.parallel import RowwiseParallel as Rows
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    config: Any = model.config
    if config.experts:
        raise ValueError("experts are not cut by tensor parallelism: take one of the two")
    for name, n in {"heads": config.heads, **({"seq": config.seq} if sequence else {})}.items():
        if n % mesh.size():
            raise ValueError(f"{name} is {n}: not a multiple of {mesh.size()} tensor-parallel ranks")
    part: Any = Shard(1) if sequence else Replicate()  # of [batch, seq, width], between attention and MLP
    plan: dict[str, Any] = {}
    for block in (f"blocks.{i}." for i in range(config.layers)):
        for first, second in (("attention.qkv", "attention.out"), ("mlp.up", "mlp.down")):
            plan[block + first], plan[block + second] = Columns(input_layouts=part), Rows(output_layouts=part)
        plan |= {block + norm: SequenceParallel() for norm in ("norm1", "norm2") if sequence}
    if sequence:
        plan["embed"] = Rows(input_layouts=Replicate(), output_layouts=part)
        plan["position"] = Rows(input_layouts=Replicate(), output_layouts=Shard(0))
        plan |= {"norm": SequenceParallel(), "head": Columns(input_layouts=part, output_layouts=Replicate())}
    parallelize_module(model, mesh, plan)


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dimension change places over ``group``; so do their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


class Experts(nn.Module):
    """``experts`` MLPs in place of a block's one, [batch, seq, width] to the same; one of them serves a token.

    As the Switch Transformer (Fedus et al., JMLR 2022), without its balancing loss: the router's best expert takes a
    token unless it has ``capacity * seq / experts`` of that sequence already; the rest pass by on the residual. So a
    sequence's output depends on that sequence alone, and no shape on the data.

    Args:
        width: of the model; an expert is 4 times as wide inside.
        experts: how many there are.
        group: expert-parallel ranks: each holds its part of the experts, tokens travel to them and back by all-to-all,
            two in forward and two in backward. Its ranks read different data. ``None``: all experts here.
        capacity: room of an expert, in shares of what it gets when all get the same.

    Raises:
        ValueError: the ranks do not divide the experts.
    """

    up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self, width: int, experts: int, group: dist.ProcessGroup | None = None, capacity: float = 1.25
    ) -> None:
        super().__init__()
        self.experts, self.group, self.capacity = experts, group, capacity
        self.ranks = group.size() if group else 1
        if experts % self.ranks:
            raise ValueError(f"{experts} experts cannot be dealt to {self.ranks} ranks evenly")
        self.router = nn.Linear(width, experts, bias=False)
        held = torch.arange(experts).chunk(self.ranks)[group.rank() if group else 0]
        for name, shape in (("up", (width, 4 * width)), ("down", (4 * width, width))):
            weight = torch.empty(experts, *shape).normal_(std=0.02)  # all are drawn: the same whatever the group
            param = nn.Parameter(weight[held])
            if group:
                param.expert = True  # type: ignore[attr-defined]  # zero() shards it over ``expert_group``
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route, send, compute, send back, weigh by the router's probability."""
        batch, seq, width = x.shape
        room = math.ceil(self.capacity * seq / self.experts)
        gate, chosen = self.router(x).softmax(-1).max(-1)  # [batch, seq]
        picked = F.one_hot(chosen, self.experts)
        place = (picked.cumsum(1) * picked).sum(-1) - 1  # tokens before it in the sequence that chose the same
        fits = place < room
        slot = torch.where(fits, chosen * room + place, self.experts * room)[..., None].expand_as(x)
        slots = x.new_zeros(batch, self.experts * room + 1, width).scatter(1, slot, x)[:, :-1]
        sent = slots.view(batch, self.experts, room, width).transpose(0, 1).contiguous()
        come = self._exchange(sent).view(self.ranks, -1, batch * room, width).transpose(0, 1).flatten(1, 2)
        made = F.gelu(come @ self.up) @ self.down  # [experts here, tokens, width]
        back = made.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()
        slots = self._exchange(back).view(self.experts, batch, -1, width).transpose(0, 1).flatten(1, 2)
        out: torch.Tensor = F.pad(slots, (0, 0, 0, 1)).gather(1, slot) * gate[..., None]
        return out

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _AllToAll.apply(x, self.group) if self.group else x
        return moved
