"""The report: self-contained, says what it lacks, and opens in a browser without an error or a request."""

import html
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pandas as pd
import pytest
from dynamiccl.agent.report.html.figures import timeline_figure
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import ms, verdict
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.costs import generations, slot_costs, typical_step
from dynamiccl.traces.writer import TraceWriter
from restarted import LIVES, restarted
from synthetic_trace import CALL_US, GATHER, LAYERS, SCATTER, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    summary, trace = write_run(folder / "trace")
    return summary, trace, write_report(folder / "report.html", RunSummary.of(summary), trace)


def text_of(path):
    """The page without scripts and styles, tags removed."""
    text = re.sub(r"<(script|style)>.*?</\1>", " ", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)).replace("&#x27;", "'").replace("&lt;", "<")


def marks_of(path, heading):
    """The marks of the figure below a heading: [(tag, {attribute: value}, what it says)]."""
    section = path.read_text(encoding="utf-8").partition(f"<h2>{heading}</h2>")[2].partition("</section>")[0]
    found = []
    for tag, attributes, inside in re.findall(
        r"<(rect|line|text) ([^>]*?)/?>(.*?)(?=<(?:rect|line|text|/svg))", section
    ):
        said = html.unescape(re.sub(r"</?(?:title|text|rect)>", "", inside))
        found.append((tag, dict(re.findall(r'([\w-]+)="([^"]*)"', attributes)), said))
    return found


def per_cent(mark, name):
    return float(mark[1][name].removesuffix("%"))


class Tags(HTMLParser):
    """Checks that tags nest and collects every attribute that can name a resource."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.scripts = [], [], 0

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.links += [v for k, v in attrs if k in ("src", "href", "data", "action", "poster", "srcset")]
        if tag not in ("meta", "link", "img", "br", "path", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect", "line"):
            assert self.open.pop() == tag


def test_one_file_without_a_single_link(run):
    _, _, path = run
    html = path.read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(html)
    assert tags.open == [] and tags.links == [] and tags.scripts == 0
    assert "default-src 'none'" in html and len(html) < 1.5e6
    style = re.search(r"<style>(.*?)</style>", html, flags=re.S)[1]
    assert "url(" not in style and "@import" not in style


def test_figures_are_honest_about_their_source(run):
    summary, _, path = run
    text = text_of(path)
    assert (
        "emulated cluster h100-2x8, bytes x 64, compute x 8: not GPU times; they are counted, not waited"
        in text
    )
    assert verdict(RunSummary.of(summary)) in text and "against itself: 0.994 to 1.005)" in text
    assert ms(summary["default_step_ms"]) in text and ms(summary["tuned_step_ms"]) in text
    for decision in summary["decisions"]:
        assert f"{decision['algo']}/{decision['proto']}/{decision['n_channels']}" in text
    assert "collectives compared across ranks, 0 mismatches" in text and "lacks" not in text


def test_a_real_gpu_run_wears_no_badge(run, tmp_path):
    summary, trace, _ = run
    real = Trace(**{**vars(trace), "header": {**trace.header, "emulated": False}})
    path = write_report(tmp_path / "r.html", RunSummary.of({**summary, "emulated": False}), real)
    assert "not GPU times" not in text_of(path) and "Emulated" not in text_of(path)


def test_costs_are_those_of_the_job(run):
    _, trace, path = run
    which = generations(trace, None)
    assert which == generations(trace, run[0]["decisions"])
    costs = slot_costs(trace.events, which.default, which.tuned).set_index("slot")
    gather, scatter = costs.loc[str(GATHER)], costs.loc[str(SCATTER)]
    n_bytes = 8 << 20
    for row, func in ((gather, "all_gather"), (scatter, "reduce_scatter")):
        prices = CALL_US[func, n_bytes]
        ran = tuple(int(x) if x.isdigit() else x for x in row["ran"].split("/"))
        assert row["own"] == "ring/ll/8" and row["default_us"] == pytest.approx(
            prices["ring", "ll", 8], rel=0.03
        )
        assert row["tuned_us"] == pytest.approx(prices[ran], rel=0.03)
    assert gather["calls"] == 2 * LAYERS - 1 and scatter["calls"] == LAYERS
    assert gather["n_bytes"] == n_bytes and gather["n_default"] > 50
    text = text_of(path)
    assert "all_gather 5-8 MiB" in text and f"{gather['default_us']:.1f} us" in text


def test_timeline_names_the_ranks_of_the_job():
    """Two groups of two ranks. Before: a lane for each rank of a communicator, so rank 2 was drawn over rank 0."""
    one = restarted(LIVES[:1])
    events = pd.concat([one.events, one.events.assign(comm_id=2, pid=one.events["pid"] + 2)])
    steps = pd.concat([one.steps, one.steps.assign(rank=one.steps["rank"] + 2, pid=one.steps["pid"] + 2)])
    trace = replace(one, events=events.reset_index(drop=True), steps=steps)
    drawn = timeline_figure(trace, generations(trace), RunSummary())
    for rank in range(4):
        assert drawn.count(f">rank {rank} AG<") == 2, "once in the default step, once in the tuned one"
    assert drawn.count("<rect") == 2 * 4


def test_timeline_shows_one_step_of_each_kind(run):
    summary, trace, path = run
    which = generations(trace, summary["decisions"])
    bars = [mark for mark in marks_of(path, "Timeline of a step") if mark[0] == "rect"]
    n, length = 0, 0.0
    for wanted in (which.default, which.tuned):
        step = typical_step(trace, wanted)
        events = trace.events[trace.events["step"] == step]
        assert events["start_ns"].notna().all() and set(events["table_generation"]) <= wanted
        n, length = n + len(events), length + float((events["end_ns"] - events["start_ns"]).sum()) / 1e6
    assert len(bars) == n and min(per_cent(bar, "x") for bar in bars) >= 0
    assert sum(float(said.rpartition(", ")[2].split()[0]) for *_, said in bars) == pytest.approx(
        length, rel=1e-2
    )
    assert max(per_cent(bar, "x") + per_cent(bar, "width") for bar in bars) <= 100.01
    # One slot has one colour.
    colours = {(said.partition(",")[0], attributes["fill"]) for _, attributes, said in bars}
    assert len(colours) == 4 == len({colour for _, colour in colours})


def test_gpu_clock_that_is_not_the_hosts(run, tmp_path):
    summary, trace, _ = run
    events = trace.events.copy()
    for rank, shift in ((0, 10**15), (1, 3 * 10**15)):
        mine = events["rank"] == rank
        events.loc[mine, "start_ns"] += shift
        events.loc[mine, "end_ns"] += shift
    path = write_report(
        tmp_path / "r.html", RunSummary.of(summary), Trace(**{**vars(trace), "events": events})
    )
    marks = marks_of(path, "Timeline of a step")
    starts = [per_cent(mark, "x") for mark in marks if mark[0] == "rect"]
    assert min(starts) == 0 and max(starts) <= 100
    assert not any(
        mark[1].get("stroke-dasharray") for mark in marks
    )  # no end of the step, which is the host's


def test_a_job_that_ended_early(tmp_path):
    summary, trace = write_run(tmp_path / "trace", search=3, stop_early=True)
    text = text_of(write_report(tmp_path / "r.html", RunSummary.of(summary), trace))
    assert "NO VERDICT" in text and "What this report lacks" in text and "hence no speed-up" in text
    assert "Step time over the run" in text and "What each collective costs" in text


def test_an_empty_summary_and_an_empty_trace(tmp_path):
    TraceWriter(tmp_path / "t", {}).close()
    path = write_report(tmp_path / "new" / "r.html", RunSummary(), Trace.read(tmp_path / "t"))
    text = text_of(path)
    assert "no collective was seen" in text and "no measuring window was finished" in text
    assert "<svg" not in path.read_text(encoding="utf-8")  # nothing to draw


@pytest.mark.slow
def test_every_key_may_be_absent_or_none(run, tmp_path):
    summary, trace, _ = run
    for key in summary:
        without = {k: v for k, v in summary.items() if k != key}
        first = write_report(tmp_path / "a.html", RunSummary.of(without), trace)
        second = write_report(tmp_path / "b.html", RunSummary.of({**summary, key: None}), trace)
        assert text_of(first) == text_of(second)


def test_mismatches_and_a_losing_table_are_said_plainly(run, tmp_path):
    summary, trace, _ = run
    bad = {"calls_checked": 2000, "mismatches": 3}
    slower = {"speedup": 0.99, "speedup_ci95": [0.97, 1.01], "kept": False, "consistency": bad}
    slower |= {"default_step_ms": 10.0, "tuned_step_ms": 10.5}
    text = text_of(write_report(tmp_path / "r.html", RunSummary.of({**summary, **slower}), trace))
    assert "2000 collectives compared across ranks, 3 mismatches" in text
    assert "NOTHING KEPT" in text and "1.0 % longer" in text and "NCCL's default, which stays" in text


def test_text_from_outside_cannot_become_markup(run, tmp_path):
    summary, trace, _ = run
    evil = "</script><script>alert(1)</script><img src=x>"
    windows = [{**line, "decision": evil} if line["kind"] == "window" else line for line in trace.log]
    poisoned = Trace(**{**vars(trace), "log": windows, "header": {**trace.header, "command": evil}})
    decisions = [{**d, "why": evil} for d in summary["decisions"]]
    path = write_report(tmp_path / "r.html", RunSummary.of({**summary, "decisions": decisions}), poisoned)
    tags = Tags()
    tags.feed(path.read_text(encoding="utf-8"))
    assert tags.scripts == 0 and tags.links == [] and "&lt;/script&gt;" in path.read_text(encoding="utf-8")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("early", [False, True])
def test_opens_in_a_browser_with_no_error_and_no_request(tmp_path, run, early):
    path = run[2]
    if early:
        summary, trace = write_run(tmp_path / "trace", search=3, stop_early=True)
        path = write_report(tmp_path / "r.html", RunSummary.of(summary), trace)
    log = tmp_path / "net.json"
    args = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    args += [
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--enable-logging=stderr",
        "--v=0",
    ]
    args += [f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", "--virtual-time-budget=6000"]
    args += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run(
        [*args, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("<svg") >= 2  # both figures were drawn
    # The browser calls home on its own account; whatever else was asked for, the page asked for.
    asked = set(
        re.findall(r'"url":"(?:https?|wss?)://([^/"]+)', log.read_text(encoding="utf-8", errors="replace"))
    )
    assert not {host for host in asked if not host.endswith((".google.com", ".googleapis.com"))}


def test_frames_are_not_changed_by_reporting(run, tmp_path):
    summary, trace, _ = run
    before = trace.events.copy()
    write_report(tmp_path / "r.html", RunSummary.of(summary), trace)
    pd.testing.assert_frame_equal(trace.events, before)


def luminance(colour):
    """WCAG 2.1, relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_light_and_dark(run):
    """WCAG AA: 4.5 for text, of every colour that text has on every ground that it stands on."""
    style = re.search(r"<style>(.*?)</style>", run[2].read_text(encoding="utf-8"), flags=re.S)[1]
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
        for part in re.split(r"@media \(prefers", style)[:2]
    )
    for colours in (light, {**light, **dark}):
        pairs = [(ink, ground) for ink in ("ink", "quiet", "tuned", "bad") for ground in ("ground", "card")]
        pairs += [("warn", "warn-soft"), ("tuned", "tuned-soft"), ("ink", "faint")]
        found = {pair: contrast(*(colours[c] for c in pair)) for pair in pairs}
        assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}


def test_the_page_is_built_for_every_reader(run):
    """Language, title, one h1 before its h2s, headers with scope, names for figures and for what scrolls."""
    html = run[2].read_text(encoding="utf-8")
    body = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert '<html lang="en">' in html and re.search(r"<title>[^<]+</title>", html)
    assert 'name="viewport" content="width=device-width' in html
    levels = [int(n) for n in re.findall(r"<h([1-6])", body)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    assert body.count("<th") - body.count("<thead") == body.count('<th scope="col"') > 0
    assert all("aria-label=" in tag for tag in re.findall(r'<[^>]*role="(?:img|figure|region)"[^>]*>', body))
    assert all('role="img"' in tag for tag in re.findall(r"<svg[^>]*>", body))
    assert all('tabindex="0"' in tag for tag in re.findall(r'<div class="scroll"[^>]*>', body))
    assert len(re.findall(r"<table", body)) == len(re.findall(r'<div class="scroll"', body))


def test_the_report_tells_the_chain_behind_each_decision(run):
    text = text_of(run[2])
    assert "by its own estimates" in text and "these 2 rows together" in text and "not separable" in text
