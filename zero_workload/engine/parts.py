"""The user's optimizer, made on the module's own parameters, moved onto the parts of them that this rank owns; and the
whole of what it updates.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..buffers.layout import Bucket, Piece

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
#: Optimizers of torch that look at each element by itself. A subclass of one may look at more: it is not on the list.
ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}
#: Optimizers of torch that look at each matrix by itself: stages 0 and 1 keep matrices whole.
BY_MATRIX = {kind for kind in [getattr(torch.optim, "Muon", None)] if kind}
#: Name of a class in lower case -> why no stage can serve it.
REFUSED = {
    "shampoo": "Shampoo multiplies each gradient by roots of two matrices of its sums of squares: these states are "
    "no shard of anything, and one rank would hold a whole layer's",
    "kfac": "K-FAC needs the inputs and output gradients of each layer, which an optimizer of shards never sees",
}


class Part(NamedTuple):
    """What of a parameter this rank owns in a bucket, which the optimizer updates as a parameter of its own."""

    bucket: Bucket
    piece: Piece  # of the bucket's shard
    #: [elements], or of the parameter's shape where matrices stay whole and of a 0-dim one: a view of the master
    param: nn.Parameter


def parts_of(buckets: Sequence[Bucket], shapes: Sequence[torch.Size], whole: bool) -> list[Part]:
    """The parts of this rank in ``buckets``, in order; flat, but with the parameter's shape (of ``shapes``) where it is
    ``whole``, or 0-dim: what its optimizer made for one element is no counter.
    """
    found = []
    for bucket in buckets:
        assert bucket.master is not None
        for piece in bucket.mine():
            part = bucket.master.detach()[piece.where]
            if whole or not shapes[piece.param]:
                part = part.view(shapes[piece.param])
            param = nn.Parameter(part)
            found.append(Part(bucket, piece, param))
    return found


def needs_matrices(optimizer: torch.optim.Optimizer, said: bool | None, stage: int) -> bool:
    """Whether ``optimizer`` needs whole matrices: as the user ``said`` (elementwise or not), else by its class.

    An optimizer that steps several ``optimizers`` needs them if one of these does.

    Raises:
        ValueError: it needs them and ``stage`` or tensor parallelism cuts them, or nothing is known of it.
    """
    found = False
    for one in getattr(optimizer, "optimizers", [optimizer]):
        kind = type(one)
        if _needs_matrices(kind, said, stage):
            found = True
            _require_whole(one)
    return found


def _require_whole(optimizer: torch.optim.Optimizer) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(getattr(p, "is_part", False) for p in params):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} needs whole matrices, and tensor parallelism cuts them: leave one of the two out"
        )


def _needs_matrices(kind: type, said: bool | None, stage: int) -> bool:
    name = kind.__name__
    plain = name.lower().replace("-", "").replace("_", "")
    reason = REFUSED.get(plain)
    if reason:
        raise ValueError(f"{reason}: take an elementwise optimizer, or Muon at stages 0 and 1")
    elementwise = said
    if said is None:
        listed = kind in ELEMENTWISE
        elementwise = getattr(kind, "elementwise", listed)
    if elementwise:
        return False
    if kind not in BY_MATRIX:
        raise ValueError(
            f"ZeRO cuts parameters up at any element, and {name} may need whole matrices: "
            "say elementwise=True if it looks at each element by itself"
        )
    if stage > 1:
        raise ValueError(
            f"{name} needs whole matrices, and stage {stage} cuts their gradients: take stage 0 or 1"
        )
    return True


def group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """Trainable parameter -> its group's number.

    Raises:
        ValueError: a trainable parameter is in no group, or a group has a parameter that is not the model's.
    """
    numbers = dict[int, int]()
    for number, group in enumerate(optimizer.param_groups):
        numbers |= {id(p): number for p in group["params"]}
    found = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) not in numbers:
            cure = "give it to one, or freeze it (requires_grad)"
            raise ValueError(f"{name} is in no group of the optimizer: {cure}")
        found[name] = numbers[id(p)]
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in known for p in group["params"]):
            raise ValueError(f"group {number} of the optimizer has parameters that the model has not")
    return found


def regroup(
    optimizer: torch.optim.Optimizer,
    params: Sequence[Any],
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    parts: list[Part],
) -> None:
    """Put ``parts`` in place of the module's ``params``, of those ``names`` and ``shapes``, in every group. States that
    the optimizer has already are cut alike; a group with names has them, once for each part.
    """
    born = dict(optimizer.state)
    number_of = {id(p): n for n, p in enumerate(params)}
    optimizer.state.clear()
    for part in parts:
        index = part.piece.param
        whole = params[index]
        states = born.get(whole, {})
        for name, value in states.items():
            optimizer.state[part.param][name] = _state_of(part, name, value, shapes[index])
    for group in optimizer.param_groups:
        numbers = {number_of[id(p)] for p in group["params"]}
        mine = [part for part in parts if part.piece.param in numbers]
        group["params"] = [part.param for part in mine]
        if "param_names" in group:
            group["param_names"] = [names[part.piece.param] for part in mine]


def _state_of(part: Part, name: str, value: Any, shape: torch.Size) -> Any:
    """A part's own copy of a state ``value`` of its parameter, which has ``shape``: of a tensor of that shape the
    part's elements, of anything else the whole.
    """
    _, piece, param = part
    is_counter = name == "step" and not shape  # which a 0-dim parameter's other states look like
    if isinstance(value, torch.Tensor) and value.shape == shape and not is_counter:
        stop = piece.start + piece.numel
        elements = value.reshape(-1)[piece.start : stop]
        value = elements.to(param, copy=True)
        value = value.view(param.shape)
    return copy.deepcopy(value)


def masters(engine: Any) -> dict[int, torch.Tensor]:
    """Index of each parameter -> its whole exact value on the CPU, on the first rank of the group; elsewhere nothing.

    Gathered bucket by bucket, by all ranks together.
    """
    comm = engine.comm
    found = dict[int, torch.Tensor]()
    for bucket in engine.all_buckets:
        own = bucket.shard
        if bucket.master is not None:
            own = bucket.master.detach().to(own.device)
        whole = own
        if own.numel() < bucket.numel:
            whole = own.new_empty(bucket.numel)
            comm.all_gather(whole, own).wait()
        if comm.rank:
            continue
        for piece in bucket.pieces:
            index = piece.param
            if index not in found:
                shape = engine.shapes[index]
                found[index] = torch.empty(shape, dtype=own.dtype)
            flat = found[index].view(-1)
            into = flat.narrow(0, piece.start, piece.numel)
            into.copy_(whole[piece.where])
    for index, shape in enumerate(engine.shapes if not comm.rank else ()):
        if engine.params[index].is_floating_point() and not shape.numel():  # in no bucket
            found[index] = torch.empty(shape, dtype=engine.settings.master)
    return found
