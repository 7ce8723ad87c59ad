"""What ranks tell each other once a step: the gradient's norm, which parameters were used, that all is finite."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .comm import ask
from .parts import Part
from .reducer import Reducer


class Report(NamedTuple):
    """What a rank says of a step whose norm is not finite."""

    rank: int
    broken: bool  # its backward failed
    finite: bool  # each of its losses is
    names: list[str]  # of parameters whose gradient is not


class Health:
    """One small all-reduce a step: an element a parameter and one more. It is waited for before the optimizer's step,
    so that what is not finite never reaches the weights.

    Args:
        reducer: knows what this rank has used.
        names: of all parameters.
        dtypes: those of trainable parameters.
    """

    def __init__(self, reducer: Reducer, names: list[str], dtypes: set[torch.dtype]) -> None:
        self.reducer, self.comm, self.names = reducer, reducer.comm, names
        self.losses = list[torch.Tensor]()  # of this step's micro-batches
        stage, replicas = reducer.settings.stage, reducer.comm.replicas
        # So many ranks hold the same gradient, which counts once.
        self._copies = (1 if stage else self.comm.size) * (replicas.size if replicas else 1)
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.skipped = 0  # steps without an update

    def look(self, parts: Sequence[Part]) -> torch.Tensor:
        """After the reductions. Gradients of parameters that no rank used become ``None``. Returns the global norm of
        the gradient (scalar), the same on every rank: not finite where backward failed on some rank.
        """
        used, device = self.reducer.used, self.reducer.params[0].device
        grads = [part.param.grad for part in parts if part.param.grad is not None]  # that is, all
        seen = torch.tensor([*used, 0.0], dtype=self._dtype, device=device)
        if grads:
            squares = torch.stack([n.to(self._dtype) for n in torch._foreach_norm(grads)]).square()
            seen[-1] = (squares.to(device) / self._copies).sum()
        if self.reducer.broken:
            seen[-1] = math.nan
        self.comm.agree(seen, dist.ReduceOp.SUM)
        self.reducer.used = [0.0] * len(used)
        if self.comm.backend != "fake" and not all(used[part.piece.param] for part in parts):
            counts = seen.tolist()
            for part in parts:
                if not counts[part.piece.param]:
                    part.param.grad = None
        return seen[-1].sqrt()

    def skip(self, parts: Sequence[Part], step: int) -> Exception | None:
        """The norm is not finite, which is the same on every rank: what each of them raises. ``None``: this step is
        skipped, because backward failed on every rank and was caught there.
        """
        fine = all(math.isfinite(loss.item()) for loss in self.losses)
        mine = Report(dist.get_rank(), self.reducer.broken, fine, self._not_finite(parts))
        error = self._error(ask(mine, *self.comm.groups), step)
        self.skipped += error is None
        return error

    def _not_finite(self, parts: Sequence[Part]) -> list[str]:
        """Names of this rank's parameters whose gradients are not finite."""
        graded = [(part.piece.param, part.param.grad) for part in parts if part.param.grad is not None]
        return sorted({self.names[number] for number, grad in graded if not grad.norm().square().isfinite()})

    def _error(self, everyone: Sequence[Report], step: int) -> Exception | None:
        """What the reports of all ranks come to, the same on each."""
        broken = sorted({one.rank for one in everyone if one.broken})
        if broken:
            if all(one.broken for one in everyone):
                return None
            what = f"backward failed on ranks {broken} and not on the others at step {step}, which was applied on none"
            return RuntimeError(f"{what}: leave a batch out on every rank, or on none")
        what = f"not finite at step {step}"
        ranks = sorted({one.rank for one in everyone if not one.finite})
        if ranks:
            return FloatingPointError(f"the loss is {what} on ranks {ranks}: lower the rate, or look at the data")
        found = sorted({name for one in everyone for name in one.names})
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return FloatingPointError(f"the gradient is {what}, though each loss is finite: {', '.join(found[:3])}{more}")
