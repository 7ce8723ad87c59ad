"""The plot of a whole run: bands, switches, verdicts, trials and every long step, for small and very long runs."""

import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from dynamiccl.agent.report.html import run_plot
from dynamiccl.agent.report.html.course import Band, course_of, in_words
from dynamiccl.agent.report.html.points import as_dashes, binned, sparks, trial_spans
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.losses import Losses
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.terminal import sparkline
from dynamiccl.traces.assemble import COMM_COLUMNS, EVENT_COLUMNS, OFFER_COLUMNS, STEP_COLUMNS, empty
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import MIXED

ROW = {"func": "all_gather", "min_bytes": 0, "max_bytes": 1 << 20, "decision": "ring/ll128/8"}
OTHER = {**ROW, "decision": "ring/ll/4"}
#: The rows of both as the tuner names them.
NAMED = {
    letter: [{**ROW, **dict(zip(("algo", "proto", "n_channels"), choice, strict=True))}]
    for letter, choice in {"A": ("ring", "ll128", 8), "B": ("ring", "ll", 4)}.items()
}
LONG_MS = 900.0
#: Generation -> its rows and whether it is a trial; the run below publishes them in this order.
TABLES = {1: ([ROW], True), 2: ([ROW], False), 3: ([], False), 4: ([OTHER], True), 5: ([OTHER], False)}
#: First step and generation. Step 2,500 begins a trial of A; A is kept, withdrawn, then B is kept.
RAN = [(0, 0), (2500, 1), (2600, 0), (2700, 2), (6000, 3), (7000, 4), (7050, 3), (7100, 5)]
VERDICTS = (2900, 7300)


def long_run(n_steps=10_000):
    """A run of 10,000 steps with two verdicts and a withdrawal, and one step of 900 ms."""
    rng = np.random.default_rng(0)
    index = np.arange(n_steps)
    starts, generations = zip(*RAN, strict=True)
    generation = np.array(generations)[np.searchsorted(starts, index, side="right") - 1]
    times = rng.normal(100.0, 1.0, n_steps) * np.where(np.isin(generation, (1, 2, 4, 5)), 0.8, 1.0)
    times[1234:1235] = LONG_MS
    steps = pd.DataFrame({"index": index, "duration_ns": (1e6 * times).astype(int)})
    steps = steps.assign(rank=0, end_ns=steps["duration_ns"].cumsum(), table_generation=generation)
    steps = steps.reindex(columns=list(STEP_COLUMNS), fill_value=0)
    log = [{"kind": "begins", "out": "."}]
    for number, (rules, is_trial) in TABLES.items():
        table = {"generation": number, "rules": rules, **({"trial_steps": 32} if is_trial else {})}
        log.append({"kind": "table", "table": table})
    log += [{"kind": "named", "letter": letter, "rows": rows} for letter, rows in NAMED.items()]
    log += [{"kind": "verdict", "step": step, "text": "KEPT"} for step in VERDICTS]
    none = {"events": empty(EVENT_COLUMNS), "comms": empty(COMM_COLUMNS), "offers": empty(OFFER_COLUMNS)}
    return Trace("trace", {}, steps=steps, log=log, **none)


@pytest.fixture(scope="module")
def course():
    return course_of(long_run())


def test_bands_switches_verdicts_and_trials_are_those_of_the_run(course):
    assert course.bands == [
        Band(0, 2699, "default"),
        Band(2700, 5999, "A"),
        Band(6000, 7099, "default"),
        Band(7100, 9999, "B"),
    ]
    switches = [(mark.step, mark.text) for mark in course.marks if not mark.is_verdict]
    assert switches == [(2700, "switch to A"), (6000, "switch to NCCL's default"), (7100, "switch to B")]
    assert tuple(mark.step for mark in course.marks if mark.is_verdict) == VERDICTS
    assert trial_spans(course, 1000) == [(2499.5, 100.0), (6999.5, 50.0)]
    assert len(in_words(course)) == 6 and "median step 80" in in_words(course)[1]


def test_turns_are_two_bands_of_step_times_and_a_mixed_step_is_no_table():
    trace = long_run(4000)
    trace.log = [line for line in trace.log if line["kind"] != "table" or line["table"]["generation"] <= 2]
    table = trace.steps["table_generation"].to_numpy().copy()
    table[2500:2600:2] = 0  # the trial of A and the default take turns
    table[2550] = MIXED
    trace.steps["table_generation"] = table
    course = course_of(trace)
    assert [band.table for band in course.bands] == ["default", "A"] and course.bands[1].first == 2700
    assert course.on_trial[2500:2600].sum() == 51 and course.on_trial[2550]
    points = binned(course.steps[course.on_trial], course.ms[course.on_trial], 2000)
    places, heights = as_dashes(*points, 2.0)
    assert np.isnan(heights[2::3]).all() and (heights[0::3] == points[1]).sum() == 51
    lengths = places[1::3] - places[0::3]
    assert np.nanmin(lengths) == np.nanmax(lengths) == 2.0, "each step of the trial is a dash"
    svg = run_plot.draw(course, run_plot.SIZES[0])
    (path,) = re.findall(rf' d="([^"]*)"[^>]*stroke: {run_plot.COLOURS["slot-1"]}', svg)
    assert path.count("L") >= 51, "and is drawn: a path without length would not be"


def test_the_loss_has_a_panel_of_its_own_with_the_switches_in_it(course):
    """Seen: dots of held-out losses were references to ids, which the page's SVG has not, so they were not drawn."""
    pytest.importorskip("matplotlib")
    every = np.arange(10_000)
    losses = Losses(every, 5.5 - every / 4000, every > 2700, [(4999, 4.4), (9999, 3.2)])
    for size in run_plot.SIZES:
        bare, svg = run_plot.draw(course, size), run_plot.draw(course, size, losses=losses)
        ET.fromstring(svg)
        assert "href" not in svg
        assert len(drawn(svg, "ink")) == len(drawn(bare, "ink")) + 1, "the curve of training"
        (dots,) = drawn(svg, "tuned", width=5)
        assert dots.count("L") == len(losses.held_out)
        assert svg.count("stroke-dasharray") == 2 * 3  # one for each switch in each panel
        assert ">loss</text>" in re.sub(r"\s+", "", svg)


def drawn(svg, colour, width=r"[\d.]+"):
    """The lines of a colour."""
    style = f'fill: none; stroke: {run_plot.COLOURS[colour]}; stroke-width: {width}[;"]'
    return re.findall(rf'<path d="([^"]*)"[^>]*{style}', svg)


def test_no_long_step_is_lost_among_many(course):
    steps, times = binned(course.steps, course.ms, 2000)
    assert len(steps) == 2000 and np.nanmax(times) == pytest.approx(LONG_MS)
    assert np.nanmin(times) == course.ms.min()
    few = course_of(long_run(300))
    assert binned(few.steps, few.ms, 2000)[1].tolist() == few.ms.tolist()


def test_steps_that_were_not_recorded_leave_a_gap():
    trace = long_run(300)
    trace.steps = trace.steps[~trace.steps["index"].between(100, 199)]
    course = course_of(trace)
    steps, times = binned(course.steps, course.ms, 2000)
    (place,) = np.flatnonzero(np.isnan(steps))
    assert (steps[place - 1], steps[place + 1]) == (99, 200) and np.isnan(times[place])


def points_of(svg):
    """The points of the longest path of an SVG: the line of step times."""
    paths = re.findall(r' d="([^"]*)"', svg)
    longest = max(paths, key=len)
    return [tuple(map(float, point)) for point in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", longest)]


def test_the_plot_is_whole_for_a_run_with_two_verdicts_and_a_withdrawal(course):
    pytest.importorskip("matplotlib")
    for size in run_plot.SIZES:
        svg = run_plot.draw(course, size)
        ET.fromstring(svg)
        assert f'viewBox="0 0 {size.width} {size.height}"' in svg and "href" not in svg and " id=" not in svg
        points = points_of(svg)
        # matplotlib may leave out points that lie on a line with their neighbours.
        assert 0.5 * size.points < len(points) <= size.points + 2  # an outlier is cut at the edge
        assert all(0 <= x <= size.width and 0 <= y <= size.height for x, y in points)
        assert len(re.findall(r">\s*verdict\s*</text>", svg)) == len(VERDICTS)
        assert svg.count("stroke-dasharray") == 3  # one for each switch
        assert f"fill: {run_plot.COLOURS['slot-1']}" in svg
        # The axis begins at 0: a step of 80 ms lies at 0.8 of one of 100 ms.
        heights = pd.Series([y for _, y in points])
        zero = max(float(y) for y in re.findall(r"M [\d.]+ ([\d.]+) \nL [\d.]+ \1", svg))
        default, table = heights.quantile(0.15), heights.quantile(0.85)
        assert (zero - table) / (zero - default) == pytest.approx(0.8, abs=0.03)
    assert run_plot.beyond(course) == "1 step beyond the axis, the longest 900 ms."


def test_kept_tables_have_one_colour_which_is_not_the_trials(course):
    """Before: every second kept table was tan, as trials nearly are."""
    assert run_plot.band_colour("A") == run_plot.band_colour("B") != run_plot.band_colour("default")
    assert len(set(run_plot.legend(course).values())) == 3


def test_a_return_to_the_default_that_no_step_was_recorded_under_is_shown():
    """Before: the plot ended with the kept table where somebody had stopped the run."""
    trace = long_run(6000)
    trace.log = [line for line in trace.log if line["kind"] != "table" or line["table"]["generation"] <= 3]
    course = course_of(trace)
    assert course.bands[-1] == Band(6000, 6239, "default")
    assert "after step 5999: current table NCCL's default" in in_words(course)


def test_a_step_beyond_the_axis_is_drawn_whole(course):
    """Before: half of its line was outside the picture."""
    trace = long_run()
    trace.steps.loc[2550, "duration_ns"] = int(1e6 * LONG_MS)
    svg = run_plot.draw(course_of(trace), run_plot.SIZES[0])
    (path,) = drawn(svg, "slot-1", width=2)
    assert min(float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)) > run_plot._TOP + 1


def test_the_report_of_10_000_steps_is_small_and_says_first_what_changed(tmp_path):
    pytest.importorskip("matplotlib")
    size = {"func": "all_gather", "min_bytes": (32 << 20) + 1, "max_bytes": 64 << 20}
    row = {**size, "algo": "ring", "proto": "ll128", "n_channels": 8, "own": "ring/simple/16"}
    summary = RunSummary(kept=True, in_force="B", speedup=1.25, speedup_ci95=[1.2, 1.3], decisions=[row])
    path = write_report(tmp_path / "report.html", summary, long_run())
    html = path.read_text(encoding="utf-8")
    assert len(html) < 300_000 and html.count("<svg") == len(run_plot.SIZES)
    assert '<div class="big">all-gather 33-64 MiB: Simple, 16 channels &rarr; LL128, 8 channels</div>' in html
    # Colours are the page's own, for light and dark.
    assert not set(run_plot.COLOURS.values()) & set(re.findall(r"(?:fill|stroke): (#\w{6})", html))
    # `top` reads the step times that the report leaves.
    values = state(tmp_path)["step_times_ms"]
    assert values == sparks(course_of(long_run()))
    drawn = sparkline(values, 20)
    assert len(drawn) == 20 and (drawn[0], drawn[8], drawn[-1]) == ("█", "▇", "▇")


def test_without_matplotlib_the_run_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write_report(tmp_path / "report.html", RunSummary(), long_run())
    html = path.read_text(encoding="utf-8")
    assert "pip install '.[plot]'" in html.replace("&#x27;", "'") and "<svg" not in html
    assert "steps 2700 to 5999: current table A, median step 80" in html
