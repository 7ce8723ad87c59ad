"""Where every parameter lies: gather units, buckets, shards.

A *bucket* is a flat run of elements that one collective moves. It is cut into ``n_ranks`` equal *shards*; rank r owns
shard r. A bucket knows which piece of which parameter lies where in it, and nothing else: the tensors are the
engine's.
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
    #: [numel] local gradients (stages 0 and 1) and [S] reduced ones, in param_dtype.
    grads: torch.Tensor | None = None
    grad_shard: torch.Tensor | None = None
    #: trainable parameters without a gradient yet in this backward pass.
    pending: int = 0

    @property
    def used(self) -> int:
        """Elements that belong to parameters; ``numel - used`` is padding."""
        return sum(piece.numel for piece in self.pieces)


@dataclass
class Unit:
    """Parameters gathered together at stage 3 and awaited together at stages 1 and 2: those below one module.

    ``module`` is where the hooks go; ``params`` are indices into the engine's list.
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
    ``n_ranks`` elements plus what alignment takes (16 elements a parameter at most).
    """
    starts, end = [], 0
    for _, numel in params:
        end = _up(end, ALIGN) if numel >= ALIGN_FROM else end
        starts.append(end)
        end += numel
    total = _up(end, n_ranks)
    size = total if bucket_numel is None else min(_up(max(bucket_numel, 1), n_ranks * ALIGN), total)
    buckets = [Bucket(min(size, total - at)) for at in range(0, total, size)] if total else []
    for (index, numel), begin in zip(params, starts, strict=True):
        at = begin
        while at < begin + numel:
            bucket = buckets[at // size]
            offset = at % size
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
    shard = max(fill)
    bucket = Bucket(shard * n_ranks)
    for rank, load in enumerate(loads):
        offset = rank * shard
        for index, numel in sorted(load):
            bucket.pieces.append(Piece(index, 0, numel, offset))
            offset += _up(numel, ALIGN)
    return [bucket]


def unique_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, under the first of its names (shared parameters have several)."""
    return list(model.named_parameters())


def find_units(model: nn.Module, unit: str = "block") -> list[Unit]:
    """Split ``model`` into gather units; together they hold every parameter exactly once, the root's first.

    ``unit="block"``: one unit for each element of a ``ModuleList`` / ``Sequential`` / ``ModuleDict`` (a transformer's
    blocks), one for each other module with at least ``MIN_UNIT`` elements (embedding, head). What is left - small
    modules, and parameters shared between units - belongs to the root, which stays gathered during the whole pass.
    ``unit="layer"``: as above, and each direct child of a block (attention, MLP) is a unit of its own: smaller
    messages and less memory, more collectives. A unit's parameters may be used only inside its module's ``forward``.

    Raises:
        ValueError: ``unit`` is neither.
    """
    if unit not in ("block", "layer"):
        raise ValueError(f"unit is 'block' or 'layer', not {unit!r}")
    index = {id(p): i for i, (_, p) in enumerate(unique_parameters(model))}
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            numel = sum(p.numel() for p in child.parameters())
            if not numel:
                continue
            if isinstance(module, _CONTAINERS):
                found.append((path, child))
                if unit == "layer":
                    found.extend(
                        (f"{path}.{part}", sub) for part, sub in child.named_children() if _numel(sub) >= MIN_UNIT
                    )
            elif any(isinstance(m, _CONTAINERS) for m in child.modules()):
                walk(child, f"{path}.")
            elif numel >= MIN_UNIT:
                found.append((path, child))

    walk(model, "")
    owners: dict[int, set[int]] = {}
    for number, (_, module) in enumerate(found):
        for p in module.parameters():
            owners.setdefault(index[id(p)], set()).add(number)
    # A nested unit takes its parameters from the unit around it; two units side by side leave theirs to the root.
    inside = {n: {m for m, (_, other) in enumerate(found) if _is_below(found[n][1], other)} for n in range(len(found))}
    of: dict[int, int] = {}
    for param, numbers in owners.items():
        innermost = max(numbers, key=lambda n: len(inside[n]))
        if numbers <= inside[innermost] | {innermost}:
            of[param] = innermost
    units = [Unit("root", model, [i for i in range(len(index)) if i not in of])]
    for number, (name, module) in enumerate(found):
        units.append(Unit(name, module, sorted(p for p, owner in of.items() if owner == number)))
    return [u for u in units if u.params or u.module is model]


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_below(module: nn.Module, above: nn.Module) -> bool:
    return module is not above and any(m is module for m in above.modules())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``: views of one arena count once."""
    seen = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(seen.values())
