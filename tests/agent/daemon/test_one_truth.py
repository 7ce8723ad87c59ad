"""No view of a run says another figure than another: console, ``show``, ``top``, report, JSON and metrics of
random runs; and no sentence contradicts the summary that it is made from."""

import functools
import io
import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from command import invoke
from dynamiccl.agent.daemon.account import TableNames, comparison_row
from dynamiccl.agent.daemon.console import Expected, LiveView, show_summary
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.runs import ALIVE, METRICS, state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import change, cost, ms, outcome, verdict
from dynamiccl.envs.live.job_ends import JobEnded
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.replay.decisions import load
from dynamiccl.envs.replay.job import RecordedJob
from dynamiccl.envs.search.comparison import Comparison, SequentialTest, TimedWindow
from dynamiccl.envs.search.step_times import Quads
from dynamiccl.traces.files import Trace
from dynamiccl.traces.header import plain
from dynamiccl.traces.reasons import Happened, RunEnds, revived
from dynamiccl.traces.records import Decision
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from overhead import compare
from rich.console import Console
from synthetic_trace import GATHER, SCATTER, write_run
from test_report import text_of

#: Seeds of runs, and the steps that each may take before the job ends: the last ends before its verdict.
RUNS = [(0, 10**6), (1, 10**6), (4, 60)]


class Noisy(RecordedJob):
    """A recorded job whose steps scatter, whose tables save a ``part`` of what is on record, and which ends."""

    def __init__(self, trace, recorded, seed, steps, part, spread):
        super().__init__(trace, recorded, seed=seed)
        self.steps, self.rng, self.part, self.spread = steps, np.random.default_rng(seed), part, spread

    def window(self, *asked, **more):
        return self.scattered(super().window(*asked, **more))

    def alternate(self, *asked, **more):
        return self.scattered(super().alternate(*asked, **more))

    def scattered(self, found):
        if self.last_step > self.steps:
            raise JobEnded(RunEnds.JOB_ENDED())
        ms = found.durations_ms
        return replace(found, durations_ms=ms * (1 + self.spread * self.rng.standard_normal(len(ms))))

    def saving(self, decisions):
        return self.part * super().saving(decisions)


def tuned_run(folder, seed, steps, part, spread):
    """(folder, summary, lines that were told) of a tuned run."""
    _, trace = write_run(folder / "trace", search=8, final=4, seed=seed)
    job, lines = Noisy(trace, load(trace), seed, steps, part, spread), []
    tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement", seed), on_window=lines.append)
    tuner.run()
    try:
        while tuner.search is not None and not tuner.search.is_done and len(lines) < 150:
            tuner.step()
    except JobEnded as error:
        tuner.result.ended(error.why)
    s = tuner.sum_up()
    s.emulated, s.trace = True, str(folder / "trace")
    s.steps, s.report = job.last_step, str(folder / "report.html")
    s.consistency = {"calls_checked": 4711, "mismatches": 0}
    s.write(folder)
    return folder, s, lines


@pytest.fixture(scope="module", params=RUNS, ids=[f"seed {seed}, {steps} steps" for seed, steps in RUNS])
def run(request, tmp_path_factory):
    seed, steps = request.param
    return tuned_run(
        tmp_path_factory.mktemp("run"), seed, steps, (1.0, 0.3, 0.0)[seed % 3], 0.004 + 0.002 * (seed % 3 > 0)
    )


#: Random runs: one, the same each time, in ``make test``, other ones each time in ``make test-random``.
EXAMPLES = 1 if settings().derandomize else int(os.environ.get("EXAMPLES", "100"))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([40, 60, 140, 400, 10**6]),
    part=st.floats(-0.3, 1.2),
    spread=st.floats(0.0005, 0.03),
)
@example(seed=12398820, steps=400, part=0.5, spread=0.02734375)
# The default itself shows that the table is slower.
@example(seed=47639, steps=400, part=0.0005, spread=0.001953125)
# It is looked at while the job is searched anew: `show` said "no decisions".
@example(seed=803, steps=10**6, part=0.0, spread=0.026624208376767385)
# A kept table of one row is tried without it: that is the default.
@example(seed=3093, steps=10**6, part=0.0, spread=0.0005)
def test_it_holds_in_runs_at_random(tmp_path_factory, seed, steps, part, spread):
    """The same runs each time in ``make test``; ``make test-random`` draws others and prints its seed."""
    one = tuned_run(tmp_path_factory.mktemp("random"), seed, steps, part, spread)
    test_no_two_places_tell_different_figures(one)
    test_no_row_in_force_is_told_to_be_slower_and_none_has_a_part_of_what_was_only_seen_together(one)
    test_step_times_of_the_verdict_are_medians_of_windows_that_were_measured(one)
    test_a_comparison_names_its_two_sides(one)
    test_what_is_told_as_it_happens_agrees_with_the_end(one)


@functools.cache
def shown(name, folder, *more):
    """What a command says of a run that is over, asked once."""
    done = invoke([name, str(folder), *more])
    assert done.exit_code == 0, done.stdout + done.stderr
    return done.stdout


def views(folder, s):
    """What each view says of the run, as text with its spaces as one."""
    console = Console(file=io.StringIO(), width=80)
    show_summary(console, s)
    told = {"console": console.file.getvalue()} | {name: shown(name, folder) for name in ("show", "top")}
    told["report"] = text_of(write_report(folder / "report.html", s, Trace.read(folder / "trace")))
    return {name: " ".join(text.split()) for name, text in told.items()}


def test_no_two_places_tell_different_figures(run):
    folder, s, _ = run
    told, read = views(folder, s), RunSummary.read(folder)
    assert vars(read) == revived(json.loads(json.dumps(plain(vars(s)))))
    for name in ("console", "show", "report"):
        assert verdict(s) in told[name] and "4711 collectives compared across ranks" in told[name], name
    story = json.loads(shown("show", folder, "--json"))
    assert story["summary"] == plain(vars(read))
    one = state(folder)
    assert [one] == json.loads(shown("top", folder, "--json"))
    assert one["verdict"] == verdict(s) and (one["cost_s"], one["budget_s"]) == (s.cost_s, s.budget_s)
    if s.kept:
        gain = re.search(r"([\d.]+ % shorter) \((-?[\d.]+ to [\d.]+)", change(s.speedup, s.speedup_ci95))
        value, interval = gain[1], gain[2]
        for name in ("console", "show", "report"):
            seen = set(
                re.findall(r"steps ([\d.]+ % \w+) than NCCL's default \((-?[\d.]+ to [\d.]+)\)", told[name])
            )
            assert seen <= {(value, interval)}, (name, seen)
        assert f"{value.removesuffix(' shorter')} ({interval})" in told["top"]
        assert one["gain"] == pytest.approx(1 - 1 / s.speedup) and one["step_ms"] == s.tuned_step_ms
        assert all(
            ms(value) in told[name]
            for name in ("console", "show", "report")
            for value in (s.default_step_ms, s.tuned_step_ms)
        )
        assert cost(s) in verdict(s)
    else:
        assert one["gain"] is None and not re.search(r"(?<!NOTHING )KEPT", "".join(told.values()))
    families = _metrics(folder)
    for name, key, _ in METRICS:
        value = float(one["state"] in ALIVE) if key == "state" else one[key]
        scaled = value if value is None or key != "step_ms" else value / 1e3
        assert families.get(name.removesuffix("_total")) == (
            None if scaled is None else pytest.approx(float(scaled))
        )
    # What each collective costs: one figure a slot, of the same whole steps, in the report and in show.
    calls_of = {slot["slot"]: slot["calls"] for slot in story["slots"]}
    assert all(chain["calls"] == pytest.approx(calls_of[chain["slot"]]) for chain in story["why"])
    for slot in story["slots"]:
        calls = f"{slot['calls']:.3g}"
        assert re.search(rf"{re.escape(slot['slot'])} {calls} ", told["report"]), slot["slot"]
        assert re.search(rf"{re.escape(slot['slot'])} │ {re.escape(calls)} │", told["show"]), slot["slot"]


def _metrics(folder):
    parser = pytest.importorskip("prometheus_client.parser")
    path = folder / "d.prom"
    assert invoke(["top", str(folder), "--once", "--metrics", str(path)]).exit_code == 0
    found = parser.text_string_to_metric_families(path.read_text())
    return {f.name: f.samples[0].value for f in found if f.samples}


def test_no_row_in_force_is_told_to_be_slower_and_none_has_a_part_of_what_was_only_seen_together(run):
    folder, s, _ = run
    chains = json.loads(shown("show", folder, "--json"))["why"]
    text = shown("show", folder)
    assert not re.search(r"saved|saves|sure +\d", text)
    for chain in chains:
        if not chain["in_force"]:
            continue
        mine = [c for c in chain["alone"] if c["decision"] == chain["decided"] and c["outcome"] == "kept"]
        assert all(c["speedup"] > 1 for c in mine)
    rows = sum(bool(d["algo"] or d["n_channels"]) for d in s.decisions)
    if s.kept and rows > 1 and not any(c["alone"] for c in chains):
        assert f"these {rows} rows together: steps" in text and "not separable" in text
    assert not s.kept or "longer" not in verdict(s)


def test_step_times_of_the_verdict_are_medians_of_windows_that_were_measured(run):
    """Seen: "step, tuned" was the default divided by the speed-up, and the default that of the job's first steps."""
    _, s, lines = run
    for letter, value, n in (
        ("default", s.default_step_ms, s.default_windows),
        (s.compared, s.tuned_step_ms, s.tuned_windows),
    ):
        if value is None:
            continue
        c = next(c for c in s.comparisons if c["table_ms" if letter == s.compared else "against_ms"] == value)
        seen = [
            x.step_ms for x in lines if x.table == letter and c["steps"][0] <= x.first_step <= c["steps"][1]
        ]
        assert n >= 1
        if letter != "default":  # which runs beside, and has no line of its own
            assert min(seen) <= value <= max(seen)


def test_a_comparison_names_its_two_sides(run):
    _, s, lines = run
    for c in s.comparisons:
        assert c["table"] != c["against"] and c["table"] in {"default", *s.tables}
        if c["outcome"] == "kept":
            assert c["speedup"] > 1
        if c["speedup"] is not None:
            assert re.search(rf"{c['table']}\b.* than ({c['against']}\b|NCCL's default)", str(outcome(c)))
    begun = [e for line in lines for e in line.events if e.reason is Happened.COMPARES]
    assert all(
        re.fullmatch(r"comparison: ([A-Z]+|NCCL's default) against ([A-Z]+|NCCL's default)", str(e))
        for e in begun
    )
    described = [e.facts["table"] for line in lines for e in line.events if e.reason is Happened.TABLE]
    assert len(described) == len(set(described))


def test_what_is_told_as_it_happens_agrees_with_the_end(run):
    """Seen: "rolled back", then "the table stays in force"."""
    _, s, lines = run
    kept = [e for line in lines for e in line.events if e.reason is Happened.KEPT]
    assert kept == [outcome(c) for c in s.comparisons if c["outcome"] == "kept"]
    if s.kept:
        assert kept and kept[-1].facts["table"] == s.in_force
    assert lines[-1].in_force == s.in_force
    most = 0.0  # Seen: "best so far F: 42.7 % shorter", after "kept D: 46.2 % shorter"
    for line in lines:
        best = [e for e in line.events if e.reason is Happened.BEST]
        assert not best or 1 - 1 / best[0].facts["speedup"] >= most - 1e-9
        if line.phase in ("search", "verify") and line.verdict == "measured" and line.table != "default":
            most = max(most, 1 - line.step_ms / line.default_ms)


def test_tables_have_one_letter_each_and_windows_belong_to_both_sides():
    names = TableNames()
    a, b = {GATHER: Decision("ring", "ll128", 8)}, {SCATTER: Decision("ring", "ll128", 8)}
    assert [names.of(t) for t in ({}, a, b, dict(a), {GATHER: Decision()})] == [
        "default",
        "A",
        "B",
        "A",
        "default",
    ]
    one = Comparison(np.array([8]), np.array([0]), SequentialTest(0.01, 0.05))
    logs, none = np.full(4, math.log(10 / 9)), np.zeros(0)
    one.add_quads(Quads(logs, none, none, none), TimedWindow(10.0, 5, 6), TimedWindow(9.0, 8, 9))
    row = comparison_row(one, "A", "default")
    assert row["speedup"] == pytest.approx(10 / 9) and row["against_windows"] == 1 and row["steps"] == [5, 9]
    assert names.describe("A", "default") and not names.describe("A")
    assert compare(np.full(4, 2.0), np.full(4, 1.0))[0] == pytest.approx(2.0)


def test_before_a_run_it_is_said_what_a_verdict_takes_and_as_it_goes_what_is_left():
    expected = Expected()
    assert "may cost up to 5% of the job's time" in expected.told(0.05)
    expected.steps = list(range(100, 1101, 10))
    assert "takes 600 steps in half of simulated jobs, 200 to 1000 in 8 of 10" in expected.told(0.05)
    assert expected.after(0) == 600 and expected.after(599) == 850 and expected.after(10**9) is None
    expected.steps = []
    assert expected.after(0) is None and "simulated" not in expected.told(0.05)


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_a_line_is_at_most_80_columns(run, capsys, quiet):
    _, s, lines = run
    with LiveView(0.05, quiet=quiet) as view:
        for line in lines:
            view.window(line)
    view.console.quiet = False
    show_summary(view.console, s, quiet)
    said = capsys.readouterr().err.splitlines()
    free = [
        line for line in said if not line.startswith(("again ", "more ", "report "))
    ]  # paths are as long as they are
    assert max(map(len, free)) <= 80 and len(said) < (8 if quiet else 70)
    assert sum(line.startswith(verdict(s)[:20]) for line in said) == 1


def test_on_a_terminal_one_block_tells_how_it_stands(run):
    _, _, lines = run
    view = LiveView(0.05)
    view._expected.steps = [10_000]
    view.console = Console(file=io.StringIO(), width=80, force_terminal=True)
    for line in lines[:12]:
        view._recent.append((line.step_ms, line.table == "default"))
    view.console.print(view._block(lines[min(3, len(lines) - 1)]))
    text = re.sub(r"\x1b\[[0-9;]*m", "", view.console.file.getvalue())
    assert (
        "current table: " in text
        and "on trial: " in text
        and "verdict in about" in text
        and "allowed" in text
    )
    assert re.search(r"step [▁▂▃▄▅▆▇█]+ ", text) and max(map(len, text.splitlines())) <= 80


def test_a_recording_is_not_told_to_go_on(tmp_path):
    from dynamiccl.agent.report.texts import nothing_decided

    assert "recording" in nothing_decided(RunSummary(), {"source": "kineto"})
    assert "goes on" in nothing_decided(RunSummary(), {})
    assert nothing_decided(RunSummary(ended="over"), {}) == "over"


def test_a_trace_of_calls_without_what_nccl_offered_is_not_told_to_hold_none(tmp_path):
    """Seen: "holds no all_gather or reduce_scatter that a tuner can reach" of 576 calls."""
    _, trace = write_run(tmp_path / "trace", search=2, final=2)
    bare = Trace(**{**vars(trace), "offers": trace.offers.head(0)})
    with pytest.raises(Exception, match=r"holds \d+ calls to tune, but not what NCCL offers .* --cluster"):
        load(bare)
