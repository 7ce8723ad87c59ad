"""The training job: ``python -m dynamiccl.zero_workload``, by itself or under torchrun."""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from .data import Corpus
from .launch import LAUNCHER, BadInput, Failed, launch, report
from .model import CHECKPOINTS, ModelConfig, Transformer
from .optim import Adan, Lion, Muon
from .peers import PEERS, Peer
from .planner import advice
from .zero import Engine, zero

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parser() -> argparse.ArgumentParser:
    """The command line; every option has a default that runs on two CPU cores."""
    p = argparse.ArgumentParser("zero_workload", description="Train a byte-level transformer under ZeRO.")
    p.add_argument("--stage", type=int, default=3, help="0 data parallel, 1 optimizer, 2 gradients, 3 parameters")
    p.add_argument("--steps", type=int, default=100, help="optimizer steps")
    p.add_argument("--ranks", type=int, default=2, help="processes to start; under torchrun its own number counts")
    p.add_argument("--backend", default="gloo", help="gloo, nccl or emulated")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with nccl, else cpu")
    default = ModelConfig()
    p.add_argument("--layers", type=int, default=default.layers, help="transformer blocks")
    p.add_argument("--width", type=int, default=default.width, help="model width")
    p.add_argument("--heads", type=int, default=default.heads, help="attention heads")
    p.add_argument("--seq", type=int, default=default.seq, help="bytes in a sequence")
    p.add_argument("--batch", type=int, default=4, help="sequences a rank and micro-batch")
    p.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="dtype of parameters and messages")
    p.add_argument("--lr", type=float, default=2e-3, help="AdamW's learning rate")
    p.add_argument("--clip", type=float, help="clip the global gradient norm to this")
    p.add_argument("--seed", type=int, default=0, help="model, data order")
    p.add_argument("--text", type=Path, metavar="FILE", help="train on this text, not the standard library")
    p.add_argument("--bucket-mb", type=float, default=1.0, help="bucket size in MiB, stages 0 to 2")
    p.add_argument("--unit", choices=("block", "layer"), default="block", help="what stage 3 gathers at once")
    p.add_argument("--prefetch", default="1", help="units stage 3 gathers ahead: a number, or auto")
    p.add_argument("--hybrid", type=int, metavar="N", help="at stage 3, replicate units below N elements")
    p.add_argument("--classic", action="store_true", help="stage 1 all-reduces gradients")
    p.add_argument("--optimizer", choices=("adamw", "adan", "lion", "muon"), default="adamw", help="muon: stages 0, 1")
    p.add_argument("--recompute", choices=CHECKPOINTS, default="none", help="activation checkpointing")
    p.add_argument("--recompute-every", type=int, default=1, help="blocks a segment; 0: the root of --layers")
    p.add_argument("--peer", choices=tuple(PEERS), help="train under a library's implementation instead of ours")
    p.add_argument("--save", type=Path, metavar="FOLDER", help="write checkpoints there, and at the end")
    p.add_argument("--save-every", type=int, default=0, metavar="N", help="also every N steps")
    p.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from the newest checkpoint there")
    p.add_argument("--log", type=Path, metavar="FILE", help="JSON lines: the run, then one a step")
    p.add_argument("--log-every", type=int, help="read the loss every so many steps; default 1, on cuda 10")
    p.add_argument("--json", type=Path, metavar="FILE", help="write a summary")
    p.add_argument("--timeout", type=float, default=300, help="seconds until a collective counts as hung")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return p


def check(args: argparse.Namespace) -> None:
    """Say what is wrong with the command line before any process starts.

    Raises:
        BadInput: with one line that says what to change.
    """
    if args.stage not in (0, 1, 2, 3):
        raise BadInput(f"--stage is 0, 1, 2 or 3, not {args.stage}")
    for name in ("steps", "ranks", "batch", "accumulate"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name} starts at 1, not {getattr(args, name)}")
    if args.peer and (args.save or args.resume):
        raise BadInput("--save and --resume work with our stages only, not with --peer")
    if args.peer:
        args.stage = PEERS[args.peer]
    if (args.hybrid is not None and args.stage != 3) or (args.classic and args.stage != 1):
        raise BadInput("--hybrid needs --stage 3, --classic needs --stage 1")
    if args.optimizer == "muon" and args.stage >= 2:
        raise BadInput("muon needs whole matrices, stages 2 and 3 cut them up: take --stage 1")
    if args.bucket_mb <= 0:
        raise BadInput("--bucket-mb must be above 0")
    if args.prefetch != "auto" and not args.prefetch.isdigit():
        raise BadInput(f"--prefetch is a number or auto, not {args.prefetch}")
    if args.backend not in ("gloo", "nccl", "emulated"):
        raise BadInput(f"--backend is gloo, nccl or emulated, not {args.backend}")
    if args.backend == "emulated" and not hasattr(dist.Backend, "EMULATED"):
        raise BadInput("backend emulated is not there: start the job with `dynamiccl tune --cluster PRESET`")
    args.device = args.device or ("cuda" if args.backend == "nccl" else "cpu")
    if "cuda" in (args.device, {"nccl": "cuda"}.get(args.backend)) and not torch.cuda.is_available():
        raise BadInput("this machine has no GPU that PyTorch can use: take --backend gloo --device cpu")
    if args.backend == "nccl" and args.device == "cpu":
        raise BadInput("backend nccl needs --device cuda")
    try:
        config(args)
        Corpus(args.text, args.seq)
    except ValueError as error:
        raise BadInput(str(error)) from error
    for path in (args.log, args.json):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"{path}: its folder does not exist")


def config(args: argparse.Namespace) -> ModelConfig:
    """The model that the command line asks for."""
    recompute = {"checkpoint": args.recompute, "checkpoint_every": args.recompute_every}
    return ModelConfig(args.layers, args.width, args.heads, args.seq, **recompute)


def optimizer_of(args: argparse.Namespace) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """The optimizer that the command line asks for, of a list of parameters."""
    if args.optimizer == "adan":
        return partial(Adan, lr=args.lr, previous_dtype=DTYPES[args.dtype])
    if args.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=args.lr, fused=True)
    return partial(Lion if args.optimizer == "lion" else Muon, lr=args.lr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code: 0, 1 (it failed), 2 (bad input), 128 + signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "-1"))
    try:
        check(args)
        if rank < 0 or "WORLD_SIZE" not in os.environ:
            return launch(args.ranks, arguments)
        work(args)
        _leave(0)
    except (BadInput, Failed, ValueError, RuntimeError, OSError) as error:
        if rank < 0:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, BadInput) else 1
        _leave(report(rank, error))
    return 0


def _leave(code: int) -> None:
    """End this rank without the interpreter's teardown, but with everybody's exit handlers.

    A rank that failed may have threads stuck in a collective that no one else will join; and gloo's threads, when
    they drop the last reference to a tensor during teardown, abort the process now and then.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Stop:
    """Remembers SIGINT and SIGTERM; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


def work(args: argparse.Namespace) -> None:
    """One rank of the job: join, train, log, leave.

    Raises:
        Failed: the loss is not finite; the message names the ranks.
    """
    stop = Stop()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout))
    job = None
    try:
        job = Job(args, device, stop)
        job.run()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        n_params = 12 * args.layers * args.width**2 if job is None else job.n_params
        precision = "fp32" if args.dtype == "fp32" else "mixed"
        raise Failed(f"out of memory: {advice(n_params, dist.get_world_size(), args.stage, precision)}") from error
    dist.destroy_process_group()


class Job:
    """Model, data and engine of one rank, and the loop over steps."""

    def __init__(self, args: argparse.Namespace, device: torch.device, stop: Stop) -> None:
        self.args, self.device, self.stop = args, device, stop
        self.rank, self.size, self.parent = (
            dist.get_rank(),
            dist.get_world_size(),
            int(os.environ.get(LAUNCHER, os.getppid())),
        )
        self.corpus = Corpus(args.text, args.seq)
        torch.manual_seed(args.seed)
        model = Transformer(config(args)).to(device)
        self.n_params = sum(p.numel() for p in model.parameters())
        self.model: nn.Module = model
        settings = {
            "bucket_bytes": int(args.bucket_mb * 2**20),
            "param_dtype": DTYPES[args.dtype],
            "max_norm": args.clip,
        }
        self.engine: Engine | Peer
        if args.peer:
            self.engine = Peer(args.peer, model, optimizer_of(args), accumulation=args.accumulate, **settings)
            self.model = self.engine.model
        else:
            prefetch = args.prefetch if args.prefetch == "auto" else int(args.prefetch)
            kind = {"stage": args.stage, "unit": args.unit, "hybrid": args.hybrid, "classic": args.classic}
            self.engine = zero(
                model, optimizer_of(args), prefetch=prefetch, gradient_accumulation=args.accumulate, **kind, **settings
            )
        self.first = 0
        if args.resume and isinstance(self.engine, Engine):
            from .checkpoint import load

            try:
                self.first = load(self.engine, args.resume)
            except ValueError as error:
                raise BadInput(str(error)) from error
            if self.first >= args.steps:
                raise BadInput(f"the checkpoint is of step {self.first}: give more than {self.first} --steps")
        self.log: TextIO | None = args.log.open("w") if args.log and self.rank == 0 else None

    def run(self) -> None:
        """All steps, then the held-out loss and the summary."""
        args = self.args
        every = args.log_every or (10 if self.device.type == "cuda" else 1)
        about = {
            "model": {"layers": args.layers, "width": args.width, "heads": args.heads, "seq": args.seq},
            "n_params": self.n_params,
            "n_ranks": self.size,
            "stage": args.stage,
            "peer": args.peer,
            "backend": args.backend,
            "device": str(self.device),
            "dtype": args.dtype,
            "batch": args.batch,
            "steps": args.steps,
        }
        self._write(about)
        self._say(
            f"zero-{args.stage}  {self.n_params / 1e6:.2f} M parameters, {self.size} ranks, {args.backend}, "
            f"{args.dtype}, {args.batch} x {args.seq} bytes a rank"
        )
        times: list[float] = []
        losses: list[float] = []
        begin = time.perf_counter()
        for step in range(self.first, args.steps):
            seen = self._step(step)
            if (step + 1) % every and step + 1 < args.steps:
                continue
            loss, stopped = self._read(seen, step)
            now = time.perf_counter()
            times.append((now - begin) * 1e3 / (step % every + 1))
            losses.append(loss)
            begin = now
            self._write({"step": step, "loss": loss, "step_ms": round(times[-1], 3)})
            if (step + 1) % max(10, every) == 0 or step + 1 == args.steps:
                self._say(f"step {step + 1:5d}/{args.steps}  loss {loss:.4f}  {statistics.median(times[-10:]):.0f} ms")
            if args.prefetch == "auto" and isinstance(self.engine, Engine) and step == self.first + 2:
                self._say(f"prefetch {self.engine.prefetch}: {self.engine.sharded.prefetch_reason}")
            if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
                self._save(step + 1)
                begin = time.perf_counter()
            if stopped:
                self._say(f"stopped after step {step + 1}")
                break
        self._save(step + 1)
        held_out = self._held_out()
        self._say(f"held-out loss {held_out:.4f}")
        if args.json and self.rank == 0:
            summary = about | {
                "steps": len(losses) if every == 1 else step + 1,
                "loss_first": losses[0],
                "loss_last": losses[-1],
                "loss_held_out": held_out,
                "step_ms_median": round(statistics.median(times), 3),
            }
            args.json.write_text(json.dumps(summary, indent=1) + "\n")

    def _step(self, step: int) -> tuple[torch.Tensor, dist.Work | None]:
        """One optimizer step; the losses of all ranks, and whether one was told to stop, are still on their way."""
        args = self.args
        seen = torch.zeros(self.size + 1, device=self.device)
        for micro in range(args.accumulate):
            first = (micro * self.size + self.rank) * args.batch
            tokens, targets = self.corpus.batch(first, first + args.batch, step=step, seed=args.seed)
            if self.device.type == "cuda":
                tokens = tokens.pin_memory().to(self.device, non_blocking=True)
                targets = targets.pin_memory().to(self.device, non_blocking=True)
            loss = self.model(tokens, targets)
            self.engine.backward(loss)
            seen[self.rank] += loss.detach() / args.accumulate
        seen[-1] = float(self.stop.asked or os.getppid() != self.parent)  # told to stop, or the launcher died
        work = dist.all_reduce(seen, async_op=True)
        self.engine.step()
        return seen, work

    def _read(self, seen: tuple[torch.Tensor, dist.Work | None], step: int) -> tuple[float, bool]:
        tensor, work = seen
        if work is not None:
            work.wait()
        *losses, stopped = tensor.tolist()
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            raise Failed(f"the loss is not finite at step {step} on ranks {bad}: lower --lr, or look at the data")
        return sum(losses) / len(losses), stopped > 0

    def _save(self, step: int) -> None:
        if self.args.save and isinstance(self.engine, Engine):
            from .checkpoint import save  # takes seconds to import

            self._say(f"saved {save(self.engine, self.args.save, step)}")

    @torch.no_grad()
    def _held_out(self) -> float:
        tokens, targets = self.corpus.held_out(8)
        loss: float = self.model(tokens.to(self.device), targets.to(self.device)).item()
        return loss

    def _write(self, record: dict[str, Any]) -> None:
        if self.log:
            self.log.write(json.dumps(record) + "\n")
            self.log.flush()

    def _say(self, line: str) -> None:
        if self.rank == 0 and not self.args.quiet:
            print(line, flush=True)
