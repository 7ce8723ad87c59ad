"""The user's optimizer, made on the module's own parameters, moved onto the parts of them that this rank owns; and what
ranks tell each other before it steps.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .layout import Bucket, Piece
from .reducer import Reducer

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

#: Optimizers of torch that look at each element by itself. A subclass of one may look at more: it is not on the list.
ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
}


class Part(NamedTuple):
    """What of a parameter this rank owns in a bucket, which the optimizer updates as a parameter of its own."""

    bucket: Bucket
    piece: Piece  # of the bucket's shard
    param: nn.Parameter  # [elements] a view of the master weights


def parts_of(buckets: Sequence[Bucket]) -> list[Part]:
    """The parts of this rank in ``buckets``, in order."""
    found = []
    for bucket in buckets:
        assert bucket.master is not None
        for piece in bucket.mine():
            found.append(Part(bucket, piece, nn.Parameter(bucket.master.detach()[piece.where])))
    return found


def require_elementwise(optimizer: torch.optim.Optimizer, said: bool | None) -> None:
    """Raise ValueError for an optimizer that looks at more than each element by itself: what the user ``said``, else
    what the class says of itself (``elementwise``), else whether it is on the list.
    """
    kind = type(optimizer)
    if not (getattr(kind, "elementwise", kind in ELEMENTWISE) if said is None else said):
        raise ValueError(
            f"ZeRO cuts parameters up at any element, and {kind.__name__} may need whole matrices: "
            "say elementwise=True if it looks at each element by itself"
        )


def group_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """Trainable parameter -> its group's number.

    Raises:
        ValueError: a trainable parameter is in no group, or a group has what is not the model's.
    """
    numbers = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found = {name: numbers.get(id(p), -1) for name, p in model.named_parameters() if p.requires_grad}
    for name, number in found.items():
        if number < 0:
            raise ValueError(
                f"{name} is in no group of the optimizer: give it to one, or freeze it (requires_grad)"
            )
    known = {id(p) for p in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in known for p in group["params"]):
            raise ValueError(f"group {number} of the optimizer has parameters that the model has not")
    return found


def regroup(
    optimizer: torch.optim.Optimizer, params: Sequence[Any], shapes: Sequence[Any], parts: list[Part]
) -> None:
    """Put ``parts`` in place of the module's ``params``, of those ``shapes``, in every group. What the optimizer has of
    one already is cut alike.
    """
    born, number_of = dict(optimizer.state), {id(p): n for n, p in enumerate(params)}
    optimizer.state.clear()
    for _, piece, param in parts:
        for name, value in born.get(params[piece.param], {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shapes[piece.param]:
                value = value.reshape(-1)[piece.start : piece.start + piece.numel].to(param, copy=True)
            optimizer.state[param][name] = copy.deepcopy(value)
    for group in optimizer.param_groups:
        numbers = {number_of[id(p)] for p in group["params"]}
        group["params"] = [part.param for part in parts if part.piece.param in numbers]
        group.pop("param_names", None)  # there may be several parts of one


def agree(reducer: Reducer, parts: Sequence[Part]) -> torch.Tensor:
    """One small all-reduce a step, after the reductions: an element a parameter, and one for the norm.

    Gradients of parameters that no rank used become ``None``. Returns the global norm of the gradient (scalar), the
    same on every rank; it is waited for before the optimizer's step, so what is not finite never reaches the weights.
    """
    used, comm, settings, device = reducer.used, reducer.comm, reducer.settings, reducer.params[0].device
    grads = [part.param.grad for part in parts if part.param.grad is not None]  # that is, all
    seen = torch.tensor([*used, 0.0], dtype=settings.master, device=device)
    if grads:
        squares = torch.stack([n.to(seen) for n in torch._foreach_norm(grads)]).square()
        # So many ranks hold the same gradient, which counts once.
        copies = (1 if settings.stage else comm.size) * (comm.replicas.size if comm.replicas else 1)
        seen[-1] = (squares / copies).sum()
    comm.agree(seen, dist.ReduceOp.SUM)
    reducer.used = [0.0] * len(used)
    if comm.backend != "fake" and not all(used[part.piece.param] for part in parts):
        counts = seen.tolist()
        for part in parts:
            if not counts[part.piece.param]:
                part.param.grad = None
    return seen[-1].sqrt()
