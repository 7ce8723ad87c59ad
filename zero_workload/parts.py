"""The user's optimizer, made on the module's own parameters, moved onto the parts of them that this rank owns."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .layout import Bucket, local

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

#: Optimizers of torch that look at each element by itself. A subclass of one may look at more: it is not on the list.
ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}


class Part(NamedTuple):
    """What this rank owns of a parameter in one bucket, and so updates."""

    bucket: Bucket
    where: slice  # in the bucket's shard
    number: int  # of the parameter
    start: int  # of its elements, the first that lies there
    param: nn.Parameter  # a view of the master weights: 1-D, or the whole parameter


def parts_of(buckets: Sequence[Bucket], shapes: Sequence[torch.Size], whole: bool) -> list[Part]:
    """The parts of this rank in ``buckets``, in order; with ``whole`` in the shape of the parameter."""
    parts = []
    for bucket in buckets:
        assert bucket.master is not None
        flat = bucket.master.detach()
        for index, start, where in bucket.covered(0, flat.numel()):
            view = flat[where].view(shapes[index]) if whole else flat[where]
            parts.append(Part(bucket, where, index, start, nn.Parameter(view)))
    return parts


def is_elementwise(optimizer: torch.optim.Optimizer, said: bool | None) -> bool:
    """What the user ``said``, else what the class says of itself (``elementwise``), else whether it is on the list."""
    kind = type(optimizer)
    return bool(getattr(kind, "elementwise", kind in ELEMENTWISE)) if said is None else said


def group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """Trainable parameter -> its group's number.

    Raises:
        ValueError: a trainable parameter is in no group, or a group has what is not the model's.
    """
    numbers = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found = {name: numbers.get(id(p), -1) for name, p in model.named_parameters() if p.requires_grad}
    for name, number in found.items():
        if number < 0:
            raise ValueError(f"{name} is in no group of the optimizer: give it to one, or freeze it (requires_grad)")
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in known for p in group["params"]):
            raise ValueError(f"group {number} of the optimizer has parameters that the model has not")
    return found


def regroup(optimizer: torch.optim.Optimizer, params: Sequence[Any], parts: Sequence[Part]) -> None:
    """Put ``parts`` in place of the module's ``params`` in every group; what the optimizer has already is cut alike."""
    of: dict[int, list[Part]] = {id(p): [] for p in params}
    for part in parts:
        of[id(params[part.number])].append(part)
    born = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for p in group["params"]:
            for part in of[id(p)] if born.get(p) else ():
                optimizer.state[part.param] = {name: _cut(value, p, part) for name, value in born[p].items()}
        group["params"] = [part.param for p in group["params"] for part in of[id(p)]]
        group.pop("param_names", None)  # there may be several parts of one name, or none


def _cut(value: Any, p: torch.Tensor, part: Part) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != p.shape:
        return copy.deepcopy(value)
    flat = local(value).reshape(-1)[part.start : part.start + part.param.numel()]
    return flat.to(part.param, copy=True).view(part.param.shape)
