"""What needs no ranks: the planner against published figures, dry runs against formulas, and both as commands."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamiccl.agent.cli import app
from dynamiccl.traces.files import Trace
from dynamiccl.zero_workload.dryrun import dry_run
from dynamiccl.zero_workload.dryrun_models import PRESETS, Shape
from dynamiccl.zero_workload.planner import Request, activation_elements, advice, cut, estimate, stage_bytes
from typer.testing import CliRunner

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


def test_planner_traffic_time_and_advice() -> None:
    result = estimate(Request(7e9, 8, layers=32, seq=2048, bandwidth=100e9, latency=10e-6, flops=150e12))
    assert result["break_even_batch"] == 15  # all that stage 3 sends; what it sends more than stage 2:
    assert result["break_even_extra_batch"] == 5
    assert [s["traffic_bytes_per_step"] for s in result["stages"]] == [24.5e9, 24.5e9, 24.5e9, 36.75e9]
    assert result["prefetch"] == 1
    # Stage 3 at 7/8 of 3 x 14 GB on 100 GB/s and 96 messages of 10 us; all of a layer's 2 N B L / F three times.
    assert result["stages"][3]["communication_s"] == pytest.approx(36.75e9 / 100e9 + 96 * 10e-6)
    assert result["compute_s"] == pytest.approx(6 * 7e9 * 2048 / 150e12)
    # Stage 2 has (N - 1) / N as well; one rank sends nothing.
    assert result["stages"][2]["communication_s"] == pytest.approx(24.5e9 / 100e9 + 2 * 535 * 10e-6)
    assert estimate(Request(7e9, 1, latency=0))["stages"][3]["communication_s"] == 0
    assert result["stages"][3]["passes"] == 3 and result["stages"][3]["passes_kept"] == 3 - 2 / 32
    # a ten times slower wire: a layer's gather takes 7/8 of 43.8 ms, its forward 5.97 ms
    assert estimate(Request(7e9, 8, bandwidth=10e9))["prefetch"] == 7
    # 38.5 GB at stage 1 and what a step needs beside it fit into 45 GB, but not beside CUDA's context and the rest
    bare, real = (estimate(Request(7e9, 8, memory=45e9, runtime=gb * 1e9)) for gb in (0, 4))
    assert bare["stages"][1]["fits"] and not real["stages"][1]["fits"]
    assert estimate(Request(7e9, 8))["runtime_bytes"] == 3e9
    assert activation_elements(2, 3, 5, 7) == 14 * 2 * 3 * 5 + 2 * 7 * 9
    assert result["activations"]["every"] == 6
    assert estimate(Request(7e9, 8))["recommended_stage"] == 1
    assert estimate(Request(13e9, 8, memory=60e9))["recommended_stage"] == 2
    assert estimate(Request(13e9, 8, memory=40e9))["recommended_stage"] == 3
    nothing = estimate(Request(70e9, 8))
    assert nothing["recommended_stage"] is None and "stage 3 would on" in nothing["reason"]
    assert sum(stage_bytes(1e9, 4, 0, optimizer="adan")) == 22e9
    assert sum(stage_bytes(1e9, 4, 0, optimizer="lion")) == 12e9
    assert "stage 3 holds 2.00 GB" in advice(10**9, 8, 1, "mixed")


@pytest.mark.parametrize(
    ("field", "value"), [("params", 0), ("ranks", 0), ("flops", float("inf")), ("optimizer", "sgd"), ("latency", -1)]
)
def test_planner_refuses(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field if field != "optimizer" else "no figures for mixed sgd"):
        estimate(Request(**{"params": 7e9, "ranks": 8, field: value}))


def test_planner_of_jobs_cut_in_more_ways_than_one() -> None:
    job = Request(7e9, 64, layers=32, hidden=4096, batch=2)
    held = cut(job, 3, shard=8, tensor=2, reduce_bytes=4, offload=True)
    assert held["weights_bytes"] == 2 * 7e9 / 2 / 8 and held["gradients_bytes"] == 4 * 7e9 / 2 / 8
    assert (held["optimizer_bytes"], held["offloaded_bytes"]) == (0, 12 * 7e9 / 2 / 8)
    assert held["shard_sent_bytes"] == pytest.approx(7 / 8 * (4 + 2 * 2) * 7e9 / 2)
    assert held["replicas_sent_bytes"] == pytest.approx(2 * 3 / 4 * 4 * 7e9 / 2 / 8)
    for stage, ways in ((1, {}), (3, {"shard": 6}), (3, {"experts": 5, "expert_share": 0.5})):
        with pytest.raises(ValueError, match="a job is cut at stages 2 and 3"):
            cut(job, stage, **ways)
    with pytest.raises(ValueError, match="experts' share of the parameters lies between 0 and 1"):
        cut(job, 3, experts=2)
    result = command("plan", "--params", "46.7e9", "--ranks", "64", "--expert-parallel", "8", "--expert-share", "0.96")
    assert result["cut"]["3"]["experts_sent_bytes"] > 0 == result["cut"]["3"]["tensor_sent_bytes"]
    result = command("plan", "--params", "7e9", "--ranks", "64", "--shard", "8", "--offload")
    assert result["cut"]["3"]["optimizer_bytes"] == 0 < result["cut"]["2"]["optimizer_bytes"]


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
    """GPT-2 on 16 ranks, of which 8 share a shard or 4 a matrix; a small mixture over 4 of 8."""

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
    state, near = 2 * small.seq * small.width, {"rel": 1e-3}  # padding
    sent = by_group(small, stage=2, shard=8)
    assert sent == {
        ("reduce_scatter", 8, 1): pytest.approx(whole, **near),
        ("all_gather", 8, 1): pytest.approx(whole, **near),
        ("all_reduce", 2, 8): pytest.approx(whole / 8, **near),
    }
    in_full = by_group(small, stage=2, shard=8, reduce_dtype=torch.float32)
    assert in_full["reduce_scatter", 8, 1] == 2 * sent["reduce_scatter", 8, 1]
    assert in_full["all_gather", 8, 1] == sent["all_gather", 8, 1]
    planned = cut(Request(whole / 2, 16, layers=2, hidden=768, seq=1024), 2, shard=8)
    assert planned["shard_sent_bytes"] == pytest.approx(
        7 / 8 * (sent["reduce_scatter", 8, 1] + sent["all_gather", 8, 1]), **near
    )
    assert planned["replicas_sent_bytes"] == pytest.approx(sent["all_reduce", 2, 8], **near)  # 2 (R-1)/R is 1
    sent = by_group(small, stage=2, tensor=4)
    planned = cut(Request(whole / 2, 16, layers=2, hidden=768, seq=1024), 2, tensor=4)
    assert planned["tensor_sent_bytes"] == 2 * 3 / 4 * sent["all_reduce", 4, 1]
    matrices = 2 * small.layers * (12 * small.width**2 + 7 * small.width)
    assert sent == {
        ("reduce_scatter", 4, 4): pytest.approx(whole - matrices * 3 / 4, **near),
        ("all_gather", 4, 4): pytest.approx(whole - matrices * 3 / 4, **near),
        ("all_reduce", 4, 1): 4 * small.layers * state,
    }
    beside, sent = sent, by_group(small, stage=2, tensor=4, partition=True)
    kept = small.layers * state  # recomputed up to the last all-reduce of a block, which nothing in backward needs
    assert sent == {**beside, ("all_reduce", 4, 1): 5 * kept, ("all_gather", 4, 1): kept}
    planned = cut(Request(whole / 2, 16, layers=2, hidden=768, seq=1024), 2, tensor=4, partition=True)
    assert planned["tensor_sent_bytes"] == 2 * 3 / 4 * 5 * kept + 3 / 4 * kept
    assert planned["inputs_bytes"] == kept / 4
    mixture = replace(PRESETS["moe-8x7b"], layers=1, width=256, heads=2, hidden=512, kv_heads=2, seq=64)
    sent, ours = by_group(mixture, stage=2, experts=4), 3 * 256 * 512 * 8
    assert sent["all_to_all", 4, 1] == 4 * 8 * math.ceil(1.25 * 64 * 2 / 8) * 256 * 2
    assert sent["all_gather", 4, 4] == sent["reduce_scatter", 4, 4] == 2 * ours // 4
    with torch.device("meta"):
        numel = sum(p.numel() for p in mixture.build().parameters())
    job = Request(numel, 16, layers=1, hidden=256, seq=64)
    planned = cut(job, 2, experts=4, expert_share=ours / numel, slots=2 * 1.25)
    assert planned["experts_sent_bytes"] == pytest.approx(3 / 4 * sent["all_to_all", 4, 1])
    shard = 15 / 16 * (sent["reduce_scatter", 16, 1] + sent["all_gather", 16, 1]) + 3 / 4 * 2 * 2 * ours / 4
    assert planned["shard_sent_bytes"] == pytest.approx(shard, **near)
    assert planned["weights_bytes"] == pytest.approx(2 * (numel - ours) + 2 * ours / 4)
    assert planned["optimizer_bytes"] == pytest.approx(12 * numel / 16)  # each element on one rank, in both ways
    plain = by_group(small, stage=3)
    assert by_group(small, stage=3, offload=True) == plain
    for engine in ("zero", "fsdp2"):
        calls, _ = dry_run(small, ranks=16, stage=3, engine=engine, apart=True)
        groups = {
            func: {call.group for call in calls if call.func == func} for func in ("all_gather", "reduce_scatter")
        }
        assert [len(names) for names in groups.values()] == [1, 1] and len(set.union(*groups.values())) == 2, engine
    with pytest.raises(ValueError, match="and not the sequence"):
        dry_run(small, ranks=16, stage=2, tensor=4, sequence=True, partition=True)
    with pytest.raises(ValueError, match="no experts to share"):
        dry_run(small, ranks=16, stage=2, experts=4)
    with pytest.raises(ValueError, match="are dry runs of zero"):
        dry_run(small, ranks=16, stage=3, tensor=4, engine="fsdp2")


@pytest.mark.parametrize(
    ("model", "n_params"), [("llama-13b", 13_015_864_320), ("llama-70b", 68_976_648_192), ("moe-8x7b", 46_702_792_704)]
)
def test_public_models_have_their_published_size(model: str, n_params: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in PRESETS[model].build().parameters()) == n_params


@pytest.mark.slow
def test_dry_run_of_llama_7b_takes_seconds(tmp_path: Path) -> None:
    code = (
        "import json, resource, time; begin = time.process_time()\n"
        "from dynamiccl.zero_workload.dryrun import dry_run\n"
        "from dynamiccl.zero_workload.dryrun_models import PRESETS\n"
        "calls, n = dry_run(PRESETS['llama-7b'], ranks=128, stage=3, keep_last=False)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "of = {f: sum(c.n_bytes for c in calls if c.func == f) for f in ('all_gather', 'reduce_scatter')}\n"
        "print(json.dumps([n, of['all_gather'], of['reduce_scatter'], time.process_time() - begin, peak]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    n_params, gathered, reduced, seconds, peak = json.loads(done.stdout)
    assert n_params == 6_738_415_616
    assert (gathered, reduced) == (4 * n_params, 2 * n_params)
    assert seconds < 30 and peak < 1.5e9


# As commands ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.output)
    return result


def test_plan_as_a_command() -> None:
    sizes = ["--layers", "32", "--seq", "2048", "--bandwidth", "100", "--latency", "10", "--flops", "150"]
    result = command("plan", "--params", "7e9", "--ranks", "8", *sizes)
    assert [stage["total_bytes"] / 1e9 for stage in result["stages"]] == [112, 38.5, 26.25, 14]
    assert {"stage", "weights_bytes", "gradients_bytes", "optimizer_bytes", "traffic_bytes_per_step"} <= {
        *result["stages"][0]
    }
    assert result["break_even_batch"] == 15 and result["prefetch"] == 1 and result["activations"]["every"] == 6
    shown = " ".join(CliRunner().invoke(app, ["plan", "--params", "7e9", "--ranks", "8"]).output.split())
    assert "26.25" in shown and "use stage" in shown and "3 GB go to CUDA" in shown
    assert "2.94 times" in shown and "from batch 15" in shown and "5 on" in shown
    refused = CliRunner().invoke(app, ["plan", "--params", "7e9", "--ranks", "8", "--precision", "fp8"])
    assert refused.exit_code == 2 and refused.output.count("\n") == 1


@pytest.mark.slow
def test_a_dry_run_as_a_command_leaves_an_ordinary_trace(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    options = ["--model", "gpt2", "--ranks", "64", "--stage", "2", "--out", str(folder)]
    result = command("lab", "dry-run", *options)
    events = Trace.read(folder).events
    assert len(events) == result["calls"] and set(events["n_ranks"]) == {64} and set(events["n_nodes"]) == {8}
    for func in ("reduce_scatter", "all_gather"):
        assert events.loc[events["func"] == func, "n_bytes"].sum() == result[func]["n_bytes"]
        assert result[func]["parameters"] == pytest.approx(1, rel=1e-4)
    options = ["--model", "gpt2", "--ranks", "16", "--stage", "3", "--shard", "8", "--reduce-dtype", "fp32"]
    result = command("lab", "dry-run", *options, "--out", str(folder))
    across = [c for c in result["communicators"] if c["n_nodes"] == 2]
    assert {(c["func"], c["n_ranks"]) for c in across} == {("all_reduce", 2)}
    assert result["reduce_scatter"]["parameters"] == pytest.approx(2, rel=1e-4)  # float32: twice bfloat16's
    options = ["--model", "gpt2", "--ranks", "16", "--stage", "2", "--tensor-parallel", "4", "--partition-activations"]
    result = command("lab", "dry-run", *options, "--out", str(folder))
    assert ("all_gather", 4, 1) in {(c["func"], c["n_ranks"], c["n_nodes"]) for c in result["communicators"]}
    refused = CliRunner().invoke(app, ["lab", "dry-run", "--model", "gpt5"])
    assert refused.exit_code == 2 and "no model gpt5" in refused.output
