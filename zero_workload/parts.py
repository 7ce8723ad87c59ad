"""The user's optimizer, made on the module's own parameters, moved onto the parts of them that this rank owns."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from .layout import Bucket, Span

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

#: Optimizers of torch that look at each element by itself. A subclass of one may look at more: it is not on the list.
ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}

#: Elements of neighbours that a CPU updates as one: so few that each pass of an optimizer finds them in the cache.
IN_CACHE = 2**17


@dataclass(eq=False)
class Part:
    """What the optimizer updates as one parameter: neighbours in a bucket that share a group and are used together."""

    bucket: Bucket
    spans: list[Span]
    param: nn.Parameter  # a view of the master weights: 1-D, or one whole parameter

    @classmethod
    def of(cls, bucket: Bucket, spans: list[Span], shape: Sequence[int] = (-1,)) -> "Part":
        """Those of ``spans``, and what fills up between them."""
        assert bucket.master is not None
        view = bucket.master.detach()[spans[0].where.start : spans[-1].where.stop].view(shape)
        return cls(bucket, spans, nn.Parameter(view))

    @property
    def where(self) -> slice:
        """Where it lies in the bucket's shard."""
        return slice(self.spans[0].where.start, self.spans[-1].where.stop)

    def cut(self, value: Any, spans: Sequence[Span]) -> Any:
        """What of ``value`` belongs to ``spans`` of it: elements, if it is a tensor that has one for each of ours."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.numel() != self.param.numel():
            return copy.deepcopy(value)
        begin = self.where.start
        return value.view(-1)[spans[0].where.start - begin : spans[-1].where.stop - begin]


def parts_of(buckets: Sequence[Bucket], shapes: Sequence[torch.Size], whole: bool, kinds: Sequence[Any]) -> list[Part]:
    """The parts of this rank in ``buckets``, in order. Neighbours of the same ``kinds`` (one a parameter) are one part;
    with ``whole`` each parameter is one, in its shape.
    """
    parts = []
    for bucket in buckets:
        spans = bucket.spans()
        if whole:
            parts += [Part.of(bucket, [span], shapes[span.number]) for span in spans]
        else:
            parts += [Part.of(bucket, list(run)) for _, run in groupby(spans, lambda span: kinds[span.number])]
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


def regroup(optimizer: torch.optim.Optimizer, params: Sequence[Any], shapes: Sequence[Any], parts: list[Part]) -> None:
    """Put ``parts`` in place of the module's ``params``, of those ``shapes`` here, in every group. What the optimizer
    has of one already is cut alike; then each part is of one parameter.
    """
    born, number_of = dict(optimizer.state), {id(p): n for n, p in enumerate(params)}
    optimizer.state.clear()
    for part in parts:
        span, p = part.spans[0], params[part.spans[0].number]
        for name, value in born.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shapes[span.number]:
                flat = value.reshape(-1)[span.start : span.start + part.param.numel()]
                value = flat.to(part.param, copy=True).view(part.param.shape)
            optimizer.state[part.param][name] = copy.deepcopy(value)
    for group in optimizer.param_groups:
        numbers = {number_of[id(p)] for p in group["params"]}
        group["params"] = [part.param for part in parts if part.spans[0].number in numbers]
        group.pop("param_names", None)  # there may be several parameters in a part, or several parts of one


def split(optimizer: torch.optim.Optimizer, part: Part, kinds: dict[int, Hashable]) -> list[Part]:
    """``part`` in as many as it has neighbours of different ``kinds`` (by parameter), with their gradients and states;
    they take its place in the optimizer.
    """
    runs = [list(run) for _, run in groupby(part.spans, lambda span: kinds[span.number])]
    if len(runs) == 1:
        return [part]
    made, state = [Part.of(part.bucket, run) for run in runs], optimizer.state.pop(part.param, {})
    for one in made:
        one.param.grad = None if part.param.grad is None else part.cut(part.param.grad, one.spans)
        if state:
            optimizer.state[one.param] = {name: part.cut(value, one.spans) for name, value in state.items()}
    new = [one.param for one in made]
    for group in optimizer.param_groups:
        group["params"] = [p for old in group["params"] for p in (new if old is part.param else [old])]
    return made
