"""Where every parameter lies: rows, buckets and shards.

A *bucket* is a flat run of elements that one collective moves. It is cut into ``n_ranks`` equal *shards*; rank r owns
shard r. A bucket knows which piece of which parameter lies where in it. A *row* is parameters laid end to end in one
allocation and cut into buckets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from .comm import Collectives, same_storage
from .settings import Settings

#: Index of a parameter -> the element of a row at which it begins.
Begins = dict[int, int]

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
        stop = self.offset + self.numel
        return slice(self.offset, stop)


def _nothing() -> torch.Tensor:
    """What stands for a tensor that is still to be made."""
    return torch.empty(0)


@dataclass(eq=False)
class Bucket:
    """A flat run of ``numel`` elements (a multiple of the ranks), ``pieces`` in order, the rest is padding.

    ``Row`` fills in the tensors; S = numel / ranks (numel itself at stage 0).
    """

    numel: int
    pieces: list[Piece] = field(default_factory=list)
    owned: slice = field(default_factory=lambda: slice(0, 0))  # where this rank's shard lies; all at stage 0
    #: [numel] parameters in param_dtype; without storage while sharded at stage 3.
    full: torch.Tensor = field(default_factory=_nothing)
    #: [S] this rank's part of ``full``: a view of it, at stage 3 a tensor of its own.
    shard: torch.Tensor = field(default_factory=_nothing)
    master: nn.Parameter | None = None  # [S] what the optimizer updates; None if frozen
    grads: torch.Tensor | None = None  # [numel] local gradients, at stages 0 and 1
    grad_shard: torch.Tensor | None = None  # [S] reduced gradients
    pending: int = 0  # pieces of parameters without a gradient yet in this backward pass

    def ends(self) -> tuple[int, int]:
        """Its last parameter, and the element with which that parameter's piece begins."""
        beginnings = [(piece.param, piece.start) for piece in self.pieces]
        return max(beginnings, default=(-1, 0))

    def mine(self) -> list[Piece]:
        """The pieces in this rank's shard, in order; offsets are those in the shard."""
        found = []
        first = self.owned.start
        stop = self.owned.stop
        for param, start, numel, offset in self.pieces:
            low = max(offset, first)
            high = min(offset + numel, stop)
            if low < high:
                skipped = low - offset  # elements of the piece that lie in the shards before
                part = Piece(param, start + skipped, high - low, low - first)
                found.append(part)
        return found

    def publish(self) -> None:
        """Round the master weights into the shard that is gathered."""
        if self.master is None:
            return
        if not same_storage(self.shard, self.master):
            exact = self.master.detach()
            self.shard.copy_(exact)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _aligned(at: int, numel: int) -> int:
    """Where a parameter of that size may begin, at ``at`` or just behind."""
    return _up(at, ALIGN) if numel >= ALIGN_FROM else at


def end_to_end(sizes: dict[int, int], n_ranks: int) -> tuple[Begins, int]:
    """Where each parameter (index -> numel) begins in a row, and where the row ends, a multiple of ``n_ranks``.

    Padding is below ``n_ranks`` elements plus what alignment takes (15 elements a parameter at most).
    """
    begins = {}
    end = 0
    for index, numel in sizes.items():
        begins[index] = _aligned(end, numel)
        end = begins[index] + numel
    return begins, _up(end, n_ranks)


def cut(sizes: dict[int, int], begins: Begins, total: int, bucket_numel: int) -> list[Bucket]:
    """Cut a row into buckets of ``bucket_numel``, the last shorter.

    A parameter may lie across several, so that messages and buffers have a constant size however large a layer is.
    """
    buckets = []
    for at in range(0, total, bucket_numel):
        rest = total - at
        numel = min(bucket_numel, rest)
        bucket = Bucket(numel)
        buckets.append(bucket)
    in_order = sorted(begins, key=begins.__getitem__)
    for index in in_order:
        begin = begins[index]
        end = begin + sizes[index]
        at = begin
        while at < end:
            number, offset = divmod(at, bucket_numel)
            bucket = buckets[number]
            room = bucket.numel - offset
            numel = min(end - at, room)
            start = at - begin
            piece = Piece(index, start, numel, offset)
            bucket.pieces.append(piece)
            at += numel
    return buckets


def deal(sizes: dict[int, int], n_ranks: int) -> tuple[Begins, int]:
    """As :func:`end_to_end`, but no parameter lies in two of the ``n_ranks`` equal shards: for whole matrices.

    The largest parameter goes first, each to the rank that has least. The fullest rank sets the size of a shard.
    """
    loads = [0] * n_ranks
    place: dict[int, tuple[int, int]] = {}  # the rank, and where in its shard
    largest_first = sorted(sizes, key=lambda index: -sizes[index])
    for index in largest_first:
        numel = sizes[index]
        least = min(loads)
        rank = loads.index(least)
        begin = _aligned(least, numel)
        place[index] = rank, begin
        loads[rank] = begin + numel
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
        self.shapes = {}
        self.trainable = False
        for index in indices:
            param = params[index]
            self.shapes[index] = param.shape
            self.trainable |= param.requires_grad
        self.begins, self.buckets = self._lay(comm, settings, stage, whole)
        sharded = stage == 3 or (stage > 0 and self.trainable)
        for bucket in self.buckets:
            bucket.owned = slice(0, bucket.numel)
            if sharded:
                share = bucket.numel // comm.size
                first = comm.rank * share
                stop = first + share
                bucket.owned = slice(first, stop)
        exact = self._exact(params, settings.master)
        for _, part in self._parts(exact):
            comm.broadcast(part)
        self.arena = exact.to(settings.param_dtype)
        for index in indices:
            place = self.view(self.arena, index)
            params[index].data = place
        self._hold_weights(exact, stage, settings.offload)
        if self.trainable:
            self._hold_gradients(stage, settings.sums, comm.size)

    def _exact(self, params: Sequence[nn.Parameter], master: torch.dtype) -> torch.Tensor:
        """The parameters' values in dtype ``master``, laid out as a row: [elements of all buckets], on their device."""
        numel = sum(bucket.numel for bucket in self.buckets)
        one = next(iter(self.shapes))
        device = params[one].device
        exact = torch.zeros(numel, dtype=master, device=device)
        for index in self.shapes:
            value = params[index].detach()
            place = self.view(exact, index)
            place.copy_(value)
        return exact

    def _lay(
        self, comm: Collectives, settings: Settings, stage: int, whole: bool
    ) -> tuple[Begins, list[Bucket]]:
        """Where each parameter begins, and the buckets. With ``whole`` parameters, and at stage 3, there is one."""
        sizes = {}
        for index, shape in self.shapes.items():
            sizes[index] = shape.numel()
        if whole:
            sharing = comm.size if stage else 1
            begins, total = deal(sizes, sharing)
        else:
            begins, total = end_to_end(sizes, comm.size)
        bucket_numel = total
        if not whole and stage < 3:
            dtype = settings.param_dtype
            itemsize = dtype.itemsize
            multiple = comm.size * ALIGN * itemsize
            bucket_bytes = _up(settings.bucket_bytes, multiple)
            wanted = bucket_bytes // itemsize
            bucket_numel = min(wanted, total)
        bucket_numel = max(1, bucket_numel)
        buckets = cut(sizes, begins, total, bucket_numel)
        return begins, buckets

    def _hold_gradients(self, stage: int, sums: torch.dtype, n_ranks: int) -> None:
        """Those of all parameters up to stage 1, where they add up until they are reduced; else this rank's shard."""
        if stage <= 1:
            self.grads = torch.zeros_like(self.arena)
            for bucket, part in self._parts(self.grads):
                bucket.grads = part
            return
        numel = len(self.arena) // n_ranks
        shards = self.arena.new_zeros(numel, dtype=sums)
        for bucket, part in self._parts(shards, n_ranks):
            bucket.grad_shard = part

    def _hold_weights(self, exact: torch.Tensor, stage: int, offload: bool) -> None:
        """Shards and masters, of the weights ``exact`` [all buckets]. Where dtypes agree the two are one.

        At stage 3 the shard is all that stays when ``full`` is freed; below it is a view of ``full``. With ``offload``
        masters lie in host memory, and the optimizer's states with them.
        """
        mine = self._owned(exact)
        offload = offload and self.trainable
        rounded = self.arena.dtype
        apart = self.trainable and exact.dtype != rounded
        if stage == 3 or apart or offload:  # one allocation of their own
            mine = _joined(mine)
        masters = _on_host(mine) if offload and mine else mine
        for bucket, full in self._parts(self.arena):
            bucket.full = full
            bucket.shard = full[bucket.owned]
        for number, bucket in enumerate(self.buckets):
            if stage == 3:
                weights = mine[number]
                bucket.shard = weights.to(rounded)
            if self.trainable:
                master = masters[number]
                bucket.master = nn.Parameter(master)

    def _owned(self, arena: torch.Tensor) -> list[torch.Tensor]:
        """What this rank owns of each bucket: views of ``arena`` [elements of all buckets]."""
        mine = []
        for bucket, part in self._parts(arena):
            owned = part[bucket.owned]
            mine.append(owned)
        return mine

    def _parts(self, arena: torch.Tensor, over: int = 1) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket with its part of ``arena``, which has 1 / ``over`` of the elements of all buckets."""
        sizes = [bucket.numel // over for bucket in self.buckets]
        parts = arena.split(sizes)
        return zip(self.buckets, parts, strict=True)

    def view(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter ``index`` in ``arena`` [all buckets]: its pieces lie end to end, across buckets."""
        begin = self.begins[index]
        shape = self.shapes[index]
        end = begin + shape.numel()
        flat = arena[begin:end]
        return flat.view(shape)


def _cut_like(whole: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``whole`` with the sizes of ``parts``, in order."""
    sizes = [part.numel() for part in parts]
    views = whole.split(sizes)
    return list(views)


def _joined(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that lie end to end in one allocation; none of no parts: a row of parameters without elements."""
    if not parts:
        return []
    whole = torch.cat(parts)
    return _cut_like(whole, parts)


def _on_host(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory, page-locked where they come from a GPU, so that they travel at the bus's full rate."""
    there = torch.cat(parts)
    pinned = there.is_cuda
    host = torch.empty(there.shape, dtype=there.dtype, device="cpu", pin_memory=pinned)
    host.copy_(there)
    return _cut_like(host, parts)
