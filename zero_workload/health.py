"""What ranks tell each other once a step: the gradient's norm, which parameters were used, that all is finite."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .layout import local
from .parts import Part

if TYPE_CHECKING:
    from .zero import Engine


class Health:
    """One small all-reduce a step, of float32: an element a parameter and one more.

    It is waited for at once only where somebody needs it: to clip, to see a float16 overflow, or because this rank owns
    a parameter that it did not use. Else the answer is read a step later, when it has long arrived.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.losses = engine, list[torch.Tensor]()  # of this step's micro-batches
        # What several ranks hold counts once: all at stage 0, replicas of shards, what tensor parallelism replicates.
        times = (1 if engine.stage else engine.comm.size) * (engine.comm.replicas.size if engine.comm.replicas else 1)
        self.copies = [times * self._copies(p) for p in engine.params]
        self._share = torch.empty(0)  # of a part's square, this rank's
        self._last: tuple[Any, torch.Tensor, torch.Tensor, list[Part], list[torch.Tensor]] | None = None

    def _copies(self, p: Any) -> int:
        """How many tensor-parallel ranks hold the same of parameter ``p``."""
        dims = enumerate(self.engine.tp_groups)
        return math.prod(group.size() for d, group in dims if local(p) is p or p.placements[d].is_replicate())

    def look(self, now: bool) -> torch.Tensor | None:
        """After the reductions. Gradients of parameters that no rank used become ``None``. With ``now``, returns the
        global norm of the unscaled gradient (scalar), the same on every rank."""
        engine, comm, used, parts = self.engine, self.engine.comm, self.engine.reducer.used, self.engine.owned
        if len(self._share) != len(parts):
            copies = [self.copies[part.spans[0].number] for part in parts]
            self._share = 1 / torch.tensor(copies, dtype=torch.float32, device=engine.params[0].device)
        grads = [part.param.grad for part in parts if part.param.grad is not None]  # that is, all
        norms = torch._foreach_norm(grads) if grads else []
        squares = torch.stack([n.float() for n in norms]).square() if norms else torch.zeros_like(self._share)
        seen = torch.tensor([*used, 0.0], device=self._share.device)
        seen[-1] = (squares.to(seen.device) * self._share).sum()
        for group in engine.tp_groups:
            dist.all_reduce(seen[-1:], group=group)
        work: Any = comm.all_reduce(seen, dist.ReduceOp.SUM)
        if comm.replicas:
            work.wait()
            work = comm.replicas.all_reduce(seen, dist.ReduceOp.SUM)
        engine.reducer.used = [0.0] * len(used)
        # Experts that several ranks have in one place are different ones: they count as used.
        shared = [part for part in parts if part.bucket.comm is comm and comm.backend != "fake"]
        unsure = any(not used[span.number] for part in shared for span in part.spans)
        if now or unsure:
            work.wait()
        norm = seen[-1].sqrt() / (engine.loss_scale or 1.0) if now else None
        if unsure:
            counts = seen.tolist()
            engine.split({number: count > 0 for number, count in enumerate(counts)})
            for part in engine.owned:
                if part.bucket.comm is comm and not counts[part.spans[0].number]:
                    part.param.grad = None
        if seen.is_cuda:  # copied now, so that reading it does not wait for what is queued until then
            work.wait()
            seen, work = seen.to("cpu", non_blocking=True), torch.cuda.Event()
            work.record()
        self._last, self.losses = (work, seen, squares, parts, self.losses), []
        return norm

    def check(self) -> None:
        """Raise FloatingPointError, on every rank, when the last step's gradients were not finite."""
        last, self._last = self._last, None
        if last is None or self.engine.comm.backend == "fake" or self.engine.loss_scale is not None:
            return
        work, seen, squares, parts, losses = last
        work.synchronize() if isinstance(work, torch.cuda.Event) else work.wait()
        if not math.isfinite(seen[-1].item()):
            raise self.error(f"not finite at step {self.engine.steps - 1}", squares, parts, losses)

    def overflow(self) -> FloatingPointError:
        """What to raise, on every rank, when this step's gradients overflow float16 at any scale."""
        assert self._last is not None
        return self.error(f"beyond float16 at step {self.engine.steps}, at the least loss scale", *self._last[2:])

    def error(self, what: str, squares: torch.Tensor, parts: list[Part], losses: list[Any]) -> FloatingPointError:
        """A collective: names the ranks whose loss is not finite, or else parameters whose gradient is not."""
        engine, names = self.engine, set[str]()
        for part in (part for part, n in zip(parts, squares.tolist(), strict=False) if not math.isfinite(n)):
            seen = part.param.detach() if part.param.grad is None else part.param.grad  # a step has left its mark
            bad = [span for span in part.spans if not part.cut(seen, [span]).isfinite().all()]
            names |= {engine.names[span.number] for span in bad or part.spans}
        everyone: list[Any] = [None] * engine.comm.size
        mine = all(math.isfinite(loss.item()) for loss in losses), sorted(names)
        dist.all_gather_object(everyone, mine, group=engine.comm.group)
        ranks = [rank for rank, (fine, _) in enumerate(everyone) if not fine]
        if ranks:
            return FloatingPointError(f"the loss is {what} on ranks {ranks}: lower the rate, or look at the data")
        found = sorted({name for _, names in everyone for name in names})
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return FloatingPointError(f"the gradient is {what}, though each loss is finite: {', '.join(found[:3])}{more}")
