"""The training job: ``python -m dynamiccl.zero_workload``, by itself or under torchrun."""

import argparse
import atexit
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine import Engine, zero
from ..engine.checkpoint import require_writable
from .launch import LAUNCHER, Told, launch, report
from .model import Transformer
from .options import check, is_rank, parser
from .parallel import groups
from .recompute import Checkpoints
from .tensor import cut_matrices

#: Held-out sequences that a rank looks at, one batch after the other.
HELD_OUT_BATCHES = 4
#: Seconds for the last step when the job is told to stop. With --save the launcher waits as long as it takes.
PATIENCE_S = 10

_NO_RANK = "RANK and WORLD_SIZE are set, LOCAL_RANK is not: this starts a job of its own, with --ranks ranks"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code: 0, 1 (it failed), 2 (bad input), 128 + signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ["RANK"]) if is_rank(os.environ) else -1
    try:
        args = parser().parse_args(arguments)
        check(args)
        if rank < 0:
            if {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not args.quiet:
                print(_NO_RANK, file=sys.stderr, flush=True)
            return launch(args.ranks, arguments, -1 if args.save else PATIENCE_S)
        work(args)
        code = 0
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        code = report(rank, error)
    if rank < 0:
        return code
    # Without the interpreter's teardown, but with everybody's exit handlers: a rank that failed may have threads stuck
    # in a collective that no one else will join; and gloo's threads, when they drop the last reference to a tensor
    # during teardown, abort the process now and then.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def work(args: argparse.Namespace) -> None:
    """One rank of the job: join, train, log, leave.

    Raises:
        FloatingPointError: the gradients are not finite.
    """
    device = torch.device(args.device)
    if args.device == "cuda":
        place = int(os.environ["LOCAL_RANK"])
        n_devices = torch.cuda.device_count()
        device = torch.device("cuda", place % n_devices)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    timeout = timedelta(seconds=args.timeout)
    dist.init_process_group(args.backend, timeout=timeout)
    job = Job(args, device)
    job.run()
    dist.destroy_process_group()


def build(args: argparse.Namespace, device: torch.device) -> Engine:
    """Model, optimizer and engine of this rank; resumed where that was asked for."""
    found = groups(args.hsdp or 0, args.reduce_scatter_group, args.tensor_parallel)
    sharing = found.get("model_group")
    torch.manual_seed(args.seed)
    keep = Checkpoints(args.model.checkpoints, sharing)
    model = Transformer(args.model, keep)
    if sharing:
        cut_matrices(model, sharing)
    model.to(device)
    engine = zero(model, args.made, elementwise=args.elementwise, **found, **args.zero)
    if args.resume:
        engine.load(args.resume)
    return engine


class Job:
    """Model, data and engine of one rank, and the loop over steps."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.stopped = False
        self._told = {signal.SIGINT: Told(), signal.SIGTERM: Told()}
        for number in self._told:
            signal.signal(number, self._stop)
        # Ranks that share matrices share the data.
        rank = dist.get_rank()
        self.place = rank // args.tensor_parallel
        self.size = dist.get_world_size() // args.tensor_parallel
        parent = os.getppid()
        self.parent = int(os.environ.get(LAUNCHER, parent))
        self.engine = build(args, device)
        if args.save:
            require_writable(self.engine, args.save)
        first = rank == 0
        self.log = args.log.open("a" if args.resume else "w") if args.log and first else None
        self.quiet = args.quiet or not first

    def _stop(self, number: int, frame: Any) -> None:
        """SIGINT or SIGTERM: end after this step; a second one ends the process as usual."""
        self.stopped = True
        told = signal.Signals(number)
        if self._told[told].is_second():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def run(self) -> None:
        """All steps, from the one after those of the run that is resumed."""
        args = self.args
        every = args.log_every or (10 if self.device.type == "cuda" else 1)
        self._write(self.about())
        self._say(self._headline())
        self._say_rate()
        times = list[float]()
        done = self._done()
        stopped = False
        begin = time.perf_counter()
        for step in range(done, args.steps):
            seen, work = self._step(step)
            last = step + 1 == args.steps
            work.wait()  # it is older than the agreement, which the step waited for
            stopped = bool(seen[-1])
            looks = bool(args.held_out_every) and (step + 1) % args.held_out_every == 0
            if not (last or stopped or looks or (step + 1) % every == 0):
                continue
            loss = sum(seen[:-1].tolist()) / self.size
            spent_ms = (time.perf_counter() - begin) * 1e3
            step_ms = spent_ms / (step + 1 - done)
            times.append(step_ms)
            begin = time.perf_counter()
            done = step + 1
            self._write({"step": step, "loss": loss, "step_ms": round(step_ms, 3), **self._scale()})
            self._say_step(step, loss, times, max(10, every))
            if stopped:
                self._say(f"stopped after step {step + 1}")
                break
            if looks and not last:
                self._look_at_held_out(step)
                begin = time.perf_counter()
        self._end(done, stopped)

    def _say_rate(self) -> None:
        """That a resumed run goes on with the rate of its checkpoint, where it was started with another."""
        if self.args.resume:
            rate = float(self.engine.optimizer.param_groups[0]["lr"])
            if rate != self.args.lr:
                self._say(f"learning rate {rate:g}, as in {self.args.resume}, not {self.args.lr:g}")

    def _say_step(self, step: int, loss: float, times: list[float], every: int) -> None:
        steps = self.args.steps
        if step + 1 == steps or (step + 1) % every == 0:
            recent = times[-10:]
            took = statistics.median(recent)
            self._say(f"step {step + 1:5d}/{steps}  loss {loss:.4f}  {took:.0f} ms")

    def _end(self, done: int, stopped: bool) -> None:
        """``stopped``: as the ranks agreed; one of them may have been told since."""
        engine = self.engine
        self._write({"memory": engine.memory(), "kept_params": engine.sharded.kept_numel()})
        if not stopped:
            self._look_at_held_out(done - 1)
        if self.args.save:
            self.engine.save(self.args.save)
            self._say(f"saved in {self.args.save} after step {done}")

    def _look_at_held_out(self, step: int) -> None:
        """The loss on text that is never trained on, of all ranks together."""
        corpus = self.args.corpus
        total = torch.zeros((), device=self.device)
        with torch.no_grad():
            for turn in range(HELD_OUT_BATCHES):
                first, stop = self._rows(turn)
                batch = corpus.unseen(first, stop)
                there = [t.to(self.device) for t in batch]
                total += self.engine.model(*there)
        dist.all_reduce(total)
        ranks = dist.get_world_size()
        loss = total.item() / HELD_OUT_BATCHES / ranks
        self._write({"step": step, "held_out": loss})
        self._say(f"held-out loss {loss:.4f}")

    def _rows(self, turn: int) -> tuple[int, int]:
        """Where this rank's rows of a global batch begin and end, in batch ``turn`` of several in a row."""
        args = self.args
        number = turn * self.size + self.place
        first = number * args.batch
        return first, first + args.batch

    def _headline(self) -> str:
        args = self.args
        millions = self._n_params() / 1e6
        ranks = dist.get_world_size()
        data = f"{args.batch} x {args.seq} bytes a rank, {args.backend}, {args.dtype}"
        return f"zero-{args.stage}  {millions:.2f} M parameters, {ranks} ranks, {data}"

    def _n_params(self) -> int:
        return sum(shape.numel() for shape in self.engine.shapes)

    def _whole_params(self) -> int:
        """Parameters that --hybrid leaves whole at stage 3."""
        held = self.engine.replicated.in_bucket if self.args.stage == 3 else ()
        return sum(self.engine.shapes[index].numel() for index in held)

    def _done(self) -> int:
        """Steps that were taken, those of the run that is resumed too."""
        return self.engine.steps + self.engine.scale.skipped

    def about(self) -> dict[str, Any]:
        """What the log says of the run, before its first step."""
        args = self.args
        same = [*("stage", "backend", "dtype", "batch", "steps", "classic", "optimizer", "accumulate")]
        same += ["hsdp", "hybrid", "reduce_dtype"]
        shape = ("layers", "width", "heads", "seq", "materialised")
        about: dict[str, Any] = {name: getattr(args, name) for name in same}
        about["model"] = {name: getattr(args, name) for name in shape}
        about["n_params"] = self._n_params()
        about["n_ranks"] = self.size
        about["device"] = str(self.device)
        about["tensor_parallel"] = args.tensor_parallel
        about["n_tensors"] = len(self.engine.params)
        about["checkpoints"] = args.model.checkpoints
        about["whole_params"] = self._whole_params()
        about["first_step"] = self._done()
        return about

    def _scale(self) -> dict[str, float]:
        """Of float16: the loss scale, and steps that were skipped."""
        scale = self.engine.scale
        return {"loss_scale": scale.value, "skipped": scale.skipped} if scale.dynamic else {}

    def _step(self, step: int) -> tuple[torch.Tensor, Any]:
        """One optimizer step. Returns the losses of all ranks, and whether one was told to stop, which are there when
        the work was waited for.
        """
        args = self.args
        seen = torch.zeros(self.size + 1, device=self.device)
        for micro in range(args.accumulate):
            first, stop = self._rows(micro)
            batch = args.corpus.batch(first, stop, step=step, seed=args.seed)
            if self.device.type == "cuda":
                pinned = [t.pin_memory() for t in batch]
                batch = [t.to(self.device, non_blocking=True) for t in pinned]
            loss = self.engine.model(*batch)
            self.engine.backward(loss)
            seen[self.place] += loss.detach() / args.accumulate / args.tensor_parallel
        launcher_died = os.getppid() != self.parent
        seen[-1] = float(self.stopped or launcher_died)
        work = dist.all_reduce(seen, async_op=True)
        if self.device.type == "cuda":
            # Read after the step, it would make the host wait for the optimizer. The step itself waits for what the
            # ranks agree on, which comes after this copy: so it has arrived then.
            work.wait()
            seen = seen.to("cpu", non_blocking=True)
        self.engine.step()
        return seen, work

    def _write(self, record: dict[str, Any]) -> None:
        if self.log:
            print(json.dumps(record), file=self.log, flush=True)

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)
