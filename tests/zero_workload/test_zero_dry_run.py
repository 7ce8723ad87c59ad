"""Dry runs, which bring their own process group, against formulas."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from dry_run import dry_run
from dynamiccl.zero_workload.engine.agreement import message_numel
from paths import TOOLS
from public_models import PRESETS, Shape


def dry(model: str, ranks: int, stage: int, engine: str = "zero", **settings: Any) -> tuple[Any, int]:
    return dry_run(PRESETS[model], ranks=ranks, stage=stage, engine=engine, **settings)


def total(calls: Any, func: str) -> int:
    return sum(call.n_bytes for call in calls if call.func == func)


@pytest.mark.slow
def test_dry_run_of_gpt2_adds_up_and_differs_from_fsdp2_as_documented() -> None:
    ours, n_params = dry("gpt2", 16, 3, keep_last=False)
    assert n_params == 124_439_808 and all(c.n_ranks == 16 for c in ours)
    (note,) = (c for c in ours if c.dtype != "bfloat16")  # what ranks tell each other, see engine.agreement
    assert (note.func, note.n_bytes) == (
        "all_reduce",
        4 * message_numel(len(list(PRESETS["gpt2"].build().parameters()))),
    )
    assert total(ours, "all_gather") == 2 * total(ours, "reduce_scatter")
    assert total(ours, "reduce_scatter") == pytest.approx(2 * n_params, rel=1e-4)
    theirs, _ = dry("gpt2", 16, 3, "fsdp2")
    # FSDP2 keeps position and embedding with the root; padding apart, both reduce the same bytes.
    assert total(theirs, "reduce_scatter") == pytest.approx(total(ours, "reduce_scatter"), rel=1e-3)
    blocks = [c.n_bytes for c in theirs if c.func == "reduce_scatter"][:-1]
    assert len(blocks) == 12
    assert sorted(blocks)[0] in {c.n_bytes for c in ours if c.func == "reduce_scatter"}
    for stage in (1, 2):
        calls, _ = dry("gpt2", 16, stage)
        assert (
            total(calls, "all_gather")
            == total(calls, "reduce_scatter")
            == pytest.approx(2 * n_params, rel=1e-4)
        )


@pytest.mark.slow
def test_dry_runs_of_jobs_cut_in_more_ways_than_one_add_up() -> None:
    """GPT-2 on 16 ranks, of which 8 share a shard."""

    def by_group(shape: Shape, **ways: Any) -> dict[tuple[str, int, int], int]:
        sums: dict[tuple[str, int, int], int] = {}
        for call in dry_run(shape, ranks=16, **ways)[0]:
            if call.func != "all_reduce" or call.dtype != "float32":  # what ranks tell each other
                key = call.func, call.n_ranks, call.stride
                sums[key] = sums.get(key, 0) + call.n_bytes
        return sums

    small = replace(PRESETS["gpt2"], layers=2)
    with torch.device("meta"):
        whole = 2 * sum(p.numel() for p in small.build().parameters())
    near = {"rel": 1e-3}  # padding
    sent = by_group(small, stage=2, shard=8)
    assert sent == {
        ("reduce_scatter", 8, 1): pytest.approx(whole, **near),
        ("all_gather", 8, 1): pytest.approx(whole, **near),
        ("all_reduce", 2, 8): pytest.approx(whole / 8, **near),
    }
    in_full = by_group(small, stage=2, shard=8, reduce_dtype=torch.float32)
    assert in_full["reduce_scatter", 8, 1] == 2 * sent["reduce_scatter", 8, 1]
    assert in_full["all_gather", 8, 1] == sent["all_gather", 8, 1]
    with pytest.raises(ValueError, match="over all ranks"):
        dry_run(small, ranks=16, stage=3, shard=4, engine="fsdp2")


@pytest.mark.parametrize(
    ("model", "n_params"),
    [("llama-13b", 13_015_864_320), ("llama-70b", 68_976_648_192), ("moe-8x7b", 46_702_792_704)],
)
def test_public_models_have_their_published_size(model: str, n_params: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in PRESETS[model].build().parameters()) == n_params


@pytest.mark.slow
def test_dry_run_of_llama_7b_takes_seconds() -> None:
    code = (
        "import json, time; begin = time.process_time()\n"
        "from dry_run import dry_run\n"
        "from public_models import PRESETS\n"
        "calls, n = dry_run(PRESETS['llama-7b'], ranks=128, stage=3, keep_last=False)\n"
        # Of this program alone: ru_maxrss would hold the peak of the process that started it.
        "peak = 1024 * int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n"
        "of = {f: sum(c.n_bytes for c in calls if c.func == f) for f in ('all_gather', 'reduce_scatter')}\n"
        "print(json.dumps([n, of['all_gather'], of['reduce_scatter'], time.process_time() - begin, peak]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=TOOLS
    )
    n_params, gathered, reduced, seconds, peak = json.loads(done.stdout)
    assert n_params == 6_738_415_616
    assert (gathered, reduced) == (4 * n_params, 2 * n_params)
    assert seconds < 30 and peak < 1.5e9
