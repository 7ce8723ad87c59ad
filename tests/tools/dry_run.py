"""The collectives of a training step without the machines: fake tensors, a fake process group, every real call.

``python tests/tools/dry_run.py llama-7b --ranks 64 --stage 3`` prints them.

The engine (or FSDP2) runs as it would; only arithmetic and memory are missing. So the calls, their bytes and their
order are exactly those of a real run on so many ranks. The two differ at stage 3: FSDP2 gathers embedding and head with
the root, ours by themselves; each pads in its own way; and ours keeps what backward begins with.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from dynamiccl.zero_workload.engine import Engine, zero
from dynamiccl.zero_workload.job.parallel import groups

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from peers import Peer
from public_models import PRESETS, Shape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

#: c10d operator -> name, and which argument is the whole buffer.
_OPS = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}


class Call(NamedTuple):
    """One collective: ``n_bytes`` of its whole buffer (ranks x shard), on the group of that name and size, whose ranks
    lie ``stride`` apart.
    """

    func: str
    n_bytes: int
    dtype: str
    group: str
    n_ranks: int
    stride: int = 1


class CollectiveLog(TorchDispatchMode):
    """Within it, every collective of this thread is noted in ``calls``, and when in ``times_ns``: ours, FSDP2's, DDP's
    alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.times_ns: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, spelled = func._schema.name.partition("::")
        if space == "c10d" and spelled in _OPS:
            name, position = _OPS[spelled]
            whole = args[position][0] if isinstance(args[position], list | tuple) else args[position]
            self._note(
                name,
                whole,
                next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)),
            )
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        first, second = (*dist.get_process_group_ranks(group), 1)[:2]
        call = Call(name, tensor.nbytes, dtype, group.group_name, group.size(), max(1, second - first))
        self.calls.append(call)
        self.times_ns.append(time.perf_counter_ns())


def dry_run(
    shape: Shape, *, ranks: int, stage: int, engine: str = "zero", shard: int = 0, **settings: Any
) -> tuple[list[Call], int]:
    """The collectives of one step in steady state (the second), in order, as rank 0 sees them, in bfloat16.

    Arguments and errors are those of :func:`dry_steps`. Returns the calls, and the number of parameters.
    """
    logs, n_params = dry_steps(shape, 2, ranks=ranks, stage=stage, engine=engine, shard=shard, **settings)
    return logs[-1].calls, n_params


def dry_steps(
    shape: Shape,
    steps: int,
    *,
    ranks: int,
    stage: int,
    engine: str = "zero",
    shard: int = 0,
    apart: bool = False,
    fake: bool = True,
    **settings: Any,
) -> tuple[list[CollectiveLog], int]:
    """The collectives of the first ``steps``, each with its own log.

    Args:
        shape: of the transformer, see ``public_models.PRESETS``.
        ranks: size of the fake group.
        stage: 0 to 3 of ``engine="zero"`` (ours); of ``"fsdp2"`` 2 (parameters stay gathered) or 3.
        shard: HSDP: ranks over which ZeRO shards, the rest are replicas; 0: all.
        apart: reduce-scatters have a communicator of their own.
        fake: no arithmetic and no memory, for models of any size. A small one is three times as quick with both.
        settings: more arguments of ``zero()``; FSDP2 knows ``reduce_dtype``.

    Returns:
        The logs, and the number of parameters.

    Raises:
        ValueError: a setting out of range, or a process group exists already.
    """
    if engine == "fsdp2" and (stage not in (2, 3) or shard):
        raise ValueError("fsdp2 runs at stages 2 (no resharding) and 3, over all ranks")
    if dist.is_initialized():
        raise ValueError("a dry run needs a process without a process group")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        cut = groups(shard, apart)
        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))  # FSDP2's
        with FakeTensorMode() if fake else contextlib.nullcontext(), torch.device("cpu"):
            model = shape.build()
            n_params = sum(p.numel() for p in model.parameters())
            job: Engine | Peer
            if engine == "fsdp2":
                name = "fsdp2" if stage == 3 else "fsdp2-no-reshard"
                job = Peer(name, model, torch.optim.SGD, mesh, **settings)
            else:
                job = zero(model, torch.optim.SGD, stage=stage, **cut, **settings)
            tokens = torch.zeros(1, shape.seq, dtype=torch.int64)
            logs = []
            for _ in range(steps):
                with CollectiveLog() as log:
                    for _ in range(settings.get("gradient_accumulation", 1)):
                        job.backward(model(tokens, tokens))
                        job.step()
                logs.append(log)
    finally:
        dist.destroy_process_group()
    return logs, n_params


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the collectives of one training step, in order.")
    parser.add_argument("model", choices=tuple(PRESETS))
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--stage", type=int, default=3)
    args = parser.parse_args()
    calls, n_params = dry_run(PRESETS[args.model], ranks=args.ranks, stage=args.stage)
    print(f"{n_params / 1e9:.2f} B parameters")
    for call, same in groupby(calls):
        print(f"{len(list(same)):4} x {call.func:14} of {call.n_bytes / 2**20:10.2f} MiB in {call.dtype}")


if __name__ == "__main__":
    main()
