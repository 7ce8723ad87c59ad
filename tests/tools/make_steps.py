"""Make ``envs/sim/steps.npz`` anew: ``python tests/tools/make_steps.py`` (some minutes; ``--only gpt2`` for a part).

What the dry runs issued is kept in ``tests/data/recorded_steps.npz``; ``workloads.py`` makes the steps of it.

Dry runs of public models under our ZeRO engine and PyTorch's FSDP2, with every operation of the second step seen by a
dispatch mode: each collective in the order of its issue, the arithmetic between them (counted by PyTorch's formulas),
which compute a reduce-scatter takes its gradients from and which compute first reads what was gathered. Times are not
recorded: compute is kept in FLOPs.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import dry_run
import numpy as np
import torch
from dynamiccl.envs.sim.workloads import STEPS

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from public_models import PRESETS
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from workloads import RECORDED, Recording, made, recordings

MIB = 2**20
ENGINES = {
    "zero-3": ("zero", 3, {}),
    "zero-3 by layer": ("zero", 3, {"unit": "layer"}),
    "zero-2 25 MiB": ("zero", 2, {"bucket_bytes": 25 * MIB}),
    "zero-2 100 MiB": ("zero", 2, {"bucket_bytes": 100 * MIB}),
    "zero-2 500 MB": ("zero", 2, {"bucket_bytes": 500_000_000}),
    "zero-1 250 MiB": ("zero", 1, {"bucket_bytes": 250 * MIB}),
    "fsdp2-3": ("fsdp2", 3, {}),
    "fsdp2-2": ("fsdp2", 2, {}),
}
#: Which models people train by which engine; the largest only by few, by layer only where that is not too many calls.
PLAN = {
    "gpt2": tuple(ENGINES),
    "gpt2-xl": ("zero-3", "zero-2 100 MiB", "fsdp2-3", "fsdp2-2"),
    "llama-7b": (
        "zero-3",
        "zero-3 by layer",
        "zero-2 100 MiB",
        "zero-2 500 MB",
        "zero-1 250 MiB",
        "fsdp2-3",
        "fsdp2-2",
    ),
    "llama-13b": ("zero-3", "zero-3 by layer", "zero-2 500 MB", "fsdp2-3"),
    "llama-70b": ("zero-3", "fsdp2-3"),
    "moe-8x7b": ("zero-3", "zero-2 500 MB", "fsdp2-3"),
}
RANKS = 16
#: Layers of the largest models: they are alike, and what more of them would add is only more of the same.
LAYERS = {"moe-8x7b": 8, "llama-13b": 16, "llama-70b": 16}


def shape_of(model):
    return dataclasses.replace(PRESETS[model], layers=LAYERS.get(model, PRESETS[model].layers))


class Recorder(dry_run.CollectiveLog):
    """Also counts the arithmetic, and follows data from collectives to compute and back."""

    last = None

    def __init__(self, shape):
        super().__init__()
        Recorder.last, self.shape = self, shape
        self.ops = []  # [kind, FLOPs or bytes, set of operations it waits for]
        self.writer = {}  # storage -> operation that wrote it last
        self.segment = -1  # of compute, that runs now
        self.late = False  # the optimizer has begun

    def compute(self, waits=frozenset(), kind="compute"):
        """The segment of compute that runs now: a new one where it waits for more, or a collective lies between."""
        if self.segment < 0 or not waits <= self.ops[self.segment][2]:
            self.ops.append([kind, 0.0, set(waits)])
            self.segment = len(self.ops) - 1
        return self.segment

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        n_before = len(self.calls)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name, returns = func._schema.name, func._schema.returns
        if len(self.calls) > n_before:
            self.collective(self.calls[-1], args)
        elif not name.startswith("c10d") and not (
            returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        ):
            kwargs = kwargs or {}
            waits = {self.writer.get(storage(t), NOBODY) for t in tensors((args, kwargs))}
            # Compute waits for what it reads of gathers; what was reduced is only read beside it, and by the optimizer.
            waits = {i for i in waits if i < len(self.ops) and self.ops[i][0] == "all_gather"}
            if self.late or "all_gather_copy_in" in name:  # on a stream of its own
                waits = set()
            flops = self.flops(func, args, kwargs, out)
            if flops or waits:
                self.ops[self.compute(waits)][1] += flops
            arguments = zip(func._schema.arguments, args, strict=False)
            written = [value for a, value in arguments if a.alias_info is not None and a.alias_info.is_write]
            for t in tensors((out, written, kwargs.get("out"))):
                self.writer[storage(t)] = self.segment if self.segment >= 0 else NOBODY
        return out

    def collective(self, call, args):
        # What is reduced comes from the compute so far, what is gathered late from the optimizer.
        compute = [i for i, op in enumerate(self.ops) if op[0] in ("compute", "optimizer")]
        waits = set(compute[-1:]) if call.func != "all_gather" or self.late else set()
        self.ops.append([call.func, call.n_bytes, waits])
        for t in tensors(args[0]):
            self.writer[storage(t)] = len(self.ops) - 1
        self.segment = -1

    def flops(self, func, args, kwargs, out):
        if "scaled_dot_product" in func._schema.name:
            backward = "backward" in func._schema.name
            q, k = [t for t in args if isinstance(t, torch.Tensor)][1 if backward else 0 :][:2]
            return (5.0 if backward else 2.0) * q.numel() * k.shape[-2]  # causal: half of the squares
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            return 0.0
        flops = float(count(*args, **kwargs, out_val=out))
        # In the dry run every expert sees every token; two of them would.
        sizes = {n for t in tensors(args) for n in t.shape}
        return flops * 2 / self.shape.experts if self.shape.experts and self.shape.hidden in sizes else flops


NOBODY = 2**31


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def record(model, engine):
    """One Recording."""
    kind, stage, settings = ENGINES[engine]
    shape = shape_of(model)
    original, step = dry_run.CollectiveLog, torch.optim.SGD.step

    def stepping(self, *args, **kwargs):
        log = Recorder.last
        if not log.late:
            log.late, log.segment = True, -1
            log.compute(
                frozenset(i for i, op in enumerate(log.ops) if op[0] == "reduce_scatter"), "optimizer"
            )
        return step(self, *args, **kwargs)

    dry_run.CollectiveLog, torch.optim.SGD.step = lambda: Recorder(shape), stepping
    try:
        dry_run.dry_run(shape, ranks=RANKS, stage=stage, engine=kind, **settings)
    finally:
        dry_run.CollectiveLog, torch.optim.SGD.step = original, step
    return Recording.of(f"{model} {engine}", Recorder.last.ops)


def save(recordings):
    """Write all into one file."""
    np.savez_compressed(
        RECORDED,
        name=np.array([r.name for r in recordings]),
        op_at=np.cumsum([0, *(len(r.kind) for r in recordings)]),
        wait_at=np.cumsum([0, *(len(r.waits) for r in recordings)]),
        kind=np.concatenate([r.kind for r in recordings]),
        value=np.concatenate([r.value for r in recordings]),
        waits=np.concatenate([r.waits for r in recordings]),
    )


def save_steps(works):
    """Write what ``envs.sim.workloads.all_works`` reads."""
    np.savez_compressed(STEPS, **vars(works.steps), **{k: v for k, v in vars(works).items() if k != "steps"})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a model of PLAN: the others are kept as they are")
    only = parser.parse_args().only
    kept = {} if only is None or not RECORDED.exists() else dict(recordings())
    for model, engines in PLAN.items():
        for engine in engines:
            if only in (None, model):
                begin = time.monotonic()
                found = record(model, engine)
                kept[found.name] = found
                took = time.monotonic() - begin
                print(
                    f"{found.name}: {len(found.kind)} operations, {took:.0f} s", file=sys.stderr, flush=True
                )
    order = [f"{model} {engine}" for model, engines in PLAN.items() for engine in engines]
    save([kept[name] for name in order if name in kept])
    recordings.cache_clear()
    save_steps(made())


if __name__ == "__main__":
    main()
