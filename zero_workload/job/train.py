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
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..buffers.settings import Settings
from ..engine import Engine, zero
from .data import Corpus
from .launch import LAUNCHER, launch, report
from .model import ModelConfig, Transformer
from .parallel import groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Embedding and head of a small model are messages of their own here, so that it emits several sizes as a large one.
MIN_UNIT = 2**13


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser() -> argparse.ArgumentParser:
    """The command line; every option has a default that runs on two CPU cores."""

    def whole(text: str, least: int = 0) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} up, not {text}")
        return int(text)

    def amount(text: str) -> float:
        with suppress(ValueError):
            if 0 < float(text) < 1e9:
                return float(text)
        raise argparse.ArgumentTypeError(f"a number above 0 (and below 1e9), not {text}")

    def file(text: str) -> Path:
        if not Path(text).absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: its folder does not exist")
        return Path(text)

    count = partial(whole, least=1)
    p, default = (
        _Parser("zero_workload", description="Train a byte-level transformer under ZeRO."),
        ModelConfig(),
    )
    p.add_argument(
        "--stage", type=int, default=3, help="0 data parallel, 1 optimizer, 2 gradients, 3 parameters"
    )
    p.add_argument("--steps", type=count, default=100, help="optimizer steps")
    p.add_argument(
        "--ranks", type=count, default=2, help="processes to start; under torchrun its own number counts"
    )
    p.add_argument(
        "--backend", choices=("gloo", "nccl", "emulated"), default="gloo", help="what moves the bytes"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda with nccl, else cpu")
    p.add_argument("--layers", type=count, default=default.layers, help="transformer blocks")
    p.add_argument("--width", type=count, default=default.width, help="model width")
    p.add_argument("--heads", type=count, default=default.heads, help="attention heads")
    p.add_argument("--seq", type=count, default=default.seq, help="bytes in a sequence")
    p.add_argument("--batch", type=count, default=4, help="sequences a rank and micro-batch")
    p.add_argument("--accumulate", type=count, default=1, help="micro-batches a step")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="dtype of parameters and messages")
    p.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    p.add_argument("--clip", type=amount, help="clip the global gradient norm to this")
    p.add_argument("--seed", type=int, default=0, help="model, data order")
    p.add_argument("--bucket-mb", type=amount, default=1.0, help="bucket size in MiB, stages 0 to 2")
    p.add_argument("--unit", choices=("block", "layer"), default="block", help="what stage 3 gathers at once")
    p.add_argument("--prefetch", type=whole, default=1, help="units stage 3 gathers ahead")
    p.add_argument("--hybrid", type=whole, metavar="N", help="at stage 3, replicate units below N elements")
    p.add_argument(
        "--hsdp", type=count, metavar="N", help="shard over N ranks, a node's, and replicate over the rest"
    )
    p.add_argument(
        "--reduce-dtype", choices=tuple(DTYPES), help="dtype gradients are reduced in; default --dtype"
    )
    p.add_argument(
        "--reduce-scatter-group", action="store_true", help="a communicator of its own for reduce-scatters"
    )
    p.add_argument("--log", type=file, metavar="FILE", help="JSON lines: the run, then one a step")
    p.add_argument("--log-every", type=count, help="read the loss every so many steps; default 1, on cuda 10")
    p.add_argument("--timeout", type=amount, default=300, help="seconds until a collective counts as hung")
    p.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return p


def check(args: argparse.Namespace) -> None:
    """Complete the command line and say what is wrong with it before any process starts. Raises ValueError."""
    args.device = args.device or ("cuda" if args.backend == "nccl" else "cpu")
    if args.backend == "emulated" and not hasattr(dist.Backend, "EMULATED"):
        raise ValueError(
            "backend emulated is not there: start the job with `dynamiccl tune --cluster PRESET`"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that PyTorch can use: take --backend gloo --device cpu")
    if args.backend == "nccl" and args.device == "cpu":
        raise ValueError("backend nccl needs --device cuda")
    shape = {name: getattr(args, name) for name in ("layers", "width", "heads", "seq")}
    args.model = ModelConfig(**shape)
    args.zero = {name: getattr(args, name) for name in ("stage", "prefetch", "unit", "hybrid")}
    args.zero |= {"param_dtype": DTYPES[args.dtype], "reduce_dtype": DTYPES.get(args.reduce_dtype)}
    args.zero |= {"max_norm": args.clip, "gradient_accumulation": args.accumulate, "min_unit": MIN_UNIT}
    args.zero["bucket_bytes"] = max(1, int(args.bucket_mb * 2**20))
    Settings(**args.zero)  # refuses what is out of range
    args.corpus = Corpus(args.seq)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit code: 0, 1 (it failed), 2 (bad input), 128 + signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get("RANK", "-1")) if "WORLD_SIZE" in os.environ else -1
    try:
        args = parser().parse_args(arguments)
        check(args)
        if rank < 0:
            return launch(args.ranks, arguments)
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
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(args.backend, timeout=timedelta(seconds=args.timeout))
    Job(args, device).run()
    dist.destroy_process_group()


class Job:
    """Model, data and engine of one rank, and the loop over steps."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.stopped = args, device, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.parent = int(os.environ.get(LAUNCHER, os.getppid()))
        torch.manual_seed(args.seed)
        model = Transformer(args.model).to(device)
        self.n_params = sum(p.numel() for p in model.parameters())
        optimizer = partial(torch.optim.AdamW, fused=True, lr=args.lr)
        self.engine: Engine = zero(
            model, optimizer, **groups(args.hsdp or 0, args.reduce_scatter_group), **args.zero
        )
        self.log = args.log.open("w") if args.log and self.rank == 0 else None

    def _stop(self, number: int, frame: Any) -> None:
        """SIGINT or SIGTERM: end after this step; a second one ends the process as usual."""
        self.stopped = True
        signal.signal(number, signal.SIG_DFL)

    def run(self) -> None:
        """All steps."""
        args = self.args
        every = args.log_every or (10 if self.device.type == "cuda" else 1)
        self._write(self.about)
        sizes = f"{self.n_params / 1e6:.2f} M parameters, {self.size} ranks, {args.batch} x {args.seq} bytes a rank"
        self._say(f"zero-{args.stage}  {sizes}, {args.backend}, {args.dtype}")
        times = list[float]()
        begin, done = time.perf_counter(), 0
        for step in range(args.steps):
            seen, work = self._step(step)
            last = step + 1 == args.steps
            if not (last or (step + 1) % every == 0):
                continue
            work.wait()
            *losses, stopped = seen.tolist()
            loss = sum(losses) / self.size
            times.append((time.perf_counter() - begin) * 1e3 / (step + 1 - done))
            begin, done = time.perf_counter(), step + 1
            self._write({"step": step, "loss": loss, "step_ms": round(times[-1], 3)})
            if last or (step + 1) % max(10, every) == 0:
                took = statistics.median(times[-10:])
                self._say(f"step {step + 1:5d}/{args.steps}  loss {loss:.4f}  {took:.0f} ms")
            if stopped:
                self._say(f"stopped after step {step + 1}")
                break

    @property
    def about(self) -> dict[str, Any]:
        """What the log says of the run."""
        about: dict[str, Any] = {
            n: getattr(self.args, n) for n in ("stage", "backend", "dtype", "batch", "steps")
        }
        about["model"] = {name: getattr(self.args, name) for name in ("layers", "width", "heads", "seq")}
        return about | {"n_params": self.n_params, "n_ranks": self.size, "device": str(self.device)}

    def _step(self, step: int) -> tuple[torch.Tensor, Any]:
        """One optimizer step; the losses of all ranks, and whether one was told to stop, are still on their way."""
        args = self.args
        seen = torch.zeros(self.size + 1, device=self.device)
        for micro in range(args.accumulate):
            first = (micro * self.size + self.rank) * args.batch
            batch = args.corpus.batch(first, first + args.batch, step=step, seed=args.seed)
            if self.device.type == "cuda":
                batch = [t.pin_memory().to(self.device, non_blocking=True) for t in batch]
            loss = self.engine.model(*batch)
            self.engine.backward(loss)
            seen[self.rank] += loss.detach() / args.accumulate
        seen[-1] = float(self.stopped or os.getppid() != self.parent)  # told to stop, or the launcher died
        work = dist.all_reduce(seen, async_op=True)
        self.engine.step()
        return seen, work

    def _write(self, record: dict[str, Any]) -> None:
        if self.log:
            print(json.dumps(record), file=self.log, flush=True)

    def _say(self, line: str) -> None:
        if self.rank == 0 and not self.args.quiet:
            print(line, flush=True)
