"""Two recordings compared: whether collectives explain why steps became longer. And sizes that padding would cure."""

import json
from dataclasses import asdict

import pandas as pd
import pytest
import recordings_made as made
from command import invoke
from dynamiccl.agent.advice import compare
from dynamiccl.agent.advice.alignment import Misaligned
from dynamiccl.agent.advice.texts import MOST_PADDED, _print_lists
from dynamiccl.traces.assemble import EVENT_COLUMNS, STEP_COLUMNS, WAIT_COLUMNS, complete
from dynamiccl.traces.writer import TraceWriter


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
    "the same": (None, "no-change", "no regression: steps became 0.0%"),
    "noise": (jitter, "no-change", "within the noise"),
    "slower calls": (
        slower_gathers,
        "collectives",
        "most of it all_gather 33-64 MiB, 0.41 -> 0.70 ms a call",
    ),
    "less hidden": (moved_compute, "less-hidden", "not NCCL: collectives take as long, but are less hidden"),
    "compute": (slower_compute, "not-collectives", "collectives do not explain it"),
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
        told["cause"] == "perhaps-collectives"
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


def test_a_job_with_a_size_for_each_length_of_a_text_gets_few_lines_of_padding(capsys):
    """Before: a line for each size."""
    row = asdict(Misaligned("all_gather 5-8 MiB", "all_gather", 16, 6_294_530, 2, 14, 7, "bfloat16"))
    _print_lists({"misaligned": [row] * 5000, "unknown": [], "launch": []})
    told = capsys.readouterr().out
    assert told.count("Pad each") == MOST_PADDED and "4990 other sizes" in told


def sampled(folder, call_ms, every, n_steps=60, told=None, waits=False):
    """A run of ours: two gathers of ``call_ms`` in a step of 50 ms more, timed in one step of ``every``. Events of
    steps from ``told`` on were rotated away."""
    events, steps, now = [], [], 10**15
    width = int(call_ms * 1e6)
    for step in range(n_steps):
        is_timed = step % every == 0
        for k in (0, 1):
            start = now + 10**6 + k * width
            times = (start, start + width) if is_timed else (None, None)
            what = (2 * step + k, 7, 0, 8, 1, "all_gather", 64 << 20, "bfloat16", "ring", "simple", 16, 0)
            if told is None or step < told:
                events.append((*what, start - 1000, *times, step, 11, False, 64 << 20))
        lasts = 50_000_000 + 2 * width
        now += lasts
        steps.append((step, 0, now, lasts + step % 3 * 100_000, 0, 0, 0, 11, is_timed, every))
    with TraceWriter(folder, {"nccl": "2.28.9"}) as writer:
        calls = pd.DataFrame(events, columns=list(EVENT_COLUMNS), dtype=object)
        stood = calls.dropna(subset="start_ns") if waits else calls[:0]
        marks = pd.DataFrame(steps, columns=list(STEP_COLUMNS))
        tables = (calls, EVENT_COLUMNS), (marks, STEP_COLUMNS), (stood, WAIT_COLUMNS)
        writer.write(*(complete(table, columns) for table, columns in tables))
    return folder


def test_calls_that_are_timed_in_some_steps_are_no_sum_over_all(tmp_path):
    """Before: a change of 20 ms that two gathers explain whole, told as "collectives do not explain it (+2.35)"."""
    before, after = sampled(tmp_path / "a", 5, 8), sampled(tmp_path / "b", 15, 8)
    told = advised(before, after)
    assert told["cause"] == "perhaps-collectives" and told["change_ms"] == pytest.approx(20, abs=0.1)
    assert told["before"]["calls_ms"] == pytest.approx(10) and told["calls_change_ms"] == pytest.approx(20)
    assert told["slots"][0]["change_ms"] == pytest.approx(20) and told["slots"][0]["calls_after"] == 2
    # The same job, more often timed and with fewer of its events on disk: nothing has changed.
    other = advised(before, sampled(tmp_path / "c", 5, 2, told=30))
    assert other["calls_change_ms"] == pytest.approx(0) and other["slots"][0]["calls_after"] == 2


def test_an_emulated_run_tells_what_its_steps_wait_for(tmp_path):
    """Before: when an emulated job stood still was not looked at."""
    before, after = sampled(tmp_path / "a", 5, 4, waits=True), sampled(tmp_path / "b", 15, 4, waits=True)
    told = advised(before, after)
    assert told["cause"] == "collectives" and told["exposed_change_ms"] == pytest.approx(20)


def beside(folder, us):
    """The made job without compute, its calls ``us`` longer, each with one of another group at the same time."""
    made.kineto(folder, compute=False)
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        more = []
        for event in document["traceEvents"]:
            slower_by(event, us)
            if "External id" in event["args"]:
                args = {**event["args"], "External id": 10**6 + event["args"]["External id"]}
                more.append({**event, "args": {**args, "Process Group Name": "1"}})
        document["traceEvents"] += more
        document["traceEvents"].append(
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0, "dur": 1, "args": {}}
        )
        path.write_text(json.dumps(document))
    return folder


def slower_by(event, us):
    """Calls take ``us`` longer each, in steps that are 2,000 us longer if ``us`` is not 0."""
    step, at = divmod(event["ts"], made.STEP_US)
    stretched(2000 if us else 0)(event, step, at)
    if event["cat"] == "kernel":
        event["dur"] += us


def test_calls_that_run_at_the_same_time_count_once(tmp_path):
    """Before: twice 200 us beside each other in each of three places "explained" 1.2 of 2 ms."""
    told = advised(beside(tmp_path / "a", 0), beside(tmp_path / "b", 200))
    assert told["before"]["calls_ms"] == pytest.approx(1.31, abs=0.01)
    assert told["before"]["exposed_ms"] == pytest.approx(1.31, abs=0.01)
    assert told["calls_change_ms"] == pytest.approx(0.6) and told["cause"] == "not-collectives"
    assert told["exposed_change_ms"] == pytest.approx(0.6, abs=0.01)


def test_compute_outside_the_steps_is_no_steps(tmp_path):
    """Before: all compute of a recording over its marked steps; five steps of warm-up made it 1.5 times as much."""

    def unmarked(event, step, at):
        if event["name"] in ("ProfilerStep#0", "ProfilerStep#1"):
            event["name"] = "warm-up"

    before, after = recording(tmp_path / "a"), recording(tmp_path / "b", unmarked)
    told = advised(before, after)
    assert told["after"]["n_steps"] == made.N_STEPS - 2
    assert told["compute_change_ms"] == pytest.approx(0, abs=0.01)
    assert told["calls_change_ms"] == pytest.approx(0, abs=0.01)


def test_the_slot_that_is_named_changed_as_the_step_did():
    """Before: the largest change, also one that made steps shorter, and "most of it" of any part."""
    names = ("calls_before", "calls_after", "us_before", "us_after")
    faster = {
        "slot": "all_gather 1 MiB",
        "change_ms": -3.0,
        **dict(zip(names, (2, 2, 2000, 500), strict=True)),
    }
    slower = [
        {"slot": f"all_gather {n} MiB", "change_ms": 2.5, **dict(zip(names, (1, 1, 1000, 3500), strict=True))}
        for n in (2, 4, 8)
    ]
    assert compare._largest([faster, *slower], 1.0).startswith(
        "the largest part of it all_gather 2 MiB, 1.00 -> 3.50"
    )
    assert compare._largest([faster, *slower], -1.0).startswith("most of it all_gather 1 MiB")
    assert compare._largest([faster], 1.0) == "no slot by itself"
