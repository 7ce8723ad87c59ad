"""``zero()``: a model and an optimizer in, a ZeRO engine out. Stages 0 (plain data parallel), 1, 2 and 3."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Settings, Unit, find_units
from .parts import OptimizerOf, agree, group_of, parts_of, regroup, require_elementwise
from .reducer import Reducer
from .replicated import Replicated
from .sharded import Sharded


def zero(
    model: nn.Module,
    optimizer: OptimizerOf,
    *,
    stage: int,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    reduce_scatter_group: dist.ProcessGroup | None = None,
    elementwise: bool | None = None,
    **settings: Any,
) -> "Engine":
    """Make ``model`` train under ZeRO. The model is changed in place: its parameters become views of flat buffers.

    Args:
        model: any module, on its device, built alike on every rank (rank 0's values are broadcast). Shared, frozen
            and unused parameters are fine; its floating-point parameters become ``param_dtype``.
        optimizer: makes the optimizer from the module's trainable parameters, in groups or not:
            ``lambda params: torch.optim.AdamW(params, lr=1e-3)``. Each group then gets this rank's parts of its
            parameters, 1-D, in float32 or ``param_dtype`` if that has more digits. What no rank used in a step is not
            updated.
        stage: 0 replicates all; 1 shards optimizer states; 2 gradients as well; 3 parameters as well.
        group: the data-parallel ranks, default all.
        replicas: at stages 2 and 3, with ``group`` a node: the ranks that hold the same shards, one of each node
            (HSDP). Gradients are reduce-scattered in ``group``, then their shards all-reduced here, once a step.
        reduce_scatter_group: the ranks of ``group`` as a second communicator: NCCL runs what is on one in order, on two
            at once, so that a reduce-scatter does not hold up the gathers behind it.
        elementwise: whether the optimizer looks at each element by itself, as it must. ``None``: what its class says
            (``elementwise = True``), else those of torch that are known to.
        settings: any of the following, whose defaults are those of ``layout.Settings``.
        bucket_bytes: bytes that one reduction (stages 0-2) or gather (1-2) moves; at stage 3 it is the unit's size.
        prefetch: at stage 3, units gathered ahead of the one in use. Every rank calls the same units in the same order;
            what some ranks leave out is kept whole by ``hybrid`` or ``min_unit``.
        param_dtype: dtype of parameters, gradients and messages; not float16, which would need a scaled loss.
        gradient_accumulation: backward passes an optimizer step. Stages 0 and 1 add up full gradients and reduce once,
            2 and 3 reduce each pass and add up the shard, in the dtype of what the optimizer updates.
        max_norm: clip the global gradient norm to this.
        unit: ``"block"`` or ``"layer"``: what stage 3 gathers at once, see ``layout.find_units``.
        min_unit: modules outside the blocks with fewer elements are gathered with the root.
        hybrid: at stage 3, units below this many elements stay replicated, as at stage 2.
        keep_last: at stage 3, do not free what forward ends with and backward begins with: the last 1 + prefetch units
            and the root's. Saves their second gather at no more memory than backward's own look-ahead takes.
        reduce_dtype: dtype in which gradients are sent and summed, default the parameter's. float32 for bfloat16
            parameters doubles the bytes of each reduction, and those of the gradient shard.

    Returns:
        The engine: ``engine.backward(loss)`` and ``engine.step()`` in place of ``loss.backward()`` and
        ``optimizer.step()``.

    Raises:
        ValueError: on every rank alike, for a setting out of range, an optimizer that is not elementwise, a model
            without trainable parameters or with some that are in no group, and ranks whose models differ in names,
            shapes or groups.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20).
    """
    require_trainable(model)
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    require_elementwise(made, elementwise)
    checked = Settings(stage, **settings)
    if replicas and stage < 2:
        raise ValueError(f"replicas of shards exist at stages 2 and 3, not at {stage}")
    comm = Collectives(group, reduce_scatter_group, replicas)
    groups = group_of(made, model)
    comm.require_same([checked, *((n, p.shape, groups.get(n)) for n, p in model.named_parameters())])
    return Engine(model, made, comm, checked)


def require_trainable(model: nn.Module) -> None:
    """Raise ValueError where the model has no trainable parameter, or one of a kind that is not sharded."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    for name, p in trainable:
        if p.is_complex():
            cure = "hold its real and imaginary part (torch.view_as_real) as a parameter, or freeze it"
            raise ValueError(
                f"{name} is {str(p.dtype).removeprefix('torch.')}, and what trains is real: {cure}"
            )
        if hasattr(p, "device_mesh"):
            raise ValueError(
                f"{name} is a DTensor, cut up already: give zero() the model before anything cuts it"
            )


class Engine:
    """Made by ``zero()``. Holds the model, the optimizer over this rank's shards, and what moves between them."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comm: Collectives, settings: Settings
    ) -> None:
        self.model, self.optimizer, self.comm, self.settings = model, optimizer, comm, settings
        self.steps = 0  # with an update
        self.names = [name for name, _ in model.named_parameters()]
        self.params = list(model.parameters())
        self.shapes = [p.shape for p in self.params]
        for tensor in (*model.buffers(), *(p.detach() for p in self.params if not p.is_floating_point())):
            comm.broadcast(tensor)
        self.reducer = Reducer(comm, self.params, settings)
        small, large = list[Unit](), list[Unit]()
        for unit in find_units(model, settings.unit, settings.min_unit):
            numel = sum(self.shapes[i].numel() for i in unit.params)
            (small if settings.stage < 3 or numel < (settings.hybrid or 0) else large).append(unit)
        self.replicated, self.sharded = (
            Replicated(small, self.reducer),
            Sharded(large, self.reducer, self.names),
        )
        self._whole = False  # while ``state_dict`` gathers everything
        self._hook()
        self.buckets = [b for b in self.replicated.buckets + self.sharded.buckets if b.master is not None]
        self.owned = parts_of(self.buckets)
        regroup(optimizer, self.params, self.shapes, self.owned)

    def _hook(self) -> None:
        """Onto the model: waiting for parameters, begin and end of forward, and state dicts."""
        model = self.model
        if self.replicated.buckets and self.settings.stage:  # by module: what forward begins with waits least
            for u in find_units(model, "block", 1):
                u.module.register_forward_pre_hook(
                    lambda module, args, u=u: self.replicated.wait(u), prepend=True
                )
        model.register_forward_pre_hook(lambda module, args: self._begin_forward(), prepend=True)
        model.register_state_dict_pre_hook(self._before_state_dict)
        model.register_load_state_dict_pre_hook(self._before_loading)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps. After an error in it the engine stops.

        Raises:
            RuntimeError: it was called once a micro-batch already.
        """
        if self.reducer.micro_batch >= self.settings.gradient_accumulation:
            raise RuntimeError(
                f"backward was called {self.reducer.micro_batch} times in this step, which has as many micro-batches: "
                "add the losses up for one backward, or call engine.step() first"
            )
        n = self.settings.gradient_accumulation
        (loss if n == 1 else loss * (1.0 / n)).backward()

    def step(self) -> torch.Tensor | None:
        """Reduce, clip, update, publish. Does nothing before the last micro-batch of an accumulation.

        Returns:
            The global gradient norm (scalar, before clipping) with ``max_norm``, else ``None``.

        Raises:
            FloatingPointError: on every rank alike: the gradients are not finite. The weights are those of the step
                before.
            RuntimeError: backward failed in this step.
        """
        self.reducer.require_whole()
        if self.reducer.micro_batch < self.settings.gradient_accumulation:
            return None
        self.reducer.micro_batch = 0
        self.reducer.drain()
        buckets: Any = self.buckets
        exact = {b: b.grad_shard.to(b.master) for b in buckets}  # as the optimizer wants them, where it does
        for part in self.owned:
            part.param.grad = exact[part.bucket][part.piece.where]
        norm = agree(self.reducer, self.owned)
        finite = self.comm.backend == "fake" or math.isfinite(norm.item())
        if finite:
            self._update(norm)
        for part in self.owned:
            part.param.grad = None
        self.replicated.publish()
        self.sharded.publish()
        if not finite:
            raise FloatingPointError(
                f"the gradient is not finite at step {self.steps}: lower the learning rate, or look at the data"
            )
        self.steps += 1
        return norm if self.settings.max_norm is not None else None

    def synchronize(self) -> None:
        """Wait until all replicated parameters hold the last step's values; forward does this by itself."""
        self.replicated.wait()

    def state_dict(self) -> dict[str, Any]:
        """The model's own ``state_dict``, whole and copied to the CPU. It is a collective: call it on every rank."""
        self.synchronize()
        whole = self.sharded.copies()
        self._whole = True
        try:
            state = self.model.state_dict(keep_vars=True)
        finally:
            self._whole = False
        return {
            n: whole[id(t)] if id(t) in whole else t.detach().to("cpu", copy=True) for n, t in state.items()
        }

    def _before_state_dict(self, *_: Any) -> None:
        if self.sharded.units and not self._whole:
            raise RuntimeError(
                "at stage 3 the model holds none of its parameters: take engine.state_dict(), on every rank"
            )

    def _before_loading(self, *_: Any) -> None:
        if self.sharded.units or any(
            b.master is not None and b.master.dtype != b.full.dtype for b in self.buckets
        ):
            raise RuntimeError("the engine holds the weights: load a state dict before zero()")

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds at rest by component, padding included; what shares a storage counts once."""

        def size(tensors: Iterable[torch.Tensor]) -> int:
            return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

        states = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        buckets = self.replicated.buckets + self.replicated.frozen + self.sharded.buckets
        weights = [t for b in buckets for t in (b.full, b.shard)]
        masters = size([*weights, *(b.master for b in self.buckets if b.master is not None)]) - size(weights)
        return {
            "weights": size(weights),
            "gradients": size(t for b in self.buckets for t in (b.grads, b.grad_shard) if t is not None),
            "optimizer": masters + size(s for s in states if s.dim()),
        }

    def _begin_forward(self) -> None:
        self.reducer.require_whole()
        self.sharded.begin_forward()

    def _update(self, norm: torch.Tensor) -> None:
        """Clip, step."""
        most = self.settings.max_norm
        grads = [part.param.grad for part in self.owned if part.param.grad is not None]
        if grads and most is not None:
            torch._foreach_mul_(grads, torch.clamp(most / (norm + 1e-6), max=1.0))
        self.optimizer.step()
