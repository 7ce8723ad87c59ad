"""What ranks tell each other once a step: the gradient's norm, which parameters were used, that all is finite."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .comm import ask
from .layout import local

if TYPE_CHECKING:
    from .zero import Engine


class Health:
    """One small all-reduce a step: an element a parameter and one more. It is waited for before the optimizer's step,
    so that what is not finite never reaches the weights.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.losses = engine, list[torch.Tensor]()  # of this step's micro-batches
        mesh: Any = next((p.device_mesh for p in engine.params if local(p) is not p), None)
        self.tp_groups = mesh.get_all_groups() if mesh else []  # those of tensor parallelism
        # What several ranks hold counts once: all at stage 0, replicas of shards, what tensor parallelism replicates.
        times = (1 if engine.settings.stage else engine.comm.size) * (
            engine.comm.replicas.size if engine.comm.replicas else 1
        )
        self.copies = [times * self._copies(p) for p in engine.params]
        self._share = torch.empty(0)  # of a part's square, this rank's
        half = torch.float16 in {b.full.dtype for b in engine.buckets}
        self.loss_scale = engine.settings.loss_scale if half else None
        self.skipped = self.good_steps = 0  # steps without an update, and those with one since

    def _copies(self, p: Any) -> int:
        """How many tensor-parallel ranks hold the same of parameter ``p``."""
        dims = enumerate(self.tp_groups)
        return math.prod(group.size() for d, group in dims if local(p) is p or p.placements[d].is_replicate())

    def look(self) -> torch.Tensor:
        """After the reductions. Gradients of parameters that no rank used become ``None``. Returns the global norm of
        the unscaled gradient (scalar), the same on every rank: not finite where backward failed on some rank.
        """
        engine, comm, used, parts = self.engine, self.engine.comm, self.engine.reducer.used, self.engine.owned
        grads = [part.param.grad for part in parts if part.param.grad is not None]  # that is, all
        dtype = torch.float64 if torch.float64 in {b.full.dtype for b in engine.buckets} else torch.float32
        if len(self._share) != len(parts):
            copies = [self.copies[part.spans[0].number] for part in parts]
            self._share = 1 / torch.tensor(copies, dtype=dtype, device=engine.params[0].device)
        seen = torch.tensor([*used, 0.0], dtype=dtype, device=self._share.device)
        if grads:
            squares = torch.stack([n.to(dtype) for n in torch._foreach_norm(grads)]).square()
            seen[-1] = (squares.to(seen.device) * self._share).sum()
        if engine.reducer.broken:
            seen[-1] = math.nan
        for group in self.tp_groups:
            dist.all_reduce(seen[-1:], group=group)
        comm.agree(seen, dist.ReduceOp.SUM)
        engine.reducer.used = [0.0] * len(used)
        # Experts that several ranks have in one place are different ones: they count as used.
        shared = [part for part in parts if part.bucket.comm is comm and comm.backend != "fake"]
        if any(not used[span.number] for part in shared for span in part.spans):
            counts = seen.tolist()
            engine.split({number: count > 0 for number, count in enumerate(counts)})
            for part in engine.owned:
                if part.bucket.comm is comm and not counts[part.spans[0].number]:
                    part.param.grad = None
        return seen[-1].sqrt() / (self.loss_scale or 1.0)

    def updated(self) -> None:
        """After an update: the loss scale is raised now and then."""
        self.good_steps += 1
        if self.loss_scale is not None and self.good_steps % 2000 == 0:
            self.loss_scale *= 2

    def skip(self) -> Exception | None:
        """The norm is not finite, which is the same on every rank: what each of them raises. ``None``: this step is
        skipped, because backward failed on every rank and was caught there, or for a lower loss scale.
        """
        error = self._error()
        if error is None:
            self.skipped, self.good_steps = self.skipped + 1, 0
            if self.loss_scale is not None and not self.engine.reducer.broken:
                self.loss_scale = max(1.0, self.loss_scale / 2)
        return error

    def _error(self) -> Exception | None:
        engine, names = self.engine, set[str]()
        for part in engine.owned:
            grad = part.param.grad
            if grad is not None and not grad.norm().square().isfinite():
                bad = [span for span in part.spans if not part.cut(grad, [span]).isfinite().all()]
                names |= {engine.names[span.number] for span in bad or part.spans}
        fine = all(math.isfinite(loss.item()) for loss in self.losses)
        mine = dist.get_rank(), engine.reducer.broken, fine, sorted(names)
        everyone = ask(mine, *engine.comm.groups, *self.tp_groups)
        at, broken = f"at step {engine.steps}", sorted({rank for rank, failed, _, _ in everyone if failed})
        if broken:
            what = f"backward failed on ranks {broken} and not on the others {at}, which was applied on none"
            every = all(failed for _, failed, _, _ in everyone)
            return None if every else RuntimeError(f"{what}: leave a batch out on every rank, or on none")
        if self.loss_scale is not None and self.loss_scale > 1:
            return None
        what = "not finite " + at if self.loss_scale is None else f"beyond float16 {at}, at the least loss scale"
        ranks = sorted({rank for rank, _, fine, _ in everyone if not fine})
        if ranks:
            return FloatingPointError(f"the loss is {what} on ranks {ranks}: lower the rate, or look at the data")
        found = sorted({name for _, _, _, names in everyone for name in names})
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return FloatingPointError(f"the gradient is {what}, though each loss is finite: {', '.join(found[:3])}{more}")
