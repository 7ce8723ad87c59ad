"""The minimal ZeRO does what its reader is told: the worked example, the engine's numbers, 60 lines a stage."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dry_run import CollectiveLog
from dynamiccl.zero_workload import minimal, zero
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import Transformer
from paths import ROOT
from test_zero import TINY, adamw
from world import World

STAGES = {1: minimal.Stage1, 2: minimal.Stage2, 3: minimal.Stage3}


def by_hand(stage: int) -> tuple[float, list[float], list[float], list[float], int]:
    """Loss, gradient shards and weight shards of this rank, all weights, bytes of whole parameters at rest."""
    model, row = minimal.example()
    job = STAGES[stage](model, partial(torch.optim.Adam, lr=0.1))
    loss = 0.5 * (model(row[:2]) - row[2]).square().sum()
    job.backward(loss)
    assert all(p.grad is None for p in job.params)
    grads = [v for shard in job.shards.values() if shard.grad is not None for v in shard.grad.tolist()]
    job.step()
    held = sum(p.untyped_storage().nbytes() for p in job.params)
    shards = [v for shard in job.shards.values() for v in shard.tolist()]
    for p in job.params:
        job.gather(p)
    return loss.item(), grads, shards, torch.cat([p.detach().flatten() for p in job.params]).tolist(), held


@pytest.mark.parametrize("stage", STAGES)
def test_the_worked_example(stage: int, two: World) -> None:
    # Parameter by parameter: w1, w3 and w4 are rank 0's, w2 is rank 1's.
    expected = ((10.125, [-5.5, -2.75, -5.0], [2.1, 1.1, 0.6]), (15.125, [-2.75, 0.0, 0.0], [-2.9, 0.0, 0.0]))
    for (loss, grads, shards, weights, held), (at, slopes, mine) in zip(
        two.run(by_hand, stage), expected, strict=True
    ):
        assert (loss, grads) == (at, slopes)
        assert shards == pytest.approx(mine, rel=2e-7) and weights == pytest.approx(
            [2.1, -2.9, 1.1, 0.6], rel=2e-7
        )
        assert held == (0 if stage == 3 else 24)  # two of the parameters have one element of filling


def against_the_engine(stage: int) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses of the minimal ZeRO and of the engine, and what the former sent in a step, in parameters."""
    losses: tuple[list[float], list[float]] = [], []
    sent: dict[str, float] = {}
    corpus, first = Corpus(TINY.seq), 4 * dist.get_rank()
    for which, into in enumerate(losses):
        torch.manual_seed(0)
        model = Transformer(TINY)
        settings: dict[str, Any] = {"stage": stage, "param_dtype": torch.float32}
        job: Any = zero(model, adamw(1e-2), **settings) if which else STAGES[stage](model, adamw(1e-2))
        n_bytes = 4 * sum(flat.numel() for flat in job.flat.values()) if not which else 0
        for step in range(5):
            with CollectiveLog() as log:
                loss = model(*corpus.batch(first, first + 4, step=step, seed=0))
                job.backward(loss)
                job.step()
            into.append(loss.item())
        for call in log.calls if not which else ():
            func = call.func.replace("all_to_all", "reduce_scatter")
            sent[func] = sent.get(func, 0) + call.n_bytes / n_bytes
    return *losses, sent


@pytest.mark.parametrize("stage", STAGES)
def test_it_equals_the_engine(stage: int, two: World) -> None:
    for minimal_losses, engines, sent in two.run(against_the_engine, stage):
        assert minimal_losses == pytest.approx(engines, rel=1e-6) and engines[-1] < engines[0]
        assert sent == pytest.approx({"reduce_scatter": 1, "all_gather": 2 if stage == 3 else 1})


def test_a_stage_is_read_in_minutes() -> None:
    tree = ast.parse(inspect.getsource(minimal))
    lines = {n.name: (n.end_lineno or 0) - n.lineno + 1 for n in tree.body if isinstance(n, ast.ClassDef)}
    assert set(lines) == {"Stage1", "Stage2", "Stage3"} and max(lines.values()) <= 60, lines


def run_snippet(code: str) -> str:
    """What the README's example prints; the ranks are joined already, so that its first line has no more to do."""
    join, joined = dist.init_process_group, list[str]()
    dist.init_process_group = joined.append  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        dist.init_process_group = join
    assert joined == ["gloo"]
    return said.getvalue()


def test_the_readmes_snippet_runs_as_it_stands(two: World) -> None:
    readme = (ROOT / "zero_workload" / "README.md").read_text()
    snippet, *_ = re.findall(r"```python\n(.*?)```", readme, flags=re.S)  # GPT-2's has its own test
    for rank, said in enumerate(two.run(run_snippet, snippet)):
        line = re.fullmatch(rf"rank {rank}: loss ([0-9.]+), at rest (.*)\n", said)
        n_params = 64 * 256 + 256 + 256 * 64 + 64
        assert line and float(line[1]) < 0.7  # it begins at 1
        assert eval(line[2]) == {
            "weights": 2 * n_params,
            "gradients": 2 * n_params,
            "optimizer": 4 * n_params,
        }
