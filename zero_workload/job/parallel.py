"""What a job cuts up besides the batch: its ranks, matrices (tensor parallelism) and the sequence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Cut:
    """How ``ranks`` share a job. Those that share matrices lie next to each other, then those that share experts, then
    those that share the rest of the model; its replicas lie apart.

    Args:
        ranks: all of them.
        shard: ranks over which ZeRO shards, in each replica; 0: all that tensor parallelism leaves.
        tensor: ranks that share each matrix.
        experts: of the ranks of a shard, those that share the experts.
        apart: reduce-scatters have a communicator of their own.

    Raises:
        ValueError: the numbers do not divide each other.
    """

    ranks: int
    shard: int = 0
    tensor: int = 1
    experts: int = 1
    apart: bool = False

    def __post_init__(self) -> None:
        shard, replicas = self.shape[1] * self.experts, self.shape[0]
        if replicas * shard * self.tensor != self.ranks:
            shared = f"{self.tensor} that share matrices (tensor parallelism)"
            sharded = f"{self.shard or 'those'} that shard (HSDP), a multiple of {self.experts} that share experts"
            raise ValueError(f"{self.ranks} ranks are not {shared} times {sharded}, times replicas")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Replicas, ranks that hold the same experts, ranks that share them, ranks that share matrices."""
        shard = self.shard or self.ranks // self.tensor
        return self.ranks // max(1, shard * self.tensor), shard // self.experts, self.experts, self.tensor

    def groups(self) -> dict[str, Any]:
        """New communicators by the names of ``zero``'s arguments, where it needs them; ``tensor`` and ``experts`` are
        the model's. Every rank has to call it.
        """
        n_replicas, _, n_experts, n_tensor = self.shape
        dims: dict[str, tuple[int, ...]] = {
            **({"group": (1, 2)} if n_replicas * n_tensor > 1 else {}),
            **({"reduce_scatter_group": (1, 2)} if self.apart else {}),
            **({"replicas": (0,)} if n_replicas > 1 else {}),
            **({"expert_group": (1,), "experts": (2,)} if n_experts > 1 else {}),
            **({"tensor": (3,)} if n_tensor > 1 else {}),
        }
        return {name: subgroup(self.shape, *along) for name, along in dims.items()}


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
    from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module
    from torch.distributed.tensor.parallel import RowwiseParallel as Rows

    config: Any = model.config
    if config.experts:
        raise ValueError("experts are not cut by tensor parallelism: take one of the two")
    for name, n in {"heads": config.heads, **({"seq": config.seq} if sequence else {})}.items():
        if n % mesh.size():
            raise ValueError(f"{name} is {n}: not a multiple of {mesh.size()} tensor-parallel ranks")
    part: Any = Shard(1) if sequence else Replicate()  # of [batch, seq, width], between attention and MLP
    plan: dict[str, Any] = {}
    for name, _ in model.named_modules():
        match name.rpartition(".")[2]:
            case "attention" | "mlp":  # gathered, and its gradient summed, once for all that reads it
                plan[name] = PrepareModuleInput(input_layouts=part, desired_input_layouts=Replicate())
            case "qkv" | "q" | "k" | "v" | "gate" | "up":
                plan[name] = Columns()
            case "out" | "down":
                plan[name] = Rows(output_layouts=part)
            case "norm1" | "norm2" | "norm" if sequence:
                plan[name] = SequenceParallel()
    if sequence:
        plan["embed"] = Rows(input_layouts=Replicate(), output_layouts=part)
        if model.position is not None:
            plan["position"] = Rows(input_layouts=Replicate(), output_layouts=Shard(0))
        plan["head"] = Columns(input_layouts=part, output_layouts=Replicate())
    parallelize_module(model, mesh, plan)
