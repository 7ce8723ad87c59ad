"""``zero()``: a model and an optimizer in, a ZeRO engine out. Stages 0 (plain data parallel), 1, 2 and 3."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import MIN_UNIT, Bucket, Settings, find_units, storage_bytes
from .reducer import Reducer
from .replicated import Replicated
from .sharded import Sharded

#: torch's own optimizers that look at a parameter as a whole and not at each element by itself.
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def zero(
    model: nn.Module,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    stage: int,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 25 * 2**20,
    prefetch: int | str = 1,
    param_dtype: torch.dtype = torch.bfloat16,
    master_dtype: torch.dtype = torch.float32,
    reduce_op: str = "mean",
    gradient_accumulation: int = 1,
    max_norm: float | None = None,
    unit: str = "block",
    hybrid: int | None = None,
    classic: bool = False,
    keep_last: bool = True,
    loss_scale: float = 2.0**16,
    min_unit: int = MIN_UNIT,
) -> Engine:
    """Make ``model`` train under ZeRO. The model is changed in place: its parameters become views of flat buffers.

    Args:
        model: any module, on its device, built alike on every rank (rank 0's values are broadcast). Shared, frozen
            and unused parameters are fine, DTensors are not; its floating-point parameters become ``param_dtype``.
        optimizer: makes the optimizer from a list of flat shards, 1-D parameters of ``master_dtype``, one a bucket:
            ``lambda shards: torch.optim.AdamW(shards, lr=1e-3)``. An optimizer that is not elementwise (its class
            says ``elementwise = False``) gets whole parameters instead, and runs at stages 0 and 1 only.
        stage: 0 replicates all; 1 shards optimizer states; 2 gradients as well; 3 parameters as well.
        group: the data-parallel ranks, default all.
        bucket_bytes: bytes that one reduction (stages 0-2) or gather (1-2) moves; at stage 3 it is the unit's size.
        prefetch: at stage 3, units gathered ahead of the one in use, or ``"auto"``: look-ahead
            k* = ceil(T_gather / T_compute), measured in the second step, agreed by all ranks, see ``Engine.prefetch``.
        param_dtype: dtype of parameters, gradients and messages. float16 turns dynamic loss scaling on.
        master_dtype: dtype of the shards that the optimizer updates.
        reduce_op: ``"mean"`` or ``"sum"`` over the ranks.
        gradient_accumulation: backward passes an optimizer step. Stages 0 and 1 add up full gradients and reduce once,
            2 and 3 reduce each pass and add up the shard, in ``master_dtype``.
        max_norm: clip the global gradient norm to this.
        unit: ``"block"`` or ``"layer"``: what stage 3 gathers at once, see ``layout.find_units``.
        hybrid: at stage 3, units below this many elements stay replicated, as at stage 2.
        classic: stage 1 all-reduces gradients, as its first descriptions did (3/2 of the traffic).
        keep_last: at stage 3, do not free what forward ends with and backward begins with: the last 1 + prefetch units
            and the root's. Saves their second gather at no more memory than backward's own look-ahead takes.
        loss_scale: the first loss scale at float16.
        min_unit: modules outside the blocks below this many elements join the root's unit.

    Returns:
        The engine: ``engine.backward(loss)`` and ``engine.step()`` in place of ``loss.backward()`` and
        ``optimizer.step()``.

    Raises:
        ValueError: on every rank alike, for a setting out of range, an optimizer that is not elementwise at stage 2
            or 3, a model without trainable parameters, and ranks whose models differ in names, shapes or dtypes.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20).
    """
    settings = Settings(
        stage, bucket_bytes, prefetch, param_dtype, master_dtype, gradient_accumulation, max_norm,
        unit, hybrid, classic, keep_last, loss_scale, min_unit, whole_params=not _is_elementwise(optimizer),
    )  # fmt: skip
    _check(model, settings)
    comm = Collectives(group, reduce_op)
    shape = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    comm.require_same(zlib.crc32(repr((shape, settings)).encode()), "a model or settings")
    return Engine(model, optimizer, comm, settings)


def _check(model: nn.Module, settings: Settings) -> None:
    s = settings
    if s.stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is 0, 1, 2 or 3, not {s.stage!r}")
    if s.prefetch != "auto" and (not isinstance(s.prefetch, int) or s.prefetch < 0):
        raise ValueError(f"prefetch is a number from 0 up or 'auto', not {s.prefetch!r}")
    if s.gradient_accumulation < 1 or s.bucket_bytes < 1:
        raise ValueError("gradient_accumulation and bucket_bytes start at 1")
    if s.classic and s.stage != 1:
        raise ValueError("the classic form exists at stage 1 only")
    if s.hybrid is not None and s.stage != 3:
        raise ValueError("hybrid is for stage 3: it says which units stay replicated")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter")
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise ValueError("the model has tensor-parallel parameters (DTensor): zero() shards plain ones only")
    if s.whole_params and s.stage >= 2:
        raise ValueError(f"stage {s.stage} cuts gradients up, and this optimizer needs whole matrices: use stage 1")


def _is_elementwise(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> bool:
    """Ask a throw-away instance: a callable does not tell the class that it makes."""
    kind = type(optimizer([nn.Parameter(torch.zeros(2, 2))]))
    return bool(getattr(kind, "elementwise", kind.__name__ not in _NOT_ELEMENTWISE))


class Engine:
    """Made by ``zero()``. Holds the model, the optimizer over this rank's shards, and what moves between them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        comm: Collectives,
        settings: Settings,
    ) -> None:
        self.model, self.comm, self.settings, self.stage = model, comm, settings, settings.stage
        self.loss_scale = settings.loss_scale if settings.param_dtype == torch.float16 else None
        self.skipped, self._good_steps, self.micro_batch, self._in_backward = 0, 0, 0, False
        self.names, self.params = [n for n, _ in model.named_parameters()], list(model.parameters())
        self.reducer = Reducer(comm, self.params, settings)
        for index, param in enumerate(self.params):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._on_grad, index))
        for buffer in model.buffers():
            comm.broadcast(buffer)
        units = find_units(model, settings.unit, settings.min_unit)
        small = [
            u for u in units if self.stage < 3 or sum(self.params[i].numel() for i in u.params) < (settings.hybrid or 0)
        ]
        kept = [i for u in small for i in u.params]
        self.replicated = Replicated(
            comm, self.params, [i for i in kept if self.params[i].requires_grad], settings, self.reducer
        )
        for index in kept:
            if not self.params[index].requires_grad and self.params[index].is_floating_point():
                comm.broadcast(self.params[index].data)
                self.params[index].data = self.params[index].data.to(settings.param_dtype)
        self.sharded = Sharded(
            comm, self.params, [u for u in units if u not in small], settings, self.reducer, self._begin_backward
        )
        if self.replicated.buckets and self.stage:
            for u in units:
                u.module.register_forward_pre_hook(lambda module, args, u=u: self.replicated.wait(u), prepend=True)
        model.register_forward_pre_hook(lambda module, args: self._begin_forward(), prepend=True)
        self.buckets = [b for b in self.replicated.buckets + self.sharded.buckets if b.master is not None]
        self._owned = [pair for bucket in self.buckets for pair in self._split(bucket)]
        self.optimizer = optimizer([param for _, _, param in self._owned])

    @property
    def prefetch(self) -> int:
        """Units gathered ahead at stage 3; with ``"auto"`` what was chosen, 1 before that."""
        return self.sharded.prefetch

    # One training step ---------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps and multiplied by the loss scale."""
        factor = (self.loss_scale or 1.0) / self.settings.gradient_accumulation
        (loss if factor == 1.0 else loss * factor).backward()

    def step(self) -> torch.Tensor | None:
        """Reduce, clip, update, publish. Does nothing before the last micro-batch of an accumulation.

        Returns:
            The global gradient norm (scalar, of the unscaled gradient before clipping) where it is computed, that is
            with ``max_norm`` or float16, else ``None``. At float16 it is not finite when an overflow made every rank
            skip the update; the scale is halved then.
        """
        if self.micro_batch < self.settings.gradient_accumulation:
            return None
        self.micro_batch = 0
        self.reducer.drain()
        for bucket, part, param in self._owned:
            assert bucket.grad_shard is not None
            param.grad = bucket.grad_shard[part].view(param.shape).to(param.dtype)
        norm = None
        if self.settings.max_norm is not None or self.loss_scale is not None:
            norm = self._unscale_and_clip()
        if norm is None or self.loss_scale is None or self._no_overflow(norm):
            self.optimizer.step()
        for _, _, param in self._owned:
            param.grad = None
        self.replicated.publish()
        self.sharded.publish()
        return norm

    def synchronize(self) -> None:
        """Wait until all replicated parameters hold the last step's values; forward does this by itself."""
        self.replicated.wait()

    def memory(self) -> dict[str, int]:
        """Bytes this rank holds at rest, by component; storages are counted once, padding included."""
        states = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        replicated = [self.replicated.arena, *(p for p in self.params if p.numel())]
        weights = [*replicated, *(b.full for b in self.sharded.buckets), *(b.shard for b in self.sharded.buckets)]
        grads = [t for b in self.buckets for t in (b.grads, b.grad_shard) if t is not None]
        masters = [b.master for b in self.buckets if b.master is not None]
        total = storage_bytes([*weights, *masters])
        return {
            "weights": storage_bytes(weights),
            "gradients": storage_bytes(grads),
            "optimizer": total - storage_bytes(weights) + storage_bytes([s for s in states if s.dim()]),
        }

    # Inside --------------------------------------------------------------------------------------------------------

    def _split(self, bucket: Bucket) -> list[tuple[Bucket, slice, nn.Parameter]]:
        """What the optimizer gets of ``bucket``: its flat shard, or views of this rank's whole parameters in it."""
        assert bucket.master is not None
        if not self.settings.whole_params:
            return [(bucket, slice(None), bucket.master)]
        owned, parts = bucket.owned(self.comm.rank, self.comm.size), []
        for piece in bucket.pieces:
            if owned.start <= piece.offset < owned.stop:
                part = slice(piece.offset - owned.start, piece.offset - owned.start + piece.numel)
                view = bucket.master.detach()[part].view(self.params[piece.param].shape)
                parts.append((bucket, part, nn.Parameter(view)))
        return parts

    def _unscale_and_clip(self) -> torch.Tensor:
        grads = [param.grad for _, _, param in self._owned if param.grad is not None]
        squares: Sequence[torch.Tensor] = torch._foreach_norm(grads) if grads else ()
        device = self.params[0].device
        total = torch.stack([s.float().square() for s in squares]).sum() if grads else torch.zeros((), device=device)
        if self.stage:  # each rank saw its own shards; stage 0 has all of them everywhere
            self.comm.all_reduce(total, dist.ReduceOp.SUM).wait()
        norm = total.sqrt() / (self.loss_scale or 1.0)
        factor = torch.ones_like(norm) / (self.loss_scale or 1.0)
        if self.settings.max_norm is not None:
            factor = factor * torch.clamp(self.settings.max_norm / (norm + 1e-6), max=1.0)
        if grads:
            torch._foreach_mul_(grads, factor)
        return norm

    def _no_overflow(self, norm: torch.Tensor) -> bool:
        """The norm is the same number on every rank, so all of them skip or none does."""
        assert self.loss_scale is not None
        if not math.isfinite(norm.item()):
            self.loss_scale, self._good_steps, self.skipped = self.loss_scale / 2, 0, self.skipped + 1
            return False
        self._good_steps += 1
        if self._good_steps % 2000 == 0:
            self.loss_scale *= 2
        return True

    def _begin_forward(self) -> None:
        self._in_backward = self.sharded.in_backward = False
        self.sharded.begin_forward()

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = self.sharded.in_backward = True
        self.reducer.first_micro_batch = self.micro_batch == 0
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _on_grad(self, index: int, param: torch.Tensor) -> None:
        self._begin_backward()
        if index in self.replicated.in_bucket:
            self.replicated.on_grad(index, self.micro_batch == self.settings.gradient_accumulation - 1)

    def _end_backward(self) -> None:
        self.replicated.flush(self.micro_batch == self.settings.gradient_accumulation - 1)
        self.sharded.flush()
        self.micro_batch += 1
        self._in_backward = self.sharded.in_backward = False
