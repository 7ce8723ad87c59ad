"""``zero()``: a model and an optimizer in, a ZeRO engine out. Stages 0 (plain data parallel), 1, 2 and 3."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Bucket, find_units, storage_bytes, unique_parameters
from .reducer import Pool, Reducer
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
) -> Engine:
    """Make ``model`` train under ZeRO. The model is changed in place: its parameters become views of flat buffers.

    Args:
        model: any module, on its device, built alike on every rank (rank 0's values are broadcast). Shared, frozen
            and unused parameters are fine; its floating-point parameters become ``param_dtype``.
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
        keep_last: at stage 3, do not free what forward ends with and backward begins with.
        loss_scale: the first loss scale at float16.

    Returns:
        The engine: ``engine.backward(loss)`` and ``engine.step()`` in place of ``loss.backward()`` and
        ``optimizer.step()``.

    Raises:
        ValueError: on every rank alike, for a setting out of range, an optimizer that is not elementwise at stage 2
            or 3, a model without trainable parameters, and ranks whose models differ in names, shapes or dtypes.

    Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20).
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is 0, 1, 2 or 3, not {stage!r}")
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < 0):
        raise ValueError(f"prefetch is a number from 0 up or 'auto', not {prefetch!r}")
    if gradient_accumulation < 1 or bucket_bytes < 1:
        raise ValueError("gradient_accumulation and bucket_bytes start at 1")
    if classic and stage != 1:
        raise ValueError("the classic form exists at stage 1 only")
    if hybrid is not None and stage != 3:
        raise ValueError("hybrid is for stage 3: it says which units stay replicated")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter")
    whole_params = not _is_elementwise(optimizer)
    if whole_params and stage >= 2:
        raise ValueError(
            f"stage {stage} cuts gradients into flat shards, and this optimizer needs whole matrices: use stage 1"
        )
    comm = Collectives(group, reduce_op)
    shape = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in unique_parameters(model)]
    comm.require_same(zlib.crc32(repr((shape, stage, bucket_bytes, unit, hybrid)).encode()), "a model or setting")
    return Engine(
        model,
        optimizer,
        comm,
        stage=stage,
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        dtypes=(param_dtype, master_dtype),
        accumulation=gradient_accumulation,
        max_norm=max_norm,
        unit=unit,
        hybrid=hybrid,
        classic=classic,
        keep_last=keep_last,
        whole_params=whole_params,
        loss_scale=loss_scale if param_dtype == torch.float16 else None,
    )


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
        *,
        stage: int,
        bucket_bytes: int,
        prefetch: int | str,
        dtypes: tuple[torch.dtype, torch.dtype],
        accumulation: int,
        max_norm: float | None,
        unit: str,
        hybrid: int | None,
        classic: bool,
        keep_last: bool,
        whole_params: bool,
        loss_scale: float | None,
    ) -> None:
        self.model, self.comm, self.stage = model, comm, stage
        self.accumulation, self.max_norm = accumulation, max_norm
        self.loss_scale, self.skipped, self._good_steps = loss_scale, 0, 0
        self.names = [name for name, _ in unique_parameters(model)]
        self.params = [p for _, p in unique_parameters(model)]
        self.param_dtype, self.master_dtype = dtypes
        self.micro_batch = 0
        self._in_backward = False
        pool = Pool(self.param_dtype, self.params[0].device)
        accumulate = self.master_dtype if accumulation > 1 and stage >= 2 else None
        self.reducer = Reducer(comm, self.params, pool, classic=classic, accumulate_dtype=accumulate)
        for index, param in enumerate(self.params):
            if param.is_floating_point():
                param.data = param.data.to(self.param_dtype)
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._on_grad, index))
        for buffer in model.buffers():
            comm.broadcast(buffer)
        units = find_units(model, unit)

        def is_sharded(u: Any) -> bool:
            numel = sum(self.params[i].numel() for i in u.params)
            return stage == 3 and (hybrid is None or numel >= hybrid)

        kept = [i for u in units if not is_sharded(u) for i in u.params if self.params[i].requires_grad]
        self.replicated = Replicated(
            comm,
            self.params,
            kept,
            stage=min(stage, 2),
            bucket_bytes=bucket_bytes,
            param_dtype=self.param_dtype,
            master_dtype=self.master_dtype,
            whole_params=whole_params,
            reducer=self.reducer,
        )
        self.sharded = Sharded(
            comm,
            self.params,
            [u for u in units if is_sharded(u)],
            prefetch=prefetch,
            param_dtype=self.param_dtype,
            master_dtype=self.master_dtype,
            keep_last=keep_last,
            reducer=self.reducer,
            began=self._begin_backward,
        )
        if stage:
            for u in units:
                u.module.register_forward_pre_hook(lambda module, args, u=u: self.replicated.wait(u), prepend=True)
        model.register_forward_pre_hook(lambda module, args: self._begin_forward(), prepend=True)
        self.buckets: list[Bucket] = [
            b for b in self.replicated.buckets + self.sharded.buckets if b.master is not None
        ]
        self.optimizer = optimizer(self._masters(whole_params))

    @property
    def prefetch(self) -> int:
        """Units gathered ahead at stage 3; with ``"auto"`` what was chosen, 1 before that."""
        return self.sharded.prefetch

    # One training step ---------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate ``loss`` (scalar), divided by the accumulation steps and multiplied by the loss scale."""
        factor = (self.loss_scale or 1.0) / self.accumulation
        (loss if factor == 1.0 else loss * factor).backward()

    def step(self) -> torch.Tensor | None:
        """Reduce, clip, update, publish. Does nothing before the last micro-batch of an accumulation.

        Returns:
            The global gradient norm (scalar, of the unscaled gradient before clipping) where it is computed, that is
            with ``max_norm`` or float16, else ``None``. At float16 it is not finite when an overflow made every rank
            skip the update; the scale is halved then.
        """
        if self.micro_batch < self.accumulation:
            return None
        self.micro_batch = 0
        self.reducer.drain()
        norm = None
        for bucket in self.buckets:
            assert bucket.master is not None and bucket.grad_shard is not None
            self._set_grad(bucket)
        if self.max_norm is not None or self.loss_scale is not None:
            norm = self._unscale_and_clip()
        if norm is None or self.loss_scale is None or self._no_overflow(norm):
            self.optimizer.step()
        for bucket in self.buckets:
            self._clear_grad(bucket)
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

    def _masters(self, whole_params: bool) -> list[nn.Parameter]:
        """What the optimizer gets: flat shards, or views of this rank's whole parameters."""
        self._owned: list[tuple[Bucket, nn.Parameter, slice]] = []
        for bucket in self.buckets:
            assert bucket.master is not None
            if not whole_params:
                self._owned.append((bucket, bucket.master, slice(0, bucket.master.numel())))
                continue
            begin = self.comm.rank * bucket.master.numel() if self.stage else 0
            for piece in bucket.pieces:
                at = piece.offset - begin
                if 0 <= at < bucket.master.numel():
                    part = slice(at, at + piece.numel)
                    view = bucket.master.detach()[part].view(self.params[piece.param].shape)
                    self._owned.append((bucket, nn.Parameter(view), part))
        return [param for _, param, _ in self._owned]

    def _set_grad(self, bucket: Bucket) -> None:
        for owner, param, part in self._owned:
            if owner is bucket:
                assert bucket.grad_shard is not None
                param.grad = bucket.grad_shard[part].view(param.shape).to(param.dtype)

    def _clear_grad(self, bucket: Bucket) -> None:
        for owner, param, _ in self._owned:
            if owner is bucket:
                param.grad = None

    def _unscale_and_clip(self) -> torch.Tensor:
        grads = [param.grad for _, param, _ in self._owned if param.grad is not None]
        squares: Sequence[torch.Tensor] = torch._foreach_norm(grads) if grads else ()
        device = self.params[0].device
        total = torch.stack([s.float().square() for s in squares]).sum() if grads else torch.zeros((), device=device)
        if self.stage:  # each rank saw its own shards; stage 0 has all of them everywhere
            self.comm.all_reduce(total, dist.ReduceOp.SUM).wait()
        norm = total.sqrt() / (self.loss_scale or 1.0)
        factor = torch.ones_like(norm) / (self.loss_scale or 1.0)
        if self.max_norm is not None:
            factor = factor * torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
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
            self.replicated.on_grad(index, self.micro_batch == self.accumulation - 1)

    def _end_backward(self) -> None:
        self.replicated.flush(self.micro_batch == self.accumulation - 1)
        self.sharded.flush()
        self.micro_batch += 1
        self._in_backward = self.sharded.in_backward = False
