"""The formulas against every table and exercise of the documents, and the command that shows them."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command import invoke
from dynamiccl.agent.commands.plan import compare, estimate, lines, measured_lines, of_cluster, sent_in_a_step
from dynamiccl.traces.writer import TraceWriter
from dynamiccl.zero_workload import formulas as f

GB = 1e9
SEVEN = f.Shape(layers=32, width=4096, heads=32, seq=2048, batch=4)
A100 = f.Machine(memory=80e9, flops=150e12, bandwidth=100e9, latency=10e-6)


@pytest.mark.parametrize(
    ("params", "ranks", "precision", "expected"),
    [
        (7.5e9, 64, "mixed", (120, 31.4, 16.6, 1.9)),
        (
            7e9,
            8,
            "mixed",
            (112, 38.5, 26.25, 14),
        ),  # one table prints 21.5 and 15.75, against its own formulas
        (7e9, 8, "fp32", (112, 63, 38.5, 14)),  # the same 112 from 28 + 28 + 56
        (7e9, 4, "mixed", (112, 49, 38.5, 28)),
        (7e9, 64, "mixed", (112, 29.3, 15.5, 1.75)),  # one prints 30.6 and 17.1: 28 + 84 / 64 is 29.3
        (7e9, 256, "mixed", (112, 28.3, 14.4, 0.4375)),
        (13e9, 8, "mixed", (208, None, 48.75, None)),
        (13e9, 32, "mixed", (208, None, None, 6.5)),
    ],
)
def test_model_states(params: float, ranks: int, precision: str, expected: tuple[float | None, ...]) -> None:
    for stage, wanted in enumerate(expected):
        total = sum(f.model_states(params, ranks, stage, precision=precision)) / GB
        if wanted is not None:
            digits = len(str(wanted).partition(".")[2])
            # 28.328 is printed as 28.3, 29.3125 as 29.3
            assert round(total, digits) == wanted, stage


@pytest.mark.parametrize(
    ("stage", "factors"), [(1, (2.3, 2.9, 3.8, 4.0)), (2, (2.9, 4.3, 7.2, 8.0)), (3, (4, 8, 64, 1e6))]
)
def test_reductions(stage: int, factors: tuple[float, ...]) -> None:
    for ranks, wanted in zip((4, 8, 64, 10**6), factors, strict=True):
        factor = 16 / sum(f.model_states(1, ranks, stage))
        assert factor == pytest.approx(wanted, rel=0.02)
        exact = {1: 4 * ranks / (ranks + 3), 2: 8 * ranks / (ranks + 7), 3: ranks}[stage]
        assert factor == pytest.approx(exact)


def test_each_formula_names_its_source() -> None:
    known = set(re.findall(r"\[([A-Z])\] ", f.__doc__ or ""))
    formulas = [value for value in vars(f).values() if inspect.isfunction(value)]
    formulas = [value for value in formulas if value.__module__ == f.__name__]
    assert len(formulas) > 15
    for formula in formulas:
        named = re.findall(r"\[([A-Z](?:, [A-Z])*)\]", formula.__doc__ or "")
        assert named and set(", ".join(named).split(", ")) <= known, formula.__name__


def test_the_runtime_takes_what_the_documents_say() -> None:
    """2 to 4 GB of CUDA, NCCL and libraries, which a stage has to leave free."""
    assert 2 * GB <= f.RUNTIME <= 4 * GB
    words = "--params 13e9 --ranks 8 --seq 8192"
    told = planned(words)
    (pair,) = (one for one in told["pairs"] if (one["stage"], one["recompute"]) == (2, "none"))
    parts = told["stages"][2]["total"] + told["activations"]["none"] + told["logits"] + f.RUNTIME
    assert pair["total"] == pytest.approx(parts)
    for factor, stage in ((1.0001, 2), (0.9999, 3)):
        assert planned(f"{words} --memory {parts * factor / GB}")["recommended_stage"] == stage


def test_optimizers() -> None:
    whole = {name: sum(f.state_bytes(name)) for name in f.MOMENTS}
    # A document gives Adan 22: 2 + 2 + 4 and three fp32 moments are 20; the paper's code keeps a previous gradient too.
    assert whole == {"sgd": 8, "lion": 12, "adam": 16, "adan": 20}
    assert {name: whole[name] + 4 * more for name, more in f.KEPT_BESIDE.items()} == {"adan": 24}


def test_traffic() -> None:
    many = 10**9  # (N - 1) / N is 1
    assert [f.traffic(7e9, many, stage) / 7e9 for stage in range(4)] == pytest.approx([4, 4, 4, 6])
    # A document ends with 2 P at stage 2: that leaves the all-gather out, without which nothing trains.
    assert f.traffic(7e9, many, 1, classic=True) / 7e9 == pytest.approx(6)
    assert [f.traffic(7e9, 8, stage) for stage in range(4)] == [24.5e9, 24.5e9, 24.5e9, 36.75e9]
    assert all(f.traffic(7e9, 1, stage) == 0 for stage in range(4))
    # 14 GB of gradients, all-reduced: 31 ms at 900 GB/s, 560 ms at 50
    both = [f.traffic(7e9, many, 0) / bandwidth for bandwidth in (900e9, 50e9)]
    assert both == pytest.approx([31e-3, 560e-3], rel=0.01)


def test_activations() -> None:
    linear, attention = f.layer_activations(SEVEN)
    assert (round(linear / GB, 2), round(attention / GB, 2)) == (0.94, 1.07)
    whole = f.activations(SEVEN)
    assert round(whole / GB) == 64
    assert round((whole + 112e9) / GB) == 176
    long = f.Shape(32, 4096, 32, 8192, 4)
    assert f.layer_activations(long)[1] / GB == pytest.approx(17.2, abs=0.05)
    assert 32 * f.layer_activations(long)[1] / GB == pytest.approx(550, abs=1)
    # from the most to the least: each keeps what it says, and one layer's work
    one = SEVEN.token_bytes
    assert f.activations(SEVEN, "selective") == 32 * 14 * one + attention
    assert f.activations(SEVEN, "block") == 32 * one + 14 * one + attention
    assert f.activations(SEVEN, "sub-block") == 64 * one + max(5 * one + attention, 9 * one)
    # As n / k + k is least at sqrt(n) only if a layer holds no more than its checkpoint, k is 1 here, not 6.
    assert f.activations(SEVEN, "every") == f.activations(SEVEN, "block")
    large = f.Shape(80, 8192, 64, 2048, 4)
    layer = sum(f.layer_activations(large))
    assert f.activations(large, "every") == 40 * large.token_bytes + 2 * layer < f.activations(large, "block")
    # Checkpoints are partitioned over ranks that hold copies: those of tensor parallelism, as data-parallel ranks'
    # differ. Before: what is cut with the matrices was counted whole, so `plan` advised a stage too high.
    layer = (2 + 12 / 4) * one + attention / 4
    assert f.activations(SEVEN, "none", tensor=4) == 32 * layer
    assert f.activations(SEVEN, "selective", tensor=4) == 32 * 5 * one + attention / 4
    assert f.activations(SEVEN, "block", tensor=4) == 8 * one + layer
    assert f.activations(SEVEN, "every", tensor=4) == 32 * one / 4 + layer
    halves = 2 * one + attention / 4, 3 * one
    assert f.activations(SEVEN, "sub-block", tensor=4) == 16 * one + max(halves)
    assert f.layer_activations(SEVEN, norm_outputs=True, tensor=4)[0] == 7 * one
    assert f.recomputed_share(SEVEN, "block") == pytest.approx(1 / 3)
    flash = f.Shape(32, 4096, 32, 2048, 4, materialised=False)
    assert f.layer_activations(flash) == (linear, 0) and "selective" not in f.modes(flash)
    assert f.logits(flash) == 4 * 4 * 2048 * 32000


@pytest.mark.parametrize(
    ("layers", "a"), [(n, a) for n in (4, 9, 16, 36, 64, 100) for a in (1.0, 14.0, 30.0)]
)
def test_the_interval_of_checkpoints_holds_least(layers: int, a: float) -> None:
    """k* = sqrt(n c / a): the documents' sqrt(n) takes a layer's activations for as large as its checkpoint."""
    held = {k: -(-layers // k) + k * a for k in range(1, layers + 1)}
    best = f.best_interval(layers, a)
    assert held[best] == min(held.values())
    near = max(1.0, (layers / a) ** 0.5)
    smooth = layers / near + near * a
    assert held[best] <= smooth + a  # whole layers cost at most one more


def test_published_shapes() -> None:
    """Parameters of the shapes, 12 n d^2 and the embeddings (tied in GPT's), as published; sources in the formulas."""
    for size, (layers, width, heads, vocab) in f.PUBLISHED.items():
        ends = vocab * width * (1 if vocab == 50257 else 2)
        assert 12 * layers * width**2 + ends == pytest.approx(size, rel=0.015)
        assert f.published(size) == (layers, width, heads, vocab) and width % heads == 0
    assert f.published(7e9)[:3] == (32, 4096, 32) and f.published(70e9)[:3] == (80, 8192, 64)
    layers, width, heads, _ = f.published(20e9)  # nobody has published one
    assert 12 * layers * width**2 == pytest.approx(20e9, rel=0.05) and width == 128 * heads


def test_what_to_recompute_first() -> None:
    rows = f.recomputation_value(SEVEN)
    assert [name for name, _, _ in rows][2:] == ["attention probabilities", "Q K V"]
    _, saved, flops = rows[2]
    # A document says 70 GFLOP: it counts a multiply-add as one.
    assert (round(saved / GB, 2), round(flops / 2 / 1e9)) == (1.07, 69)


def test_overlap() -> None:
    assert f.stage_3_seconds(7e9, 32, A100) == pytest.approx(0.96e-3 + 420e-3)
    assert f.compute_seconds(7e9, 1, 2048, A100) == pytest.approx(0.573, abs=2e-3)
    assert f.break_even_batch(7e9, 32, 2048, A100) == 15
    assert f.break_even_batch(7e9, 32, 8192, A100) == 4
    # P cancels but for the latency: a document's 8 for 13B and 2 for 70B do not follow from its own formula.
    assert [f.break_even_batch(p, n, 2048, A100) for p, n in ((13e9, 40), (70e9, 80))] == [15, 15]
    depths = [f.prefetch_depth(200e6, 10e-3, bandwidth * GB) for bandwidth in (200, 100, 50, 25)]
    assert depths == [1, 1, 1, 2]


def test_hybrid() -> None:
    held, sent = f.hybrid(6e9, 1e9, 8)
    assert held == 16 * 6e9 / 8 + 2e9 + 14e9 / 8
    # A document writes 2 for the small ones, leaving out their all-gather.
    assert sent == 7 / 8 * (6 * 6e9 + 4 * 1e9)
    assert f.hybrid(6e9, 1e9, 8, "sgd", "fp32") == (8 * 6e9 / 8 + 4e9 + 4e9 / 8, 7 / 8 * (12 * 6e9 + 8 * 1e9))
    # By layer size: the blocks of a 1.3B (50 M each) stay whole, those of a 7B do not; its small embeddings do.
    small = planned("--params 1.3e9 --ranks 8 --layers 24 --width 2048 --vocab 32000")
    assert small["hybrid"]["held"] == small["stages"][2]["total"]
    assert small["hybrid"]["sent"] == pytest.approx(small["stages"][2]["sent"])
    both = planned("--params 7e9 --ranks 8 --vocab 16000")["hybrid"]
    assert both["small"] == 2 * 16000 * 4096
    assert both["held"] == pytest.approx(16 * (7e9 - both["small"]) / 8 + (2 + 14 / 8) * both["small"])


def test_what_nothing_hides() -> None:
    """By hand: 1 s of compute forward and 2 backward, 4 GB at 1 GB/s each way on many ranks, no latency."""
    slow = f.Machine(bandwidth=1e9, latency=0.0)
    job = f.Job(2e9, 10**9, 10, compute=3.0)
    bucket = 1 / -(-4e9 // f.BUCKET)
    waits = [f.exposed(job, stage, 0.0, slow) for stage in range(4)]
    # The gather has 1 s of forward beside it, the reduction 2 s of backward; the first and the last message nothing.
    assert waits[0] == pytest.approx(8 - 2, rel=0.01)
    assert waits[1] == waits[2] == pytest.approx((4 - 1) + (4 - 2), rel=0.01)
    assert waits[3] == pytest.approx((4 - 1) + (8 - 2))
    fast = f.Machine(bandwidth=1e12, latency=0.0)
    assert f.exposed(job, 1, 0.0, fast) == pytest.approx(2 * 4e-3 * bucket, rel=0.01)
    assert f.exposed(job, 3, 0.0, fast) == pytest.approx(2 * 4e-3 / 10)
    assert f.step_seconds(job, 3, 1 / 3, slow) == pytest.approx(4 + 3 + 8 - 3)
    twice = f.Job(2e9, 10**9, 10, compute=3.0, accumulate=2)  # stage 1 reduces once
    assert f.exposed(twice, 1, 0.0, slow) == waits[1]
    assert f.exposed(twice, 3, 0.0, slow) == pytest.approx(2 * waits[3])
    assert f.exposed(f.Job(2e9, 1, 10, 3.0), 0, 0.0, slow) == 0


# The command --------------------------------------------------------------------------------------------------------


def planned(words: str) -> dict[str, Any]:
    done = invoke(["plan", *words.split(), "--json"])
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.output)
    return told


def test_plan_answers_in_a_screen() -> None:
    words = "--params 7e9 --ranks 8 --batch 4 --tensor 2"
    for more in ("", "--attention materialised", "--memory 1"):
        shown = invoke(["plan", *words.split(), *more.split()]).output
        assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 80
    told = planned("--params 7e9 --ranks 8 --batch 4 --attention materialised")
    assert [row["total"] / GB for row in told["stages"]] == [112, 38.5, 26.25, 14]
    assert [round(row["reduction"], 1) for row in told["stages"]] == [1, 2.9, 4.3, 8]
    assert told["break_even_batch"] == 15 and told["best_interval"] == 1 and told["prefetch"] == 1
    assert told["activations"]["none"] / GB == pytest.approx(64.4, abs=0.1)
    # Seen: "no stage fits 80 GB" under a table with one that fits.
    assert planned("--params 7e9 --ranks 8 --batch 4 --seq 8192")["recommended_stage"] == 1
    nothing = invoke(["plan", "--params", "70e9", "--ranks", "8"]).output
    assert "no stage fits: stage 3, recompute every k-th (k = 2), takes 1" in nothing and "offload" in nothing


#: Name -> parameters, layers, width and heads, as published.
MODELS = {"7B": (6.7e9, 32, 4096, 32), "13B": (13e9, 40, 5120, 40), "30B": (32.5e9, 60, 6656, 52)}
MODELS["70B"] = (69e9, 80, 8192, 64)
ORDINARY = [
    (name, ranks, batch, seq)
    for name in MODELS
    for ranks in (8, 16, 32, 64, 128, 256)
    for batch in (1, 2, 4, 8)
    for seq in (2048, 4096, 8192)
]


def shown_pairs(text: str) -> dict[tuple[int, str], float]:
    """Milliseconds of a step by stage and mode, as the table shows them: those that fit."""
    found = {}
    for line in text.splitlines():
        row = re.match(r"(none|selective|sub-block|block|every k-th) +\S+ GB +\S+%(.*)", line)
        for stage, word in enumerate(row[2].split()) if row else ():
            if word != "-":
                found[stage, row[1]] = float(word.replace(",", ""))  # type: ignore[index]
    return found


def contradiction(text: str) -> str:
    """What the last lines of a plan say against its own table, or nothing."""
    fitting = {pair: ms for pair, ms in shown_pairs(text).items() if pair[0]}
    use = re.search(
        r"^use stage (\d), (?:recompute )?(.*?)(?: \(k = \d+\))?: \S+ of 80 GB, (\S+) ms", text, re.M
    )
    if use is None:
        return "" if "no stage fits" in text and not fitting else f"no stage, and {fitting} fit"
    mode = "none" if use[2] == "nothing recomputed" else use[2]
    chosen = fitting.get((int(use[1]), mode))
    if chosen is None or chosen != float(use[3].replace(",", "")):
        return f"{use[0]}, and the table has {fitting}"
    return "" if chosen <= min(fitting.values()) else f"{use[0]}, and {fitting} has a faster one"


@pytest.mark.parametrize("materialised", [False, True])
def test_the_advice_is_that_of_its_own_table(materialised: bool) -> None:
    """Seen: of these 288 plans 82 said "no stage fits" above one that fitted, and 112 advised something slower."""
    assert len(ORDINARY) == 288
    said, none = [], 0
    for name, ranks, batch, seq in ORDINARY:
        params, layers, width, heads = MODELS[name]
        shape = f.Shape(layers, width, heads, seq, batch, materialised=materialised)
        text = "\n".join(lines(estimate(params, ranks, shape, A100, "adam", "mixed")))
        said += [f"{name}, {ranks}, {batch} x {seq}: {what}" for what in [contradiction(text)] if what]
        none += "no stage fits" in text
    assert not said, (len(said), said[:3])
    assert 0 < none < 144  # both ends are among them


def test_a_contradiction_would_be_seen() -> None:
    shape = f.Shape(32, 4096, 32, 2048, 4)
    text = "\n".join(lines(estimate(7e9, 8, shape, A100, "adam", "mixed")))
    assert contradiction(text) == ""
    assert contradiction(text.replace("use stage 1, recompute selective", "use stage 1, recompute block"))
    assert contradiction(re.sub(r"^use stage .*$", "no stage fits", text, flags=re.M))


def test_the_runner_up_and_why() -> None:
    told = planned("--params 13e9 --ranks 8 --batch 4")
    advice = told["advice"]
    assert advice["seconds"] <= advice["runner_up"]["seconds"]
    text = invoke(["plan", "--params", "13e9", "--ranks", "8", "--batch", "4"]).output
    assert re.search(r"^next stage \d, .* of 80 GB, \S+ ms a step$", text, re.M) and "\nwhy: " in text
    assert re.search(r"^why: it computes 33% again: 1.41e\+03 ms$", text, re.M)


def test_plan_counts_the_bytes_of_its_precision_and_optimizer() -> None:
    """Before: the lower half of the page was of Adam in 16 bits, whatever was asked for."""
    half, full, sgd = (
        planned(f"--params 7e9 --ranks 8 --latency 0 {words}")
        for words in ("", "--precision fp32", "--optimizer sgd")
    )
    assert full["stage_3_seconds"] == 2 * half["stage_3_seconds"] == pytest.approx(0.84)
    assert full["hybrid"]["sent"] == pytest.approx(full["stages"][3]["sent"])
    assert (half["break_even_batch"], full["break_even_batch"]) == (15, 30)
    assert full["prefetch"] == 2 * half["prefetch"] == 2
    for told in (half, full, sgd):
        assert told["hybrid"]["held"] == pytest.approx(told["stages"][3]["total"])


def test_plan_counts_float32_gradients_and_micro_batches() -> None:
    """As the engine holds and sends them, see ``Settings.sums`` and ``Reducer.launch``."""
    plain, exact, many = (
        planned(f"--params 7e9 --ranks 8 {words}") for words in ("", "--reduce-dtype fp32", "--accumulate 4")
    )
    held = [[row["gradients"] / GB for row in told["stages"]] for told in (plain, exact, many)]
    assert held == [[14, 14, 1.75, 1.75], [14, 14, 3.5, 3.5], [14, 14, 3.5, 3.5]]
    sent = [[row["sent"] / (7 / 8 * 7e9) for row in told["stages"]] for told in (plain, exact, many)]
    assert sent == [[4, 4, 4, 6], [8, 6, 6, 8], [4, 4, 10, 24]]
    assert many["compute_seconds"] == pytest.approx(4 * plain["compute_seconds"])
    assert many["recommended_stage"] == 1


def test_plan_advises_by_what_ranks_that_share_matrices_hold() -> None:
    """Before: 259 GB of activations with none recomputed, and stage 2."""
    words = "--params 70e9 --ranks 8 --layers 80 --width 8192 --heads 64 --seq 4096 --attention materialised"
    told = planned(f"{words} --tensor 8")
    assert told["activations"]["none"] / GB == pytest.approx(40.3, abs=0.5)
    assert planned(words)["activations"]["none"] > 240 * GB


@pytest.mark.parametrize(
    ("name", "ranks", "bandwidth", "memory", "tflops"),
    [
        # NVLink 4 gives 450 GB/s each way, of which NCCL's ring takes 12 channels of 30; eight ports of 400 Gb/s 400.
        ("dgx-h100-1x8", 8, 360, 80, 400),
        ("dgx-h100-2x8", 64, 384, 80, 400),
        ("dgx-a100-2x8", 16, 192, 80, 150),  # eight ports of 200 Gb/s give 200
        ("h200-efa-2x8", 16, 384, 141, 400),
        ("one-gpu-per-node-8x1", 8, 48, 80, 150),  # one port of 400 Gb/s gives 50
    ],
)
def test_a_preset_gives_its_gpu_and_bandwidth(
    name: str, ranks: int, bandwidth: float, memory: float, tflops: float
) -> None:
    machine = planned(f"--params 7e9 --ranks {ranks} --cluster {name}")["machine"]
    assert machine["bandwidth"] / GB == pytest.approx(bandwidth)
    assert (machine["memory"] / GB, machine["flops"] / 1e12) == (memory, tflops)
    assert planned(f"--params 7e9 --ranks {ranks} --cluster {name} --tflops 99")["machine"]["flops"] == 99e12


def test_presets_beside_published_figures() -> None:
    """GB/s of a ring on one node, and TFLOP/s that a step reaches. The sources are in the workload's page."""
    page = (Path(__file__).parents[2] / "zero_workload" / "README.md").read_text(encoding="utf-8")
    for name, bandwidth, of_links in (("dgx-h100-1x8", 370, 0.05), ("dgx-a100-2x8", 200, 0.21)):
        told = of_cluster(name, 8)
        assert told["bandwidth"] == pytest.approx(bandwidth, rel=of_links)
        preset = "-".join(name.split("-")[:2])
        assert f"| {preset}, one node | GB/s of a ring | {told['bandwidth']:.0f} |" in page
        assert f"| {preset} | TFLOP/s in a step | {told['tflops']:.0f} |" in page
    assert 380 <= of_cluster("dgx-h100-1x8", 8)["tflops"] <= 430


def test_the_curve_of_memory_against_traffic_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed")
    assert planned(f"--params 7e9 --ranks 8 --plot {tmp_path / 'curve.svg'}")
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    done = invoke(["plan", *f"--params 7e9 --ranks 8 --plot {tmp_path / 'none' / 'curve.svg'}".split()])
    assert done.exit_code == 2 and "No such file or directory" in done.output


def test_measured_figures_stand_beside_the_formulas() -> None:
    """Two steps of stage 3 on two ranks, seen whole, between two that were cut; 10 bytes and 8 GPUs stand for one."""
    n_params, n_tensors = 1000, 3
    one = {
        "all_gather": 2 * 4 * n_params,
        "reduce_scatter": 4 * n_params,
        "all_reduce": 4 * (n_tensors + 17) + 4 * 3,
    }
    rows = []
    for step in range(4):
        for func, n_bytes in one.items():
            cut = 0.5 if step in (0, 3) else 1
            rows += [
                {"pid": pid, "step": step, "func": func, "n_bytes": 10 * n_bytes * cut, "n_ranks": 16}
                for pid in (7, 8)
            ]
    sent = sent_in_a_step(pd.DataFrame(rows), scale=10, gpus=8)
    assert sent == {"all_gather": 4000, "reduce_scatter": 2000, "all_reduce": 92}
    memory = {"weights": 2000, "gradients": 2020, "optimizer": 4000}
    run = {"dtype": "fp32", "params": n_params, "ranks": 2, "stage": 3, "memory": memory, "sent": sent}
    compared = compare({**run, "n_tensors": n_tensors, "kept_params": 0})
    assert [round(row["off"], 3) for row in compared["rows"]] == [0, 0.01, 0, 0]
    assert all(len(line) <= 80 for line in measured_lines(compared))


def test_a_run_is_compared_by_its_own_optimizer_and_form() -> None:
    """Seen: with --classic the traffic was 47 % off, because the formula was that of reduce-scatters."""
    n, ranks = 1000, 4
    run: dict[str, Any] = {"dtype": "fp16", "params": n, "ranks": ranks, "stage": 1, "n_tensors": 3}
    run |= {"classic": True, "optimizer": "pytorch_optimizer:Adan", "accumulate": 1}
    run["memory"] = {"weights": 2 * n, "gradients": 2 * n, "optimizer": 0, "host": 20 * n / ranks}
    run["sent"] = {"all_reduce": f.ring(ranks) * (4 * n + 2 * 4 * 20 + 2 * 4 * 5)}
    run["sent"]["all_gather"] = f.ring(ranks) * 2 * n
    assert [row["off"] for row in compare(run)["rows"]] == pytest.approx([0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"no formulas for torch\.optim:Muon: known are sgd, lion"):
        compare({**run, "optimizer": "torch.optim:Muon"})
    with pytest.raises(ValueError, match="one micro-batch: run the job without --accumulate"):
        compare({**run, "accumulate": 2})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "give --params and --ranks"),
        ("--params 7e9 --ranks 0", "0 is not in the range x>=1"),
        ("--params 7e9 --ranks 8 --attention slow", "--attention is flash or materialised, not slow"),
        ("--params 7e9 --ranks 8 --reduce-dtype int8", "--reduce-dtype is bf16, fp16, fp32, not int8"),
        ("--params 7e9 --ranks 8 --cluster dgx", "no cluster preset 'dgx'"),
        (
            "--params 7e9 --ranks 8 --optimizer sofia",
            "no figures for sofia in mixed: known are sgd, lion, adam, adan",
        ),
        ("/nowhere", "nowhere"),
    ],
)
def test_plan_refuses_in_one_line(words: str, said: str) -> None:
    done = invoke(["plan", *words.split()])
    assert done.exit_code == 2 and said in done.output and done.output.count("\n") == 1


def test_plan_of_a_run_takes_the_shape_of_its_job(tmp_path: Path) -> None:
    """Seen: the activations of 2,048 tokens for a job with 32, and figures that ran into each other."""
    TraceWriter(tmp_path / "trace", {}).close()
    shape = {"layers": 2, "width": 96, "heads": 3, "seq": 32}
    head = {
        "n_params": 276_096,
        "n_ranks": 2,
        "stage": 3,
        "dtype": "fp32",
        "batch": 1,
        "model": shape,
        "n_tensors": 30,
    }
    held = {"weights": 1, "gradients": 1, "optimizer": 1}
    (tmp_path / "job.jsonl").write_text("\n".join(json.dumps(line) for line in (head, {"memory": held})))
    told = planned(str(tmp_path))
    assert told["shape"] | shape | {"batch": 1} == told["shape"] and told["precision"] == "fp32"
    assert planned(f"{tmp_path} --seq 64")["shape"]["seq"] == 64
    # Before: of a resumed run, the ranks and sizes of its first part beside the memory of its last.
    parts = ({**head, "n_ranks": 8}, {"memory": held}, head, {"loss": 1.0}, {"memory": held})
    (tmp_path / "job.jsonl").write_text("\n".join(json.dumps(line) for line in parts))
    assert planned(str(tmp_path)) == told
    shown = invoke(["plan", str(tmp_path)]).output
    assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 80
    assert "stage 0         1.104    1.104    2.209    4.418      1   1.104" in shown
    # Seen: "gather 94 layers ahead" of two, "a batch of 5271", and stage 1.
    assert (
        "no advice: any stage fits so small a model" in shown and "ahead" not in shown and "use " not in shown
    )


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("reduced", [None, 4])
def test_a_hybrid_at_either_end_is_that_stage(accumulate: int, reduced: int | None) -> None:
    """Before: with micro-batches the hybrid and the curve had the bytes of one, and missed their own stages."""
    shape = f.Shape(batch=4, seq=2048, width=4096, heads=32, layers=32)
    told = estimate(7e9, 8, shape, A100, "adam", "mixed", 1, accumulate, reduced)
    how = 8, "adam", "mixed", told["gradient_bytes"], accumulate
    for stage, (large, small) in ((3, (7e9, 0.0)), (2, (0.0, 7e9))):
        row = told["stages"][stage]
        assert f.hybrid(large, small, *how) == pytest.approx((row["total"], row["sent"]))
        assert row["reduction"] == pytest.approx(told["stages"][0]["total"] / row["total"])
