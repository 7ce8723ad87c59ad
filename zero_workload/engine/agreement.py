"""What ranks tell each other once a step, before the optimizer steps: the norm, what was used, the order of units."""

from collections.abc import Sequence

import torch

from .parts import Part
from .reducer import Reducer

#: Bits of a digest of the order in which stage 3 gathered; each is sent as 0 or 1, so that its sum is exact.
ORDER_BITS = 16


def message_numel(n_params: int) -> int:
    """Elements of the all-reduce that :func:`agree` makes for a model of so many parameters."""
    return n_params + 1 + ORDER_BITS


def agree(reducer: Reducer, parts: Sequence[Part], order: int) -> torch.Tensor:
    """One small all-reduce a step, after the reductions: an element a parameter, one for the norm, bits of ``order``.

    Gradients of parameters that no rank used become ``None``. Returns the global norm (scalar), the same on every rank;
    a gradient that is not finite never reaches the weights.

    Raises:
        RuntimeError: on every rank: the ranks gathered different units, or in another order.
    """
    used = reducer.used
    comm = reducer.comm
    bits = [float(order >> bit & 1) for bit in range(ORDER_BITS)]
    message = [*used, 0.0, *bits]
    first = reducer.params[0]
    dtype = reducer.settings.master
    seen = torch.tensor(message, dtype=dtype, device=first.device)
    at = len(used)
    seen[at] = _squares(reducer, parts)
    comm.agree(seen)
    if comm.model:  # other ranks have other parameters: of what they share with this one each counts its part
        norm = seen[at : at + 1]
        comm.model.agree(norm)
    reducer.used = [0.0] * len(used)
    if comm.backend != "fake":
        counts = seen.tolist()
        copies = comm.replicas.size if comm.replicas else 1
        ranks = comm.size * copies
        bits_seen = counts[at + 1 :]
        if any(count not in (0, ranks) for count in bits_seen):
            raise RuntimeError(
                "the ranks called the model's units in different orders, which stage 3 cannot gather: "
                "keep whole what some ranks leave out, by hybrid or min_unit"
            )
        if not all(used):
            _forget_unused(parts, counts)
    return seen[at].sqrt()


def _forget_unused(parts: Sequence[Part], counts: Sequence[float]) -> None:
    for part in parts:
        index = part.piece.param
        if not counts[index]:
            part.param.grad = None


def _squares(reducer: Reducer, parts: Sequence[Part]) -> torch.Tensor | float:
    """This rank's share of the gradient's squared norm (scalar): of what several ranks hold, each counts its part."""
    params = [part.param for part in parts]
    grads = [param.grad for param in params if param.grad is not None]  # that is, all
    if not grads:
        return 0.0
    comm = reducer.comm
    settings = reducer.settings
    copies = 1 if settings.stage else comm.size
    if comm.replicas:
        copies *= comm.replicas.size
    norms = torch._foreach_norm(grads)
    exact = [norm.to(settings.master) for norm in norms]
    squares = torch.stack(exact).square()
    if comm.model:
        owners = [reducer.params[part.piece.param] for part in parts]
        shared = [getattr(owner, "model_copies", 1) for owner in owners]
        model_copies = torch.tensor(shared, device=squares.device)
        squares = squares / model_copies
    total = squares.sum()
    return total / copies
