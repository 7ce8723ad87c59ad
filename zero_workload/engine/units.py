"""Gather units: the parts of a model that stage 3 gathers and frees as one."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from ..buffers.layout import Bucket, Row

#: Modules that hold a model's repeated blocks.
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: Modules that are never called: what they hold is.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
#: What holds parameters for the module around it, and is never called itself.
_HOLDERS = (nn.ParameterList, nn.ParameterDict)


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

    @property
    def buckets(self) -> list[Bucket]:
        """Those of its rows."""
        found = []
        for row in self.rows:
            found += row.buckets
        return found


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Children by their path. A parametrization (torch's weight_norm) and a list of parameters belong to the module
    that uses them.
    """
    for name, child in module.named_children():
        is_own = name == "parametrizations" and parametrize.is_parametrized(module)
        if not is_own and not isinstance(child, _HOLDERS):
            yield f"{prefix}{name}", child


def _called(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Children that are called: in place of a list of modules, what is in the list."""
    for path, child in _children(module, prefix):
        if isinstance(child, _NEVER_CALLED):
            yield from _called(child, f"{path}.")
        else:
            yield path, child


def _has_blocks(module: nn.Module) -> bool:
    """Whether a container lies in it, at any depth."""
    if isinstance(module, _CONTAINERS):
        return True
    children = _children(module, "")
    return any(_has_blocks(child) for _, child in children)


class _Finder:
    """Walks through a model and notes its units, each with the number of the block around it, or -1."""

    def __init__(self, unit: str, min_unit: int) -> None:
        self.by_layer = unit == "layer"
        self.min_unit = min_unit
        self.units: list[Unit] = []
        self.around: list[int] = []

    def walk(self, module: nn.Module, prefix: str = "") -> None:
        """Note the units below ``module``."""
        for path, child in _children(module, prefix):
            numel = sum(p.numel() for p in child.parameters())
            if isinstance(child, _CONTAINERS):
                for name, block in _called(child, f"{path}."):
                    self._add_block(name, block)
            elif _has_blocks(child):
                self.walk(child, f"{path}.")
            elif numel >= self.min_unit:
                self._add(path, child)

    def _add_block(self, path: str, block: nn.Module) -> None:
        number = len(self.units)
        self._add(path, block)
        if self.by_layer:
            for name, part in _called(block, f"{path}."):
                self._add(name, part, number)

    def _add(self, path: str, module: nn.Module, around: int = -1) -> None:
        unit = Unit(path, module)
        self.units.append(unit)
        self.around.append(around)


def find_units(model: nn.Module, unit: str, min_unit: int) -> list[Unit]:
    """Split ``model`` into gather units; together they hold every floating-point parameter once, the root's first.

    ``unit="block"``: each element of a ``ModuleList`` / ``Sequential`` / ``ModuleDict``, and other modules of at least
    ``min_unit`` elements. The root, with the rest, stays gathered. ``"layer"``: also each direct child of a block.
    Parameters may be used only inside their module's ``forward``.
    """
    found = _Finder(unit, min_unit)
    if isinstance(model, _CONTAINERS):
        for name, block in _called(model, ""):
            found._add_block(name, block)
    else:
        found.walk(model)
    holders = defaultdict[int, set[int]](set)  # id of a parameter -> numbers of the units that hold it
    for number, part in enumerate(found.units):
        around = found.around[number]
        for p in part.module.parameters():
            holding = holders[id(p)]
            holding.discard(around)  # a part takes its parameters from the block around it
            holding.add(number)
    root = Unit("root", model)
    for index, p in enumerate(model.parameters()):
        if not p.is_floating_point():
            continue
        owner = root
        holding = holders[id(p)]
        if len(holding) == 1:  # units side by side leave what they share to the root
            number = holding.pop()
            owner = found.units[number]
        owner.params.append(index)
    used = [unit for unit in found.units if unit.params]
    return [root, *used]
