"""Where every parameter lies: gather units, buckets, shards; and the settings that decide it.

A *bucket* is a flat run of elements that one collective moves. It is cut into ``n_ranks`` equal *shards*; rank r owns
shard r. A bucket knows which piece of which parameter lies where in it; its tensors are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

# Views of large parameters start on 64 bytes in fp32, 32 in bf16: matrix kernels are slower on odd addresses.
ALIGN, ALIGN_FROM = 16, 256
#: A module outside the repeated blocks gets a gather unit of its own from this many elements on.
MIN_UNIT = 2**13

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Settings:
    """The arguments of ``zero()``, described there."""

    stage: int
    bucket_bytes: int
    prefetch: int | str
    param_dtype: torch.dtype
    master_dtype: torch.dtype
    gradient_accumulation: int
    max_norm: float | None
    unit: str
    hybrid: int | None
    classic: bool
    keep_last: bool
    loss_scale: float
    min_unit: int
    whole_params: bool = False

    @property
    def mixed(self) -> bool:
        """Master weights are tensors of their own."""
        return self.param_dtype != self.master_dtype

    @property
    def shard_grad_dtype(self) -> torch.dtype:
        """Dtype of reduced gradients at stages 2 and 3: sums over micro-batches are kept in ``master_dtype``."""
        return self.param_dtype if self.gradient_accumulation == 1 else self.master_dtype


@dataclass
class Piece:
    """Elements ``start .. start + numel`` of flattened parameter ``param`` lie at ``offset`` in the bucket."""

    param: int
    start: int
    numel: int
    offset: int


@dataclass(eq=False)
class Bucket:
    """A flat run of ``numel`` elements (a multiple of the ranks), ``pieces`` in order, the rest is padding.

    The engine fills in the tensors; S = numel / ranks (numel itself at stage 0).
    """

    numel: int
    pieces: list[Piece] = field(default_factory=list)
    stage: int = 0
    #: [numel] parameters in param_dtype; without storage while sharded at stage 3.
    full: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: [S] this rank's part of ``full``: a view of it, at stage 3 a tensor of its own.
    shard: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    #: [S] what the optimizer updates, in master_dtype; ``None`` for frozen parameters.
    master: nn.Parameter | None = None
    #: [numel] local gradients (stages 0 and 1) and [S] reduced ones.
    grads: torch.Tensor | None = None
    grad_shard: torch.Tensor | None = None
    #: trainable parameters without a gradient yet in this backward pass.
    pending: int = 0

    def owned(self, rank: int, n_ranks: int) -> slice:
        """Where ``rank``'s shard lies in the bucket; all of it at stage 0."""
        size = self.numel // n_ranks
        return slice(rank * size, (rank + 1) * size) if self.stage else slice(0, self.numel)

    def publish(self) -> None:
        """Round the master weights into the shard that is gathered."""
        if self.master is not None and self.shard.dtype != self.master.dtype:
            self.shard.copy_(self.master.detach())


@dataclass
class Unit:
    """Parameters (indices into the engine's list) gathered together at stage 3 and awaited together at stages 1 and 2:
    those below ``module``, where the hooks go.
    """

    name: str
    module: nn.Module
    params: list[int]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def cut(params: Sequence[tuple[int, int]], n_ranks: int, bucket_numel: int | None) -> list[Bucket]:
    """Lay ``params`` (pairs of index and numel) end to end and cut the row into buckets of equal size.

    A parameter may lie across several buckets, so that buffers and messages have a constant size however large a
    layer is. ``bucket_numel`` ``None`` makes one bucket. Only the last bucket is shorter; padding is below
    ``n_ranks`` elements plus what alignment takes (15 elements a parameter at most).
    """
    starts, end = [], 0
    for _, numel in params:
        starts.append(_up(end, ALIGN) if numel >= ALIGN_FROM else end)
        end = starts[-1] + numel
    total = _up(end, n_ranks)
    size = total if bucket_numel is None else min(_up(max(bucket_numel, 1), n_ranks * ALIGN), total)
    buckets = [Bucket(min(size, total - at)) for at in range(0, total, size)] if total else []
    for (index, numel), begin in zip(params, starts, strict=True):
        at = begin
        while at < begin + numel:
            bucket, offset = buckets[at // size], at % size
            n = min(begin + numel - at, bucket.numel - offset)
            bucket.pieces.append(Piece(index, at - begin, n, offset))
            at += n
    return buckets


def whole(params: Sequence[tuple[int, int]], n_ranks: int) -> list[Bucket]:
    """One bucket whose shard boundaries fall between parameters: each rank owns whole ones.

    For optimizers that need whole matrices. The largest parameters are dealt first, each to the rank with least so
    far; every shard is as long as the fullest rank's.
    """
    loads: list[list[tuple[int, int]]] = [[] for _ in range(n_ranks)]
    fill = [0] * n_ranks
    for index, numel in sorted(params, key=lambda item: (-item[1], item[0])):
        owner = fill.index(min(fill))
        loads[owner].append((index, numel))
        fill[owner] += _up(numel, ALIGN)
    bucket = Bucket(max(fill) * n_ranks)
    for rank, load in enumerate(loads):
        offset = rank * max(fill)
        for index, numel in sorted(load):
            bucket.pieces.append(Piece(index, 0, numel, offset))
            offset += _up(numel, ALIGN)
    return [bucket]


def find_units(model: nn.Module, unit: str = "block", min_unit: int = MIN_UNIT) -> list[Unit]:
    """Split ``model`` into gather units; together they hold every parameter exactly once, the root's first.

    ``unit="block"``: one unit for each element of a ``ModuleList`` / ``Sequential`` / ``ModuleDict`` (a transformer's
    blocks), one for each other module with at least ``min_unit`` elements (embedding, head). What is left - small
    modules, and parameters shared between units - belongs to the root, which stays gathered during the whole pass.
    ``unit="layer"``: as above, and each direct child of a block (attention, MLP) is a unit of its own: smaller
    messages and less memory, more collectives. A unit's parameters may be used only inside its module's ``forward``.

    Raises:
        ValueError: ``unit`` is neither.
    """
    if unit not in ("block", "layer"):
        raise ValueError(f"unit is 'block' or 'layer', not {unit!r}")
    index = {id(p): i for i, p in enumerate(model.parameters())}
    found: list[tuple[str, nn.Module, int]] = []  # name, module, number of the block around it or -1

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            numel, path = sum(p.numel() for p in child.parameters()), f"{prefix}{name}"
            if isinstance(module, _CONTAINERS) and numel:
                found.append((path, child, -1))
                block = len(found) - 1
                parts = child.named_children() if unit == "layer" else ()
                found.extend((f"{path}.{n}", m, block) for n, m in parts if any(True for _ in m.parameters()))
            elif any(isinstance(m, _CONTAINERS) for m in child.modules()):
                walk(child, f"{path}.")
            elif numel >= min_unit:
                found.append((path, child, -1))

    walk(model, "")
    owners: dict[int, set[int]] = {}
    for number, (_, module, _) in enumerate(found):
        for p in module.parameters():
            owners.setdefault(index[id(p)], set()).add(number)
    held: list[list[int]] = [[] for _ in found]
    rest: list[int] = []
    for param in range(len(index)):
        # A part takes its parameters from the block around it; units side by side leave shared ones to the root.
        numbers = owners.get(param, set())
        inner = numbers - {found[n][2] for n in numbers}
        (held[inner.pop()] if len(inner) == 1 else rest).append(param)
    units = [Unit(name, module, params) for (name, module, _), params in zip(found, held, strict=True) if params]
    return [Unit("root", model, rest), *units]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``: views of one arena count once."""
    seen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())
