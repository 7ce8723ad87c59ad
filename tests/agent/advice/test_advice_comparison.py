"""Two recordings compared: whether collectives explain why steps became longer. And sizes that padding would cure."""

import json

import pytest
import recordings_made as made
from command import invoke


def advised(*paths, more=()):
    result = invoke(["advise", *map(str, paths), "--json", *more])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def recording(folder, change=None, compute=True):
    """The made job, each event changed by ``change(event, step, us from the step's begin)``."""
    made.kineto(folder, compute=compute)
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        for event in document["traceEvents"]:
            step, at = divmod(event["ts"], made.STEP_US)
            if change:
                change(event, step, at)
        path.write_text(json.dumps(document))
    return folder


def stretched(us):
    """Every step ``us`` longer, with nothing in its end."""

    def change(event, step, at):
        event["ts"] = step * (made.STEP_US + us) + at
        if event["name"].startswith("ProfilerStep"):
            event["dur"] += us

    return change


def slower_gathers(event, step, at):
    """All-gathers take 300 us longer each, and all that follows waits for them."""
    stretched(600)(event, step, at)
    if event["name"].startswith("ProfilerStep"):
        return
    event["ts"] += 300 * ((at >= 500) + (at >= 1110))
    if event["cat"] == "kernel" and event["args"].get("Collective name") == "all_gather":
        event["dur"] += 300


def moved_compute(event, step, at):
    """What was computed beside the collectives runs after them: these take as long as before."""
    stretched(1200)(event, step, at)
    if event["name"] == "gemm":
        event["ts"] += 2000 if at < 2000 else 0


def slower_compute(event, step, at):
    """The last kernels of a step take 600 us longer."""
    stretched(600)(event, step, at)
    if event["name"] == "gemm" and at == 2800:
        event["dur"] += 600


def jitter(event, step, at):
    """Steps that vary by 2 % on their own."""
    if event["name"].startswith("ProfilerStep"):
        event["dur"] *= 1.0 + (0.02 if step % 2 else -0.02)


CASES = {
    "the same": (None, "no change", "no regression: steps became 0.0%"),
    "noise": (jitter, "no change", "within the noise"),
    "slower calls": (
        slower_gathers,
        "collectives",
        "most of it all_gather 33-64 MiB, 0.41 -> 0.70 ms a call",
    ),
    "less hidden": (moved_compute, "less hidden", "not NCCL: collectives take as long, but are less hidden"),
    "compute": (slower_compute, "not collectives", "collectives do not explain it"),
}


@pytest.mark.parametrize("name", CASES)
def test_two_recordings_say_whether_collectives_explain_a_regression(tmp_path, name):
    change, cause, says = CASES[name]
    before, after = (
        recording(tmp_path / "a", jitter if name == "noise" else None),
        recording(tmp_path / "b", change),
    )
    if name == "the same":  # not the same bytes
        (after / "notes.txt").write_text("b")
    told = advised(before, after)
    assert told["cause"] == cause and says in told["verdict"], told["verdict"]
    assert told["before"]["n_steps"] == told["after"]["n_steps"] == made.N_STEPS and told["rank"] == 0
    text = invoke(["advise", str(before), str(after)]).stdout
    assert text.startswith(told["verdict"]) and "\nbefore: " in text and "change a step" in text
    if cause == "collectives":
        assert told["exposed_change_ms"] == pytest.approx(0.6, abs=0.1)
        assert told["slots"][0]["change_ms"] == pytest.approx(0.6, abs=0.01)
        assert invoke(["advise", str(after), str(before), "--json"]).stdout.count('"change_ms": -0.6') >= 1


def test_without_compute_collectives_may_explain_a_regression(tmp_path):
    before, after = (
        recording(tmp_path / "a", compute=False),
        recording(tmp_path / "b", slower_gathers, compute=False),
    )
    told = advised(before, after)
    assert (
        told["cause"] == "perhaps collectives"
        and "collectives may explain +0.60 of +0.60 ms" in told["verdict"]
    )
    assert any("record compute too" in note for note in told["unknown"])


def test_what_cannot_be_compared_says_so(tmp_path):
    logs = [tmp_path / "a", tmp_path / "b"]
    for folder in logs:
        folder.mkdir()
        made.nccl_log(folder / "nccl.log", "names" if folder.name == "a" else "numbers")
    assert advised(*logs)["verdict"] == "a recording has no steps: only calls can be compared"
    other = recording(tmp_path / "c")
    first = next(iter(sorted(other.iterdir())))
    (tmp_path / "d").mkdir()
    first.rename(tmp_path / "d" / first.name)
    result = invoke(["advise", str(other), str(tmp_path / "d")])
    assert result.exit_code == 2 and "no rank is in both" in result.stderr


@pytest.mark.parametrize(
    ("per_rank", "dtype", "pad"),
    [
        (6_294_530, "BFloat16", "14 bytes (7 of bfloat16)"),
        (6_294_532, "Float", "12 bytes (3 of float32)"),
        (6_294_530, "Byte", "14 bytes (14 of uint8)"),
        (6_292_992, "BFloat16", None),
    ],
)
def test_sizes_per_rank_that_are_no_multiple_of_16_are_named_with_the_padding(
    tmp_path, monkeypatch, per_rank, dtype, pad
):
    """horovod#3727: 6,294,530 bytes took over 7 ms, 6,292,992 under 2 ms."""
    width = {"BFloat16": 2, "Float": 4, "Byte": 1}[dtype]
    whole = per_rank * made.N_RANKS

    def change(event, step, at):
        if event["args"].get("Collective name") == "all_gather":
            event["args"] |= {
                "dtype": dtype,
                "Out msg nelems": whole // width,
                "In msg nelems": per_rank // width,
            }

    folder = recording(tmp_path / "a", change)
    found = advised(folder, more=("--cluster", "dgx-h100-2x8"))["misaligned"]
    text = invoke(["advise", str(folder), "--cluster", "dgx-h100-2x8"]).stdout
    if pad is None:
        assert found == [] and "padding" not in text
    else:
        (row,) = found
        assert (row["func"], row["bytes_per_rank"], row["n_ranks"]) == ("all_gather", per_rank, 16)
        assert row["calls"] == 2 * 2 * made.N_STEPS and (per_rank + row["pad_bytes"]) % 16 == 0
        assert f"Pad each rank's part by {pad}" in " ".join(text.split())
