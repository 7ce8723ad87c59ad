"""Where every parameter lies: rows, buckets and shards.

A *bucket* is a flat run of elements that one collective moves. It is cut into ``n_ranks`` equal *shards*; rank r owns
shard r. A bucket knows which piece of which parameter lies where in it. A *row* is parameters laid end to end in one
allocation and cut into buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from .comm import Collectives
from .settings import Settings

# Views of large parameters start on 64 bytes in fp32, 32 in bf16: matrix kernels are slower on odd addresses.
ALIGN, ALIGN_FROM = 16, 256


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
        """Its last parameter, and the element with which that parameter's piece begins."""
        return max((piece[:2] for piece in self.pieces), default=(-1, 0))

    def mine(self) -> list[Piece]:
        """The pieces in this rank's shard, in order; offsets are those in the shard."""
        found = []
        first, stop = self.owned.start, self.owned.stop
        for param, start, numel, offset in self.pieces:
            low = max(offset, first)
            high = min(offset + numel, stop)
            if low < high:
                part = Piece(param, start + low - offset, high - low, low - first)
                found.append(part)
        return found

    def publish(self) -> None:
        """Round the master weights into the shard that is gathered."""
        if self.master is None:
            return
        if not same_storage(self.shard, self.master):
            exact = self.master.detach()
            self.shard.copy_(exact)


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two lie in the same allocation."""
    here, there = one.untyped_storage(), other.untyped_storage()
    return here._cdata == there._cdata


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _aligned(at: int, numel: int) -> int:
    """Where a parameter of that size may begin, at ``at`` or just behind."""
    return _up(at, ALIGN) if numel >= ALIGN_FROM else at


def end_to_end(sizes: dict[int, int], n_ranks: int) -> tuple[dict[int, int], int]:
    """Where each parameter (index -> numel) begins in a row, and where the row ends, a multiple of ``n_ranks``.

    Padding is below ``n_ranks`` elements plus what alignment takes (15 elements a parameter at most).
    """
    begins, end = {}, 0
    for index, numel in sizes.items():
        begins[index] = _aligned(end, numel)
        end = begins[index] + numel
    return begins, _up(end, n_ranks)


def cut(sizes: dict[int, int], begins: dict[int, int], total: int, bucket_numel: int) -> list[Bucket]:
    """Cut a row into buckets of ``bucket_numel``, the last shorter.

    A parameter may lie across several, so that messages and buffers have a constant size however large a layer is.
    """
    buckets = []
    for at in range(0, total, bucket_numel):
        rest = total - at
        buckets.append(Bucket(min(bucket_numel, rest)))
    for index, begin in sorted(begins.items(), key=lambda item: item[1]):
        at = begin
        end = at + sizes[index]
        while at < end:
            number, offset = divmod(at, bucket_numel)
            bucket = buckets[number]
            n = min(end - at, bucket.numel - offset)
            piece = Piece(index, at - begin, n, offset)
            bucket.pieces.append(piece)
            at += n
    return buckets


def deal(sizes: dict[int, int], n_ranks: int) -> tuple[dict[int, int], int]:
    """As :func:`end_to_end`, but no parameter lies in two of the ``n_ranks`` equal shards: for whole matrices.

    The largest parameter goes first, each to the rank that has least. The fullest rank sets the size of a shard.
    """
    loads = [0] * n_ranks
    place: dict[int, tuple[int, int]] = {}  # the rank, and where in its shard
    for index in sorted(sizes, key=lambda index: -sizes[index]):
        least = min(loads)
        rank = loads.index(least)
        begin = _aligned(least, sizes[index])
        place[index] = rank, begin
        loads[rank] = begin + sizes[index]
    fullest = max(loads)
    shard = _up(fullest, ALIGN)
    begins = {}
    for index, (rank, begin) in place.items():
        begins[index] = rank * shard + begin
    return begins, n_ranks * shard


class Row:
    """Parameters (those at ``indices`` of ``params``, see ``Reducer.rows``) in one arena, equal on all ranks, cut into
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
        whole: bool = False,
    ) -> None:
        self.shapes = {i: params[i].shape for i in indices}
        self.trainable = any(params[i].requires_grad for i in indices)
        self.begins, self.buckets = self._lay(comm, settings, stage, whole)
        total = sum(bucket.numel for bucket in self.buckets)
        sharded = stage == 3 or (stage > 0 and self.trainable)
        for bucket in self.buckets:
            bucket.owned = slice(0, bucket.numel)
            if sharded:
                n = bucket.numel // comm.size
                first = comm.rank * n
                bucket.owned = slice(first, first + n)
        device = params[indices[0]].device
        exact = torch.zeros(total, dtype=settings.master, device=device)
        for index in indices:
            value = params[index].detach()
            self.view(exact, index).copy_(value)
        for part in self._split(exact):
            comm.broadcast(part)
        self.arena = exact.to(settings.param_dtype)
        for index in indices:
            params[index].data = self.view(self.arena, index)
        self._hold_weights(exact, stage, settings.offload)
        if self.trainable:
            self._hold_gradients(stage, settings.sums, comm.size)

    def _lay(
        self, comm: Collectives, settings: Settings, stage: int, whole: bool
    ) -> tuple[dict[int, int], list[Bucket]]:
        """Where each parameter begins, and the buckets. With ``whole`` parameters, and at stage 3, there is one."""
        sizes = {i: shape.numel() for i, shape in self.shapes.items()}
        if whole:
            sharing = comm.size if stage else 1
            begins, total = deal(sizes, sharing)
        else:
            begins, total = end_to_end(sizes, comm.size)
        bucket_numel = total
        if not whole and stage < 3:
            itemsize = settings.param_dtype.itemsize
            multiple = comm.size * ALIGN * itemsize
            wanted = _up(settings.bucket_bytes, multiple) // itemsize
            bucket_numel = min(wanted, total)
        buckets = cut(sizes, begins, total, max(1, bucket_numel))
        return begins, buckets

    def _hold_gradients(self, stage: int, sums: torch.dtype, n_ranks: int) -> None:
        """Those of all parameters up to stage 1, where they add up until they are reduced; else this rank's shard."""
        if stage <= 1:
            self.grads = torch.zeros_like(self.arena)
            parts = self._split(self.grads)
            for bucket, part in zip(self.buckets, parts, strict=True):
                bucket.grads = part
            return
        numel = len(self.arena) // n_ranks
        shards = self.arena.new_zeros(numel, dtype=sums)
        parts = self._split(shards, n_ranks)
        for bucket, part in zip(self.buckets, parts, strict=True):
            bucket.grad_shard = part

    def _hold_weights(self, exact: torch.Tensor, stage: int, offload: bool) -> None:
        """Shards and masters, of the weights ``exact`` [all buckets]. Where dtypes agree the two are one.

        At stage 3 the shard is all that stays when ``full`` is freed; below it is a view of ``full``. With ``offload``
        masters lie in host memory, and the optimizer's states with them.
        """
        mine = []
        parts = self._split(exact)
        for bucket, part in zip(self.buckets, parts, strict=True):
            mine.append(part[bucket.owned])
        offload = offload and self.trainable
        apart = self.trainable and exact.dtype != self.arena.dtype
        if stage == 3 or apart or offload:  # one allocation of their own
            mine = _joined(mine)
        masters = _on_host(mine) if offload else mine
        fulls = self._split(self.arena)
        for bucket, full in zip(self.buckets, fulls, strict=True):
            bucket.full = full
            bucket.shard = full[bucket.owned]
        for bucket, weights, master in zip(self.buckets, mine, masters, strict=True):
            if stage == 3:
                bucket.shard = weights.to(bucket.full.dtype)
            if self.trainable:
                bucket.master = nn.Parameter(master)

    def _split(self, arena: torch.Tensor, over: int = 1) -> tuple[torch.Tensor, ...]:
        return arena.split([b.numel // over for b in self.buckets])

    def view(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter ``index`` in ``arena`` [all buckets]: its pieces lie end to end, across buckets."""
        begin, shape = self.begins[index], self.shapes[index]
        end = begin + shape.numel()
        return arena[begin:end].view(shape)


def _joined(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that lie end to end in one allocation."""
    whole = torch.cat(parts)
    sizes = [part.numel() for part in parts]
    return list(whole.split(sizes))


def _on_host(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory, page-locked where they come from a GPU, so that they travel at the bus's full rate."""
    there = torch.cat(parts)
    like = {"dtype": there.dtype, "device": "cpu"}
    host = torch.empty(there.shape, pin_memory=there.is_cuda, **like)
    host.copy_(there)
    sizes = [part.numel() for part in parts]
    return list(host.split(sizes))
