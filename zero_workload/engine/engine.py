"""``zero()``: a model and an optimizer in, a ZeRO engine out. Stages 0 (plain data parallel), 1, 2 and 3."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ..buffers.comm import Collectives
from ..buffers.layout import Bucket
from ..buffers.settings import Settings
from .agreement import agree
from .awaited import Awaited
from .checkpoint import load, save
from .outside import Hook, Outside
from .parts import OptimizerOf, group_of, masters, needs_matrices, parts_of, regroup
from .reducer import Reducer
from .replicated import Replicated
from .scale import LossScale
from .sharded import Sharded, explained
from .units import Unit, find_units


def zero(
    model: nn.Module,
    optimizer: OptimizerOf,
    *,
    stage: int,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    reduce_scatter_group: dist.ProcessGroup | None = None,
    model_group: dist.ProcessGroup | None = None,
    elementwise: bool | None = None,
    bucket_bytes: int = Settings.bucket_bytes,
    prefetch: int = Settings.prefetch,
    param_dtype: torch.dtype | None = None,
    gradient_accumulation: int = Settings.gradient_accumulation,
    max_norm: float | None = None,
    unit: Literal["block", "layer"] = "block",
    min_unit: int = Settings.min_unit,
    hybrid: int | None = None,
    keep_last: bool = Settings.keep_last,
    reduce_dtype: torch.dtype | None = None,
    classic: bool = False,
    offload: bool = False,
    loss_scale: float = Settings.loss_scale,
) -> "Engine":
    """Make ``model`` train under ZeRO. The model is changed in place: its parameters become views of flat buffers.

    Args:
        model: any module, on its device, built alike on every rank (rank 0's values are broadcast). Shared, frozen and
            unused parameters are fine; its floating-point parameters become ``param_dtype``.
        optimizer: makes the optimizer from the module's trainable parameters: ``lambda params:
            torch.optim.AdamW(params, lr=1e-3)``. Each group gets this rank's parts of its parameters, 1-D (a 0-dim one
            stays so), in float32 or ``param_dtype`` if that has more digits. A parameter that no rank used in a step is
            not updated. torch.optim.Muon keeps whole matrices, at stages 0 and 1.
        stage: 0 replicates all; 1 shards optimizer states; 2 gradients as well; 3 parameters as well.
        group: the data-parallel ranks, default all.
        replicas: at stages 2 and 3, with ``group`` a node: the ranks that hold the same shards (HSDP): the shards of
            gradients are all-reduced here, once a step.
        reduce_scatter_group: ``group`` as a second communicator, so that reduce-scatters do not hold up gathers.
        model_group: the ranks that hold the rest of the model, in tensor or pipeline parallelism: they share the norm.
            A parameter may say ``model_copies = n``: n of them hold it; ``is_part = True``: part of a matrix.
        elementwise: whether the optimizer looks at each element by itself. ``None``: what its class says (``elementwise
            = True``), else those of torch that are known to.
        bucket_bytes: bytes that one reduction (stages 0-2) or gather (1-2) moves; stage 3: the unit's size.
        prefetch: at stage 3, units gathered ahead. Every rank calls the same units in the same order; ``hybrid`` or
            ``min_unit`` keep whole what some ranks leave out.
        param_dtype: dtype of parameters, gradients and messages. Default bfloat16, for a model in float32 or bfloat16;
            others must say it. float16 scales the loss.
        gradient_accumulation: backward passes an optimizer step. Stages 0 and 1 add up full gradients and reduce once,
            2 and 3 reduce each pass and add up the shard, in the optimizer's dtype.
        max_norm: clip the global gradient norm to this.
        unit: ``"block"`` or ``"layer"``: what stage 3 gathers at once, see ``units.find_units``.
        min_unit: modules outside the blocks with fewer elements are gathered with the root.
        hybrid: at stage 3, units below this many elements stay replicated, as at stage 2.
        keep_last: at stage 3, keep the last 1 + prefetch units and the root's for backward: no second gather.
        reduce_dtype: dtype in which gradients are sent and summed, default the parameter's.
        classic: at stage 1, all-reduce the gradients instead, as the first ZeRO code: half as many bytes again.
        offload: keep master weights and optimizer states in host memory, and step there.
        loss_scale: with float16, the first scale of the loss. It halves, and all ranks skip the step, when a gradient
            is not finite; it doubles after 2,000 good steps.

    Returns:
        The engine. Its ``backward(loss)`` and ``step()`` replace ``loss.backward()`` and ``optimizer.step()``.

    Raises:
        ValueError: on every rank alike: a setting out of range, an optimizer that the stage cannot serve, a model
            without trainable parameters or with some that are in no group, one that is wrapped or has an engine, sparse
            gradients, a dtype that must be said, ranks whose models differ in names, shapes or groups.
        TypeError: ``optimizer`` is an optimizer, not what makes one.

    Source: Rajbhandari et al., ZeRO (SC20).
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(
            f"optimizer is what makes one from parameters: pass lambda params: {kind}(params, ...), not made {kind}"
        )
    _require_plain(model)
    _require_trainable(model)
    checked = Settings(
        stage,
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        param_dtype=param_dtype or _half_of(model),
        gradient_accumulation=gradient_accumulation,
        max_norm=max_norm,
        unit=unit,
        min_unit=min_unit,
        hybrid=hybrid,
        keep_last=keep_last,
        reduce_dtype=reduce_dtype,
        classic=classic,
        offload=offload,
        loss_scale=loss_scale,
    )
    if replicas and stage < 2:
        raise ValueError(f"replicas of shards exist at stages 2 and 3, not at {stage}")
    comm = Collectives(group, reduce_scatter_group, replicas, model_group)
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    whole = needs_matrices(made, elementwise, stage)
    groups = group_of(made, model)
    about = [(name, p.shape, groups.get(name)) for name, p in model.named_parameters()]
    comm.require_same([checked, *about])
    return Engine(model, made, comm, checked, whole)


def _require_plain(model: nn.Module) -> None:
    """Raise ValueError where something else reduces the model's gradients, or makes them in another form."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"{kind} reduces gradients itself: give zero() the model in it (model.module)")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{name or kind} makes sparse gradients, which ZeRO cannot cut: make it with sparse=False"
            )
        if any(isinstance(hook, Hook) for hook in module._forward_pre_hooks.values()):
            raise ValueError("the model has an engine already: go on with that one, or build the model anew")


def _require_trainable(model: nn.Module) -> None:
    """Raise ValueError where the model has no trainable parameter, or one of a kind that is not sharded."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter")
    for name, p in trainable:
        kind = str(p.dtype).removeprefix("torch.")
        if p.is_complex():
            cure = "hold its real and imaginary part (torch.view_as_real) as a parameter, or freeze it"
            raise ValueError(f"{name} is {kind}, and what trains is real: {cure}")
        if hasattr(p, "device_mesh"):
            cure = "give zero() the model before anything cuts it, or use job.tensor's layers and model_group"
            raise ValueError(f"{name} is a DTensor, cut up already: {cure}")


def _half_of(model: nn.Module) -> torch.dtype:
    """bfloat16, if no other dtype would be lost without a word. Raises ValueError."""
    floating = [(name, p.dtype) for name, p in model.named_parameters() if p.is_floating_point()]
    first = floating[0][1]
    for name, dtype in floating:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name} is {dtype}: say param_dtype={dtype}, or the dtype that all parameters become"
            )
        if dtype != first:
            both = f"{name} is {dtype} and {floating[0][0]} is {first}"
            raise ValueError(f"{both}: say param_dtype=..., the dtype that all parameters become")
    return torch.bfloat16


class Engine:
    """Made by ``zero()``. Holds the model, the optimizer over this rank's shards, and what moves between them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        comm: Collectives,
        settings: Settings,
        whole: bool,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.comm, self.settings = comm, settings
        self.steps = 0  # with an update
        self.scale = LossScale(settings.loss_scale, settings.scaled)
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.shapes = [p.shape for p in self.params]
        others = [p.detach() for p in self.params if not p.is_floating_point()]
        for tensor in (*model.buffers(), *others):
            comm.broadcast(tensor)
        self.reducer = Reducer(comm, self.params, settings, whole)
        small, large = self._split_units()
        self.replicated = Replicated(small, self.reducer, alone=not large)
        self.sharded = Sharded(large, self.reducer, self.names)
        self.owned = parts_of(self.buckets, self.shapes, whole)
        regroup(optimizer, self.params, self.names, self.shapes, self.owned)
        private = settings.stage > 0 or self._masters_apart
        self.outside = Outside(self.params, self.names, private, fixed=not self.sharded.units)
        self._hook()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that are trained, those of whole units first."""
        return [b for b in self.replicated.buckets + self.sharded.buckets if b.master is not None]

    def _split_units(self) -> tuple[list[Unit], list[Unit]]:
        """Units that stay whole, and those that are sharded."""
        settings = self.settings
        whole, sharded = list[Unit](), list[Unit]()
        for unit in find_units(self.model, settings.unit, settings.min_unit):
            numel = sum(self.shapes[i].numel() for i in unit.params)
            small = settings.stage < 3 or numel < (settings.hybrid or 0)
            (whole if small else sharded).append(unit)
        return whole, sharded

    @property
    def _masters_apart(self) -> bool:
        """Whether the model's own parameters are a rounded copy, or not all there."""
        if self.sharded.units or self.settings.offload:
            return True
        return self.settings.master != self.settings.param_dtype

    @property
    def all_buckets(self) -> list[Any]:
        """Those of frozen parameters too."""
        return self.replicated.buckets + self.replicated.frozen + self.sharded.buckets

    def _hook(self) -> None:
        """Onto the model: waiting for parameters, begin and end of forward, and state dicts."""
        model, self._whole = self.model, False  # while ``state_dict`` gathers everything
        if self.replicated.buckets and self.settings.stage:  # by module: the first ones wait least
            for unit in find_units(model, "block", 1):
                waits = Hook(self._waiting_for(unit))
                unit.module.register_forward_pre_hook(waits, prepend=True)
        model.register_forward_pre_hook(Hook(lambda module, args: self._begin_forward()), prepend=True)
        model.register_state_dict_pre_hook(Hook(self._before_state_dict))
        model.register_load_state_dict_pre_hook(Hook(self._before_loading))
        model.register_load_state_dict_post_hook(Hook(lambda module, keys: self.outside.settle()))
        self.reducer.at_end.append(self._after_backward)
        self.outside.watch(self.optimizer)

    def _waiting_for(self, unit: Unit) -> Any:
        return lambda module, args: self.replicated.wait(unit)

    def _begin_forward(self) -> None:
        self.outside.require_kinds()
        self.reducer.require_whole()
        self.sharded.begin_forward()

    def _after_backward(self) -> None:
        if self.reducer.in_last and self.comm.backend != "fake":
            self.outside.take_gradients()

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps. After an error in it the engine stops.

        Raises:
            RuntimeError: it was called once a micro-batch already.
        """
        self.reducer.require_room()
        with self.scaling() as factor:
            scaled = loss * factor
            scaled.register_hook(lambda grad: self.reducer.begin_backward())  # in the outermost pass
            scaled.backward()

    @contextmanager
    def scaling(self) -> Iterator[float]:
        """For a pipeline's schedule, which calls backward itself: inside, each micro-batch's loss is multiplied by the
        factor that this gives, the loss scale divided by the accumulation steps.
        """
        self.reducer.by_engine = True
        try:
            yield self.scale.value / self.settings.gradient_accumulation
        finally:
            self.reducer.by_engine = False

    def step(self) -> torch.Tensor | None:
        """Reduce, clip, update, publish. Does nothing before the last micro-batch of an accumulation.

        With float16 a gradient beyond its range skips the update on all ranks, and halves ``scale.value``.

        Returns:
            The global gradient norm (scalar, before clipping) with ``max_norm``, else ``None``.

        Raises:
            FloatingPointError: on every rank alike: the gradients are not finite. The weights stay.
            RuntimeError: backward failed in this step, or parameters were changed outside of the engine.
        """
        self.reducer.require_whole()
        self.outside.require_untouched()
        if self.reducer.micro_batch < self.settings.gradient_accumulation:
            return None
        self.reducer.micro_batch = 0
        with explained("a reduction") if self.sharded.units else nullcontext():
            self.reducer.drain()
            self._show_gradients()
            norm = agree(self.reducer, self.owned, self.sharded.digest) / self.scale.value
        finite = self.comm.backend == "fake" or math.isfinite(norm.item())
        if finite:
            self._update(norm)
        for part in self.owned:
            part.param.grad = None
        self.publish()
        if not finite and not self.scale.overflowed():
            scale = "at the least loss scale, " if self.scale.dynamic else ""
            raise FloatingPointError(
                f"the gradient is not finite at step {self.steps}: {scale}lower the learning rate, or look at the data"
            )
        if finite:
            self.steps += 1
            self.scale.updated()
        return norm if self.settings.max_norm is not None else None

    def _show_gradients(self) -> None:
        """Give each part of this rank its reduced gradient, as the optimizer wants it."""
        exact: dict[Any, torch.Tensor] = {}
        for bucket in self.buckets:
            assert bucket.grad_shard is not None and bucket.master is not None
            exact[bucket] = bucket.grad_shard.to(bucket.master)
        for bucket, piece, param in self.owned:
            param.grad = exact[bucket][piece.where].view(param.shape)

    def _update(self, norm: torch.Tensor) -> None:
        """Undo the loss scale, clip, step."""
        limit = self.settings.max_norm
        factor: Any = 1.0 / self.scale.value
        if limit is not None:
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0) * factor
        grads = [part.param.grad for part in self.owned if part.param.grad is not None]
        if grads and (limit is not None or self.scale.dynamic):
            moved = factor.to(grads[0].device) if isinstance(factor, torch.Tensor) else factor
            torch._foreach_mul_(grads, moved)
        self.outside.stepping = True
        try:
            self.optimizer.step()
        finally:
            self.outside.stepping = False

    def publish(self) -> None:
        """Round the master weights into what is gathered, and start to gather."""
        self.outside.give_gradients()
        self.replicated.publish()
        self.sharded.publish()
        self.outside.settle()

    def synchronize(self) -> None:
        """Wait until all replicated parameters hold the last step's values. The first use of each does so by itself.
        Call this before uses that PyTorch hides: ``torch.func``, ``p.as_subclass``, ``torch.tensor(p)``, C++ code.
        """
        self.replicated.wait()

    def state_dict(self) -> dict[str, Any]:
        """The model's own ``state_dict``, whole and copied to the CPU. It is a collective: call it on every rank."""
        self.synchronize()
        return self._with(self.sharded.copies())

    def full_state(self) -> dict[str, Any]:
        """As ``state_dict``, but with the exact (float32) values of the master weights, and on the first rank of the
        group only: the others get an empty dictionary. It is a collective: call it on every rank.
        """
        self.synchronize()
        exact = masters(self)
        return {} if self.comm.rank else self._with(exact)

    def _with(self, values: dict[int, torch.Tensor]) -> dict[str, Any]:
        """The model's own state dict, copied to the CPU, while its parameters hold ``values`` (by index): so hooks of
        the user's modules see what they would see without an engine.
        """
        hidden = [index for index in values if type(self.params[index]) is Awaited]
        before = {}
        self._whole = True
        try:
            for index, value in values.items():
                Awaited.clear(self.params[index])
                before[index] = self.params[index].data
                self.params[index].data = value
            state = self.model.state_dict()
        finally:
            self._whole = False
            for index, data in before.items():
                self.params[index].data = data
            for index in hidden:
                self.sharded.hide(index)
        mine = {value.data_ptr() for value in values.values()}
        found = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                value = value.detach().to("cpu", copy=value.data_ptr() not in mine)
            found[name] = value
        return found

    def save(self, folder: Path | str) -> None:
        """Write weights, optimizer and counters into ``folder``, on all ranks together. Raises OSError."""
        save(self, Path(folder))

    def load(self, folder: Path | str) -> None:
        """Read what ``save`` wrote, at any stage and on any number of ranks; on all ranks together.

        Raises:
            ValueError: there is none, or it is of another model or optimizer.
        """
        load(self, Path(folder))

    def _before_state_dict(self, *_: Any) -> None:
        self.synchronize()
        if self.sharded.units and not self._whole:
            raise RuntimeError(
                "at stage 3 the model holds none of its parameters: take engine.state_dict(), on every rank"
            )

    def _before_loading(self, *_: Any) -> None:
        if self._masters_apart:
            raise RuntimeError("the engine holds the weights: load a state dict before zero()")
        self.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds at rest by component, padding included; what shares a storage counts once.

        With ``offload`` the optimizer's bytes are ``host``'s.
        """
        weights = [t for b in self.all_buckets for t in (b.full, b.shard)]
        masters = [b.master for b in self.buckets]
        gradients = [t for b in self.buckets for t in (b.grads, b.grad_shard)]
        apart = _bytes([*weights, *masters]) - _bytes(weights)
        optimizer = apart + _bytes(self._states())
        held = {"weights": _bytes(weights), "gradients": _bytes(gradients), "optimizer": optimizer}
        if self.settings.offload:
            held |= {"optimizer": 0, "host": optimizer}
        return held

    def _states(self) -> Iterator[torch.Tensor]:
        """The optimizer's states that grow with the parameters: numbers like its step are left out."""
        for state in self.optimizer.state.values():
            yield from (t for t in state.values() if isinstance(t, torch.Tensor) and t.dim())


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
