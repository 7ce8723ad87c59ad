"""The job's command line, and all that can be said against it before a process is started."""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from ..buffers.settings import Settings
from .data import Corpus
from .model import ModelConfig
from .optimizers import optimizer_of
from .parallel import require_fit
from .recompute import MODES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Embedding and head of a small model are messages of their own here, so that it emits several sizes as a large one.
MIN_UNIT = 2**13
#: MiB of a bucket, at least: smaller ones send a latency for each handful of elements.
LEAST_BUCKET = 0.001


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _whole(text: str, least: int = 0) -> int:
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} up, not {text}")
    return int(text)


def _amount(text: str, least: float = 0.0) -> float:
    with suppress(ValueError):
        value = float(text)
        if value > 0 and least <= value < 1e9:
            return value
    bound = f"of at least {least:g}" if least else "above 0"
    raise argparse.ArgumentTypeError(f"a number {bound} and below 1e9, not {text}")


def _every(text: str) -> int:
    return 0 if text == "auto" else _whole(text, least=1)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    return path


_count = partial(_whole, least=1)


def parser() -> argparse.ArgumentParser:
    """The command line; every option has a default that runs on two CPU cores."""
    p = _Parser("zero_workload", description="Train a byte-level transformer under ZeRO.")
    for add in (_job, _model, _engine, _shared, _left):
        add(p.add_argument)
    return p


def _job(add: Callable[..., object]) -> None:
    add("--steps", type=_count, default=100, help="optimizer steps")
    add("--ranks", type=_count, default=2, help="processes to start; under torchrun its own number counts")
    backends = ("gloo", "nccl", "emulated")
    add("--backend", choices=backends, default="gloo", help="what moves the bytes")
    add("--device", choices=("cpu", "cuda"), help="default: cuda with nccl, else cpu")
    add("--batch", type=_count, default=4, help="sequences a rank and micro-batch")
    add("--accumulate", type=_count, default=1, help="micro-batches a step")
    add("--lr", type=float, default=2e-3, help="learning rate")
    add("--clip", type=_amount, help="clip the global gradient norm to this")
    add(
        "--optimizer",
        metavar="MODULE:CLASS",
        help="any elementwise one, or torch.optim:Muon; default fused AdamW",
    )
    add(
        "--elementwise",
        action="store_true",
        help="--optimizer looks at each element by itself; known of torch's",
    )
    add("--seed", type=int, default=0, help="model, data order")
    add("--timeout", type=_amount, default=300, help="seconds until a collective counts as hung")


def _model(add: Callable[..., object]) -> None:
    default = ModelConfig()
    add("--layers", type=_count, default=default.layers, help="transformer blocks")
    add("--width", type=_count, default=default.width, help="model width")
    add("--heads", type=_count, default=default.heads, help="attention heads")
    add("--seq", type=_count, default=default.seq, help="bytes in a sequence")
    add("--recompute", choices=MODES, default="none", help="what backward recomputes instead of keeping it")
    add(
        "--recompute-every",
        type=_every,
        default=1,
        metavar="N",
        help="blocks at a time; auto: what holds least",
    )
    add(
        "--materialised",
        action="store_true",
        help="attention holds its probabilities, as the formulas have it",
    )


def _engine(add: Callable[..., object]) -> None:
    add("--stage", type=int, default=3, help="0 data parallel, 1 optimizer, 2 gradients, 3 parameters")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="dtype of parameters and messages")
    add("--reduce-dtype", choices=tuple(DTYPES), help="dtype gradients are reduced in; default --dtype")
    size = partial(_amount, least=LEAST_BUCKET)
    add("--bucket-mb", type=size, default=1.0, help="bucket size in MiB, stages 0 to 2")
    add("--unit", choices=("block", "layer"), default="block", help="what stage 3 gathers at once")
    add("--prefetch", type=_whole, default=1, help="units stage 3 gathers ahead")
    add("--hybrid", type=_whole, metavar="N", help="at stage 3, replicate units below N elements")
    add("--classic", action="store_true", help="at stage 1, all-reduce the gradients")
    add("--offload", action="store_true", help="masters and optimizer states in host memory")


def _shared(add: Callable[..., object]) -> None:
    add("--hsdp", type=_count, metavar="N", help="shard over N ranks, a node's, and replicate over the rest")
    shared = "ranks that share each matrix; their checkpoints are partitioned"
    add("--tensor-parallel", type=_count, default=1, metavar="N", help=shared)
    apart = "a communicator of its own for reduce-scatters"
    add("--reduce-scatter-group", action="store_true", help=apart)


def _left(add: Callable[..., object]) -> None:
    add("--log", type=_file, metavar="FILE", help="JSON lines: the run, then one a step; --resume adds to it")
    add("--log-every", type=_count, help="read the loss every so many steps; default 1, on cuda 10")
    unseen = "steps between losses on held-out text; default: at the end"
    add("--held-out-every", type=_count, metavar="N", help=unseen)
    add("--save", type=Path, metavar="DIR", help="write the state there at the end, and when told to stop")
    add("--resume", type=Path, metavar="DIR", help="go on from what --save wrote, on any number of ranks")
    add("--quiet", action="store_true", help="print nothing but errors")


def is_rank(env: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as a rank.

    The variables of a pod or a node may name a RANK and a WORLD_SIZE too, but no LOCAL_RANK.
    """
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= env.keys()


def check(args: argparse.Namespace) -> None:
    """Complete the command line and say what is wrong with it before any process starts. Raises ValueError."""
    _check_device(args)
    ranks = int(os.environ["WORLD_SIZE"]) if is_rank(os.environ) else args.ranks
    require_fit(ranks, args.hsdp or 0, args.tensor_parallel)
    if args.hsdp and args.hsdp < ranks // args.tensor_parallel and args.stage < 2:
        raise ValueError(f"--hsdp replicates shards of gradients: take stage 2 or 3, not {args.stage}")
    if args.resume and not args.resume.is_dir():
        raise ValueError(f"--resume {args.resume}: there is no such folder")
    shape = ("layers", "width", "heads", "seq", "recompute", "recompute_every", "materialised")
    args.model = ModelConfig(**{name: getattr(args, name) for name in shape})
    if args.heads % args.tensor_parallel:
        raise ValueError(
            f"{args.heads} heads are not a multiple of {args.tensor_parallel} ranks that share matrices"
        )
    args.zero = _settings(args)
    args.made, args.elementwise = optimizer_of(args.optimizer, args.lr, args.elementwise)
    if args.save:
        _require_folder(args.save)
    args.corpus = Corpus(args.seq)


def _require_folder(save: Path) -> None:
    """Raise ValueError where it is known already that the folder for ``--save`` cannot be made or written."""
    there = save.absolute()
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"--save {save}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--save {save}: nothing can be written in {there}")


def _check_device(args: argparse.Namespace) -> None:
    """Complete the device, and raise ValueError where it does not go with the backend or this machine."""
    args.device = args.device or ("cuda" if args.backend == "nccl" else "cpu")
    if args.backend == "emulated" and not hasattr(dist.Backend, "EMULATED"):
        start = "start the job with `dynamiccl tune --cluster PRESET`"
        raise ValueError(f"backend emulated is not there: {start}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that PyTorch can use: take --backend gloo --device cpu")
    if args.backend == "nccl" and args.device == "cpu":
        raise ValueError("backend nccl needs --device cuda")


def _settings(args: argparse.Namespace) -> dict[str, object]:
    """The arguments of ``zero``, in range. Raises ValueError."""
    same = ("stage", "prefetch", "unit", "hybrid", "classic", "offload")
    found: dict[str, object] = {name: getattr(args, name) for name in same}
    found |= {"param_dtype": DTYPES[args.dtype], "reduce_dtype": DTYPES.get(args.reduce_dtype)}
    found |= {"max_norm": args.clip, "gradient_accumulation": args.accumulate, "min_unit": MIN_UNIT}
    found["bucket_bytes"] = max(1, int(args.bucket_mb * 2**20))
    Settings(**found)  # type: ignore[arg-type]  # refuses values out of range
    return found
