"""The library implementations behind the engine's two calls, so that the same job can run on either."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dynamiccl.zero_workload.buffers.settings import Settings
from dynamiccl.zero_workload.engine.parts import OptimizerOf
from torch import nn

#: Peer -> the ZeRO stage that it is a peer of.
PEERS = {"ddp": 0, "zero-optimizer": 1, "fsdp2-no-reshard": 2, "fsdp2": 3}


def mesh_of(groups: dict[str, Any]) -> Any:
    """FSDP2's mesh of two dimensions, replicas first, of what ``groups`` has returned; ``None`` without replicas."""
    if "replicas" not in groups:
        return None
    both = [groups["replicas"], groups["group"]]
    ranks = torch.arange(dist.get_world_size()).view(both[0].size(), -1)
    return dist.device_mesh.DeviceMesh.from_group(both, "cpu", ranks, mesh_dim_names=("replicas", "group"))


class Peer:
    """``model`` under a library's data parallelism: ``backward(loss)`` and ``step()`` as the engine's.

    Args:
        name: one of ``PEERS``.
        model: a ``Transformer``; at FSDP2 each of its blocks is a unit, as at our stage 3.
        optimizer: makes the optimizer from parameters.
        mesh: FSDP2's device mesh; ``None``: all ranks; two dimensions: replicated over the first, sharded in the other.
        apart: FSDP2's reduce-scatters have a communicator of their own.
        settings: those of ``zero()`` that the libraries have too: ``param_dtype``, at FSDP2 that of parameters in use;
            ``bucket_bytes`` of DDP; ``max_norm``; ``gradient_accumulation``, gradients are reduced in each pass; and
            FSDP2's ``reduce_dtype``.

    Raises:
        ValueError: an unknown name, a setting out of range, or one that this torch has not.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: OptimizerOf,
        mesh: Any = None,
        apart: bool = False,
        **settings: Any,
    ) -> None:
        if name not in PEERS:
            raise ValueError(f"a peer is one of {', '.join(PEERS)}, not {name!r}")
        self.model, self.settings = model, Settings(PEERS[name], **settings)
        dtype, fsdp2 = self.settings.param_dtype, name.startswith("fsdp2")
        if not fsdp2 and (mesh or apart or self.settings.wire != dtype):
            raise ValueError(
                f"meshes, a reduce_dtype and a communicator of their own are FSDP2's: {name} has none"
            )
        if fsdp2:  # imported where used: it takes seconds
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.settings.wire)
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "fsdp2")
            root: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
            if apart and not hasattr(root, "set_separate_reduce_scatter_group"):
                raise ValueError(
                    f"FSDP2 of torch {torch.__version__} has one communicator; since 2.13 it can have two"
                )
            if apart:
                root.set_separate_reduce_scatter_group()
        else:
            cap = self.settings.bucket_bytes / 2**20
            ddp = nn.parallel.DistributedDataParallel
            self.model = ddp(model.to(dtype), bucket_cap_mb=cap, gradient_as_bucket_view=True)
        make: Any = optimizer
        if name == "zero-optimizer":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            make = partial(ZeroRedundancyOptimizer, optimizer_class=make, parameters_as_bucket_view=True)
        self.optimizer: torch.optim.Optimizer = make(list(model.parameters()))

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps."""
        (loss / self.settings.gradient_accumulation).backward()

    def step(self) -> torch.Tensor | None:
        """Clip, update, forget the gradients; called after the last micro-batch. Returns the norm if clipping."""
        norm = None
        if self.settings.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm
