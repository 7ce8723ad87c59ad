"""What needs no ranks: the planner against published figures, dry runs against formulas, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import invoke
from dry_run import dry_run
from dynamiccl.zero_workload.job.planner import Request, advice, checkpointed_bytes, estimate, held_and_sent
from public_models import PRESETS, Shape

# The planner ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "ranks", "precision", "expected"),
    [
        (7.5e9, 64, "mixed", [120, 31.4, 16.6, 1.9]),
        (7e9, 8, "mixed", [112, 38.5, 26.25, 14]),
        (7e9, 8, "fp32", [112, 63, 38.5, 14]),
        (13e9, 8, "mixed", [208, None, 48.75, None]),
        (13e9, 32, "mixed", [208, None, None, 6.5]),
    ],
)
def test_planner_reproduces_published_memory(
    params: float, ranks: int, precision: str, expected: list[float | None]
) -> None:
    stages = estimate(Request(params, ranks, precision=precision))["stages"]
    for stage, want in zip(stages, expected, strict=True):
        parts = stage["weights_bytes"] + stage["gradients_bytes"] + stage["optimizer_bytes"]
        assert stage["total_bytes"] == parts
        if want is not None:
            digits = len(str(want).partition(".")[2])
            assert round(stage["total_bytes"] / 1e9, digits) == want


def test_planner_traffic_and_advice() -> None:
    result = estimate(Request(7e9, 8))
    assert [s["traffic_bytes_per_step"] for s in result["stages"]] == [24.5e9, 24.5e9, 24.5e9, 36.75e9]
    assert all(s["traffic_bytes_per_step"] == 0 for s in estimate(Request(7e9, 1))["stages"])
    # 38.5 GB at stage 1 and what a step needs beside it fit into 45 GB, but not beside CUDA's context and the rest
    bare, real = (estimate(Request(7e9, 8, memory=45e9, runtime=gb * 1e9)) for gb in (0, 4))
    assert bare["stages"][1]["fits"] and not real["stages"][1]["fits"]
    assert result["runtime_bytes"] == 3e9
    # 6 inputs of 6 layers; one layer holds 14 of them and the attention of 4 heads
    shape = {"layers": 32, "hidden": 512, "seq": 3, "batch": 2}
    assert checkpointed_bytes(Request(7e9, 8, **shape)) == 2 * (6 * 3072 + 6 * (14 * 3072 + 2 * 4 * 9))
    assert result["recommended_stage"] == 1 and estimate(Request(1e9, 1))["recommended_stage"] == 0
    assert estimate(Request(13e9, 8, memory=60e9))["recommended_stage"] == 2
    assert estimate(Request(13e9, 8, memory=40e9))["recommended_stage"] == 3
    nothing = estimate(Request(70e9, 8))
    assert nothing["recommended_stage"] is None and "nothing fits" in nothing["reason"]
    assert "stage 3 holds 2.00 GB" in advice(10**9, 8, 1, "mixed")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", 0),
        ("params", float("nan")),
        ("ranks", 0),
        ("memory", float("inf")),
        ("precision", "fp8"),
        ("runtime", -1),
    ],
)
def test_planner_refuses(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        estimate(Request(**{"params": 7e9, "ranks": 8, field: value}))


def test_planner_of_jobs_cut_in_more_ways_than_one() -> None:
    job = Request(7e9, 64, layers=32, hidden=4096, batch=2)
    held = held_and_sent(replace(job, shard=8, reduce_bytes=4), 3)
    assert held["weights_bytes"] == 2 * 7e9 / 8 and held["gradients_bytes"] == 4 * 7e9 / 8
    assert held["optimizer_bytes"] == 12 * 7e9 / 8
    assert held["shard_sent_bytes"] == pytest.approx(7 / 8 * (4 + 2 * 2) * 7e9)
    assert held["replicas_sent_bytes"] == pytest.approx(2 * 7 / 8 * 4 * 7e9 / 8)
    for ways in ({"shard": 6}, {"shard": 128}):
        with pytest.raises(ValueError, match="64 ranks are not"):
            replace(job, **ways)


LARGE = ("plan", "--params", "69e9", "--ranks", "64", "--layers", "80", "--hidden", "8192")


@pytest.mark.parametrize(
    ("ways", "recommended", "total"),
    [
        ("", 3, 17.25),
        ("--shard 8", None, 138),  # 16 bytes a parameter on 8 ranks
        ("--shard 16 --fp32-reduce", None, 77.625),  # 18 on 16
        ("--accumulate 4", 3, 19.40625),  # 18 on 64
    ],
)
def test_the_verdict_counts_how_the_job_is_cut(ways: str, recommended: int | None, total: float) -> None:
    result = command(*LARGE, *ways.split())
    assert result["stages"][3]["total_bytes"] == total * 1e9
    assert result["recommended_stage"] == recommended, result["reason"]
    shown = invoke([*LARGE, *ways.split()]).output
    assert f" {total:.4g} " in shown and (f"use stage {recommended}" if recommended else "nothing fits") in shown


# Dry runs: they bring their own process group ------------------------------------------------------------------------


def dry(model: str, ranks: int, stage: int, engine: str = "zero", **settings: Any) -> tuple[Any, int]:
    return dry_run(PRESETS[model], ranks=ranks, stage=stage, engine=engine, **settings)


def total(calls: Any, func: str) -> int:
    return sum(call.n_bytes for call in calls if call.func == func)


@pytest.mark.slow
def test_dry_run_of_gpt2_adds_up_and_differs_from_fsdp2_as_documented() -> None:
    ours, n_params = dry("gpt2", 16, 3, keep_last=False)
    assert n_params == 124_439_808 and all(c.n_ranks == 16 for c in ours)
    (note,) = (c for c in ours if c.dtype != "bfloat16")  # what ranks tell each other: zero_workload/health.py
    assert (note.func, note.n_bytes) == ("all_reduce", 4 * (len(list(PRESETS["gpt2"].build().parameters())) + 1))
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
        assert total(calls, "all_gather") == total(calls, "reduce_scatter") == pytest.approx(2 * n_params, rel=1e-4)


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
    planned = held_and_sent(Request(whole / 2, 16, layers=2, hidden=768, seq=1024, shard=8), 2)
    assert planned["shard_sent_bytes"] == pytest.approx(
        7 / 8 * (sent["reduce_scatter", 8, 1] + sent["all_gather", 8, 1]), **near
    )
    assert planned["replicas_sent_bytes"] == pytest.approx(sent["all_reduce", 2, 8], **near)  # 2 (R-1)/R is 1
    with pytest.raises(ValueError, match="over all ranks"):
        dry_run(small, ranks=16, stage=3, shard=4, engine="fsdp2")


@pytest.mark.parametrize(
    ("model", "n_params"), [("llama-13b", 13_015_864_320), ("llama-70b", 68_976_648_192), ("moe-8x7b", 46_702_792_704)]
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
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=here
    )
    n_params, gathered, reduced, seconds, peak = json.loads(done.stdout)
    assert n_params == 6_738_415_616
    assert (gathered, reduced) == (4 * n_params, 2 * n_params)
    assert seconds < 30 and peak < 1.5e9


# As a command ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> dict[str, Any]:
    done = invoke([*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.output)
    return result


def test_plan_as_a_command() -> None:
    result = command("plan", "--params", "7e9", "--ranks", "8", "--layers", "32", "--seq", "2048")
    assert [stage["total_bytes"] / 1e9 for stage in result["stages"]] == [112, 38.5, 26.25, 14]
    shown = invoke(["plan", "--params", "7e9", "--ranks", "8"]).output
    assert " 26.25 " in shown and "use stage 1" in shown and "3 GB that CUDA" in shown
    refused = invoke(["plan", "--params", "7e9", "--ranks", "8", "--precision", "fp8"])
    assert refused.exit_code == 2 and refused.output.count("\n") == 1
