"""Where every parameter lies: gather units, rows, buckets and shards; and the settings that decide it.

A *bucket* is a flat run of elements that one collective moves. It is cut into ``n_ranks`` equal *shards*; rank r owns
shard r. A bucket knows which piece of which parameter lies where in it. A *row* is parameters laid end to end in one
allocation and cut into buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives

# Views of large parameters start on 64 bytes in fp32, 32 in bf16: matrix kernels are slower on odd addresses.
ALIGN, ALIGN_FROM = 16, 256
#: A module outside the repeated blocks gets a gather unit of its own from this many elements on: 1 MiB in bf16, which
#: takes a wire of 100 GB/s as long as a collective's latency. What is smaller stays gathered with the root.
MIN_UNIT = 2**19

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Settings:
    """Settings of ``zero()``, described there. Raises ValueError where one is out of range."""

    stage: int
    bucket_bytes: int = 25 * 2**20
    prefetch: int = 1
    param_dtype: torch.dtype = torch.bfloat16
    gradient_accumulation: int = 1
    max_norm: float | None = None
    unit: str = "block"
    min_unit: int = MIN_UNIT
    hybrid: int | None = None
    keep_last: bool = True
    reduce_dtype: torch.dtype | None = None

    @property
    def wire(self) -> torch.dtype:
        """What gradients are reduced in."""
        return self.reduce_dtype or self.param_dtype

    @property
    def master(self) -> torch.dtype:
        """What the optimizer updates: float32, or the parameters' where that has more digits."""
        return torch.promote_types(torch.float32, self.param_dtype)

    @property
    def sums(self) -> torch.dtype:
        """What a shard of gradients is kept in at stages 2 and 3: sums over micro-batches are in the master's dtype."""
        return self.wire if self.gradient_accumulation == 1 else self.master

    def __post_init__(self) -> None:
        natural, positive = "a whole number from 0 up", "a whole number from 1 up"
        floating = "a floating-point dtype of more range than float16"
        for name, what, fine in (
            ("stage", "0, 1, 2 or 3", _whole(self.stage) and self.stage <= 3),
            ("prefetch", natural, _whole(self.prefetch)),
            ("gradient_accumulation", positive, _whole(self.gradient_accumulation, 1)),
            ("bucket_bytes", positive, _whole(self.bucket_bytes, 1)),
            ("min_unit", natural, _whole(self.min_unit)),
            ("hybrid", f"{natural}, or None", self.hybrid is None or _whole(self.hybrid)),
            ("param_dtype", floating, _floating(self.param_dtype)),
            (
                "reduce_dtype",
                f"{floating}, or None",
                self.reduce_dtype is None or _floating(self.reduce_dtype),
            ),
            ("max_norm", "above 0, or None", self.max_norm is None or self.max_norm > 0),
            ("unit", "'block' or 'layer'", self.unit in ("block", "layer")),
        ):
            if not fine:
                raise ValueError(f"{name} is {what}, not {getattr(self, name)!r}")
        if self.stage != 3 and self.hybrid is not None:
            raise ValueError("hybrid says which units stay replicated at stage 3")


def _whole(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _floating(value: object) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point and value != torch.float16


class Piece(NamedTuple):
    """Elements ``start .. start + numel`` of flattened parameter ``param`` lie at ``offset`` in a bucket or a shard."""

    param: int
    start: int
    numel: int
    offset: int

    @property
    def where(self) -> slice:
        """Its place there."""
        return slice(self.offset, self.offset + self.numel)


@dataclass(eq=False)
class Bucket:
    """A flat run of ``numel`` elements (a multiple of the ranks), ``pieces`` in order, the rest is padding.

    ``Row`` fills in the tensors; S = numel / ranks (numel itself at stage 0).
    """

    numel: int
    pieces: list[Piece] = field(default_factory=list)
    owned: slice = field(default_factory=lambda: slice(0, 0))  # where this rank's shard lies; all at stage 0
    #: [numel] parameters in param_dtype; without storage while sharded at stage 3.
    full: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: [S] this rank's part of ``full``: a view of it, at stage 3 a tensor of its own.
    shard: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    master: nn.Parameter | None = None  # [S] what the optimizer updates; None if frozen
    grads: torch.Tensor | None = None  # [numel] local gradients, at stages 0 and 1
    grad_shard: torch.Tensor | None = None  # [S] reduced gradients
    pending: int = 0  # pieces of parameters without a gradient yet in this backward pass

    def ends(self) -> tuple[int, int]:
        """Its last parameter, and which element of that the last piece begins with."""
        return max((piece[:2] for piece in self.pieces), default=(-1, 0))

    def mine(self) -> list[Piece]:
        """What lies in this rank's shard, in order; offsets are those in the shard."""
        found, first = [], self.owned.start
        for piece in self.pieces:
            low, high = max(piece.offset, first), min(piece.offset + piece.numel, self.owned.stop)
            if low < high:
                found.append(Piece(piece.param, piece.start + low - piece.offset, high - low, low - first))
        return found

    def publish(self) -> None:
        """Round the master weights into the shard that is gathered."""
        if (
            self.master is not None
            and self.shard.untyped_storage()._cdata != self.master.untyped_storage()._cdata
        ):
            self.shard.copy_(self.master.detach())


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def end_to_end(sizes: dict[int, int], n_ranks: int) -> tuple[dict[int, int], int]:
    """Where each parameter (index -> numel) begins in a row, and where the row ends, a multiple of ``n_ranks``.

    Padding is below ``n_ranks`` elements plus what alignment takes (15 elements a parameter at most).
    """
    begins, end = {}, 0
    for index, numel in sizes.items():
        begins[index] = _up(end, ALIGN) if numel >= ALIGN_FROM else end
        end = begins[index] + numel
    return begins, _up(end, n_ranks)


def cut(sizes: dict[int, int], begins: dict[int, int], total: int, bucket_numel: int) -> list[Bucket]:
    """Cut a row into buckets of ``bucket_numel``, the last shorter.

    A parameter may lie across several, so that messages and buffers have a constant size however large a layer is.
    """
    buckets = [Bucket(min(bucket_numel, total - at)) for at in range(0, total, bucket_numel)]
    for index in sorted(begins, key=lambda index: begins[index]):
        at, end = begins[index], begins[index] + sizes[index]
        while at < end:
            bucket, offset = buckets[at // bucket_numel], at % bucket_numel
            n = min(end - at, bucket.numel - offset)
            bucket.pieces.append(Piece(index, at - begins[index], n, offset))
            at += n
    return buckets


class Row:
    """Parameters (those at ``indices`` of ``params``, see ``rows_of``) in one arena, equal on all ranks, cut into
    buckets with the tensors that ``stage`` needs.

    One allocation each for parameters, gradients, master weights and gradient shards lives as long as the engine, so
    long-lived tensors never fragment the memory in which activations come and go (ZeRO's M_D).
    """

    def __init__(
        self,
        comm: Collectives,
        params: Sequence[nn.Parameter],
        indices: Sequence[int],
        settings: Settings,
        stage: int,
    ) -> None:
        self.shapes = {i: params[i].shape for i in indices}
        sizes = {i: shape.numel() for i, shape in self.shapes.items()}
        self.begins, total = end_to_end(sizes, comm.size)
        self.trainable = any(params[i].requires_grad for i in indices)
        dtype = settings.param_dtype
        wanted = _up(settings.bucket_bytes, comm.size * ALIGN * dtype.itemsize) // dtype.itemsize
        self.buckets = cut(sizes, self.begins, total, max(1, total if stage == 3 else min(wanted, total)))
        for bucket in self.buckets:
            n = bucket.numel // comm.size
            cut_up = stage == 3 or (stage > 0 and self.trainable)
            bucket.owned = slice(comm.rank * n, (comm.rank + 1) * n) if cut_up else slice(0, bucket.numel)
        exact = torch.zeros(total, dtype=settings.master, device=params[0].device)
        for index in indices:
            self.view(exact, index).copy_(params[index].detach())
        for part in self._split(exact):
            comm.broadcast(part)
        self.arena = exact.to(dtype)
        for index in indices:
            params[index].data = self.view(self.arena, index)
        self._hold_weights(exact, stage)
        if self.trainable:
            self._hold_gradients(stage, settings.sums, comm.size)

    def _hold_gradients(self, stage: int, sums: torch.dtype, n_ranks: int) -> None:
        """Those of all parameters up to stage 1, where they add up until they are reduced; else this rank's shard."""
        if stage <= 1:
            self.grads = torch.zeros_like(self.arena)
            for bucket, part in zip(self.buckets, self._split(self.grads), strict=True):
                bucket.grads = part
            return
        shards = self.arena.new_zeros(len(self.arena) // n_ranks, dtype=sums)
        for bucket, part in zip(self.buckets, self._split(shards, n_ranks), strict=True):
            bucket.grad_shard = part

    def _hold_weights(self, exact: torch.Tensor, stage: int) -> None:
        """Shards and masters, of the weights ``exact`` [all buckets]. Where dtypes agree the two are one.

        At stage 3 the shard is all that stays when ``full`` is freed; below it is a view of ``full``.
        """
        for bucket, full in zip(self.buckets, self._split(self.arena), strict=True):
            bucket.full = full
        mine = [part[b.owned] for b, part in zip(self.buckets, self._split(exact), strict=True)]
        if mine and (stage == 3 or (self.trainable and exact.dtype != self.arena.dtype)):
            mine = list(torch.cat(mine).split([part.numel() for part in mine]))  # one allocation of their own
        for bucket, master in zip(self.buckets, mine, strict=True):
            bucket.shard = master.to(bucket.full.dtype) if stage == 3 else bucket.full[bucket.owned]
            if self.trainable:
                bucket.master = nn.Parameter(master)

    def _split(self, arena: torch.Tensor, over: int = 1) -> tuple[torch.Tensor, ...]:
        return arena.split([b.numel // over for b in self.buckets])

    def view(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter ``index`` in ``arena`` [all buckets]: its pieces lie end to end, across buckets."""
        begin, shape = self.begins[index], self.shapes[index]
        return arena[begin : begin + shape.numel()].view(shape)


class State(Enum):
    """What is there of a unit at stage 3. Forward: sharded, gathering, gathered, sharded; backward ends at reduced."""

    SHARDED = "only this rank's shard"
    GATHERING = "an all-gather is under way"
    GATHERED = "all parameters can be used"
    REDUCED = "only the shard, and in this backward pass its gradients are on their way"


@dataclass(eq=False)
class Unit:
    """Parameters (indices into the engine's list) gathered together at stage 3 and awaited together at stages 1 and 2:
    those below ``module``, where the hooks go. The rest is stage 3's.
    """

    name: str
    module: nn.Module
    params: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    state: State = State.GATHERED  # as it is made
    gathers: list[dist.Work] = field(default_factory=list)  # under way while GATHERING
    uses: int = 0  # forward calls whose backward has not come yet

    @property
    def buckets(self) -> list[Bucket]:
        """Those of its rows."""
        return [bucket for row in self.rows for bucket in row.buckets]


def find_units(model: nn.Module, unit: str, min_unit: int) -> list[Unit]:
    """Split ``model`` into gather units; together they hold every floating-point parameter once, the root's first.

    ``unit="block"``: one unit for each element of a ``ModuleList`` / ``Sequential`` / ``ModuleDict`` (a transformer's
    blocks), one for each other module with at least ``min_unit`` elements (embedding, head). What is left - small
    modules, and parameters shared between units - belongs to the root, which stays gathered during the whole pass.
    ``unit="layer"``: as above, and each direct child of a block (attention, MLP) is a unit of its own: smaller
    messages and less memory, more collectives. A unit's parameters may be used only inside its module's ``forward``.
    """
    found: list[tuple[Unit, int]] = []  # and the number of the block around it, or -1

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, _CONTAINERS):
                found.append((Unit(path, child), -1))
                block = len(found) - 1
                found.extend(
                    (Unit(f"{path}.{n}", m), block) for n, m in child.named_children() if unit == "layer"
                )
            elif any(isinstance(m, _CONTAINERS) for m in child.modules()):
                walk(child, f"{path}.")
            elif sum(p.numel() for p in child.parameters()) >= min_unit:
                found.append((Unit(path, child), -1))

    walk(model, "")
    holders: dict[int, set[int]] = {id(p): set() for p in model.parameters()}
    for number, (part, block) in enumerate(found):
        for p in part.module.parameters():
            holders[id(p)].discard(block)  # a part takes its parameters from the block around it
            holders[id(p)].add(number)
    root = Unit("root", model)
    for index, p in enumerate(model.parameters()):
        numbers = holders[id(p)]  # units side by side leave what they share to the root
        if p.is_floating_point():
            (found[numbers.pop()][0] if len(numbers) == 1 else root).params.append(index)
    return [root, *(u for u, _ in found if u.params)]
