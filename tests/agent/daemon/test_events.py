"""One log tells a run: whoever folds it has the summary that the tuner wrote, at each moment and after a kill."""

import json
import os
import random
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
from dynamiccl.agent.daemon import summarise
from dynamiccl.agent.daemon.account import TableNames, row_of
from dynamiccl.agent.daemon.daemon import Daemon
from dynamiccl.agent.daemon.events import Events, tell_after
from dynamiccl.agent.report import summary as summaries
from dynamiccl.agent.report.summary import FIELDS, LOG_FILE, Fold, RunSummary
from dynamiccl.traces.files import Trace
from dynamiccl.traces.header import plain
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.writer import TraceWriter
from fake_job import GATHER
from left_run import leave
from test_called_off import LaterJob
from watched_job import GOOD, OTHER, WatchedJob, tuner_of


def told(summary):
    return json.loads(json.dumps(plain(vars(summary))))


def on_disk(out):
    return json.loads((out / "summary.json").read_text())


def changes(at, **values):
    """A look at a job that sets its attributes at one look, and ends it after ``at + 60`` more."""
    looks = []

    def look(job):
        looks.append(1)
        if len(looks) == at:
            vars(job).update(values)
        return len(looks) < at + 60

    return look


def mismatch(job):
    job.audit.mismatches = int(job.last_step > 300)
    return job.last_step < 400


#: What happens to a job after its verdict.
LOOKS = {
    "nothing": changes(0),
    "its table is the slower one": changes(12, best=None),
    "another table is better": changes(12, best=OTHER),
    "it becomes slower": changes(20, base_ms=250.0),
    "two ranks differ": mismatch,
}


@pytest.mark.parametrize("what", LOOKS)
def test_the_log_of_a_run_folds_to_the_summary_that_the_tuner_wrote(folder, tmp_path, what):
    """Also in the middle of it, and to the same summary from a trace that was read."""
    out, n_looks = tmp_path / "out", []

    def look(job):
        n_looks.append(1)
        if len(n_looks) % 10 == 0:
            one._leave()
            assert told(one.outcome) == told(RunSummary.read(out)) == on_disk(out) == on_disk(folder.path)
        return LOOKS[what](job)

    with tuner_of(WatchedJob(folder, look), out) as one:
        last = one.serve()
    assert len(n_looks) >= 10 and last.comparisons and last.windows
    for name, value in told(last).items():
        assert on_disk(out)[name] == value, name
        assert told(RunSummary.read(out))[name] == value, name
    assert told(RunSummary.of_trace(Trace.read(out))) == told(last)


def test_each_field_of_the_summary_has_one_source():
    of_kinds = [name for names in FIELDS.values() for name in names]
    others = [*summaries._OF_HEADER, "bytes_scale", "compute_scale", "comparisons", "tables", "no_table"]
    others += ["trace", "table", "report", "log"]  # files in the tuner's folder
    assert sorted([*of_kinds, *others]) == sorted(one.name for one in fields(RunSummary))


def killed(folder, out, job, when):
    """Let a tuner run until ``when(window)``, and leave what it would have left if it had been killed there."""
    left = {}

    def look(line):
        if not left and when(line):
            left.update({path: path.read_bytes() for path in (out / LOG_FILE, folder.path / "summary.json")})
            left["told"] = told(one.tuner.sum_up())
            raise KeyboardInterrupt

    with tuner_of(job, out) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "close", lambda remove: None)
        one.on_window = look
        one.serve()
    for fd in (one._lock, one._out_lock):
        os.close(fd)
    found = left.pop("told")
    for path, text in left.items():
        path.write_bytes(text)
    (out / "summary.json").unlink()
    return found


class Slower(WatchedJob):
    """Every table costs."""

    def _ms(self, decisions):
        return self.base_ms * (1 + 0.06 * sum(not d.is_auto for d in decisions.values()))


def test_a_tuner_that_was_killed_leaves_what_it_knew_and_the_next_one_has_what_is_left_of_the_budget(
    folder, tmp_path
):
    """Before: no summary at all until the verdict, and the next tuner might lose the whole budget again."""
    out = tmp_path / "out"
    before = killed(folder, out, Slower(folder, lambda job: True), lambda line: line.index == 8)
    first = RunSummary.read(out)
    assert first.windows == 8 and first.cost_s == before["cost_s"] > 0 and not first.kept and not first
    assert first.run_id == folder.id and first.trace == str(out / "trace")
    with tuner_of(Slower(folder, lambda job: False), out) as two:
        last = two.serve()
    assert last.windows > 8 and last.cost_s > first.cost_s
    assert two.tuner.search.lost * 0.1 == pytest.approx(last.cost_s + last.trials_cost_s, rel=0.1)


def test_a_table_of_a_tuner_that_was_killed_before_its_verdict_keeps_its_figures(folder, tmp_path):
    out, job = tmp_path / "out", LaterJob(folder, lambda job: True)
    killed(folder, out, job, lambda line: job.confirmed and line.phase == "search")
    first = RunSummary.read(out)
    assert first.kept and first.comparisons and first.steps_to_verdict is None
    again = LaterJob(folder, lambda job: False)
    again.confirm(job.confirmed)
    with tuner_of(again, out) as two:
        last = two.serve()
    assert last.kept and last.comparisons == first.comparisons and last.speedup == first.speedup
    assert last.tables == first.tables and last.in_force == first.in_force, "letters go on"


@pytest.fixture(scope="module")
def log_of_a_run(tmp_path_factory):
    """The log of a run with several comparisons, and the summary that it folds to."""
    from dynamiccl.envs.nccl.shm import RunFolder

    out, run = tmp_path_factory.mktemp("run") / "out", RunFolder.create()
    with tuner_of(WatchedJob(run, changes(12, best=OTHER)), out) as one:
        last = one.serve()
    return out, last


def test_a_log_that_ends_anywhere_can_be_read(log_of_a_run, tmp_path):
    """A kill may cut the last line; whatever is left of a log, it says what was so at its end."""
    out, last = log_of_a_run
    shutil.copytree(out, tmp_path / "cut", symlinks=True)
    log = (out / LOG_FILE).read_bytes()
    steps = 0
    for end in sorted(random.Random(1).sample(range(len(log)), 40)):
        (tmp_path / "cut" / LOG_FILE).write_bytes(log[:end])
        found = Fold.read(tmp_path / "cut")
        assert steps <= (found.summary.steps or 0) + 20 and (found.summary.steps or 0) <= last.steps
        steps = found.summary.steps or 0
    assert steps


def test_lines_of_no_shape_say_nothing(log_of_a_run, tmp_path):
    out, last = log_of_a_run
    shutil.copytree(out, tmp_path / "odd", symlinks=True)
    with (tmp_path / "odd" / LOG_FILE).open("a") as log:
        log.write('7\n{"kind": "comparison"}\n{"kind": "named"}\n{"kind": "comparison", "number": "x"}\n[')
    assert told(RunSummary.read(tmp_path / "odd")) == told(last)


def test_a_log_that_was_thinned_folds_to_the_same_summary(log_of_a_run, tmp_path):
    """Before, lines of its middle went as they stood there: with them comparisons and names of tables."""
    out, last = log_of_a_run
    lines = [json.loads(line) for line in (out / LOG_FILE).read_text().splitlines() if line]
    for most in (2**18, 2**19):
        folder = tmp_path / f"at-most-{most}"
        with TraceWriter(folder / "trace", json.loads((out / "trace" / "header.json").read_text())) as writer:
            writer.most_bytes = most
            for line in lines:
                writer.log(line["kind"], {name: value for name, value in line.items() if name != "kind"})
        n_lines = len((folder / LOG_FILE).read_text().splitlines())
        assert n_lines < len(lines), "it was thinned"
        assert told(RunSummary.read(folder)) == told(last)


def test_an_event_that_changes_nothing_is_none_and_what_is_told_early_is_written_first():
    events, written = Events(lambda: 5), []
    events.tell("end", ended=RunEnds.ONCE())
    events.open(lambda *line: written.append(line))
    events.tell("end", ended=RunEnds.ONCE())
    events.tell("stand", kept=True)
    events.close()
    events.tell("end", ended=None)
    assert [(kind, line["step"]) for kind, line in written] == [("end", 5), ("stand", 5)]
    assert events.summary.ended is None and written[0][1]["ended"]["code"] == "once"


def test_what_is_told_while_the_disk_is_full_does_not_stop_who_tells_and_is_written_later():
    """A table is withdrawn also if that cannot be written down; a window that cannot be written ends tuning."""
    events, written, is_full = Events(lambda: 5), [], [True]

    def write(*line):
        if is_full:
            raise OSError(28, "No space left on device")
        written.append(line)

    events.open(write)
    events.tell("stand", kept=True)
    events.tell("stand", kept=False, dropped=RunEnds.SLOWER())
    with pytest.raises(OSError, match="No space"):
        events.tell("window", index=1, last_step=4)
    assert events.summary.dropped == RunEnds.SLOWER() and not written
    is_full.clear()
    events.tell("end", ended=RunEnds.ONCE())
    assert [kind for kind, _ in written] == ["stand", "stand", "window", "end"]


def test_what_the_lines_come_to():
    begins, row = {"kind": "begins", "out": "x"}, {"table": "A", "against": "default"}
    rows = [{"func": "all_gather"}]
    lines = [
        begins,
        {"kind": "named", "letter": "A", "rows": rows},
        {"kind": "comparison", "number": 0, "row": row},
    ]
    lines += [
        {"kind": "window", "index": 3, "in_force": "B", "last_step": 9},
        {"kind": "stand", "kept": True, "in_force": "A"},
    ]
    kept = Fold({}, lines).summary
    assert (kept.comparisons, kept.tables, kept.in_force, kept.windows) == ([row], {"A": rows}, "A", 3)
    assert kept and kept.table == "x/table.json" and kept.no_table is None
    searched = Fold({}, [*lines, {"kind": "searches"}, {"kind": "stand", "kept": False}]).summary
    assert (searched.comparisons, searched.tables, searched.in_force) == ([], {}, "default")
    assert searched.no_table is None and searched.table is None and not searched, "it has come to nothing yet"
    dropped = Fold({}, [*lines, {"kind": "stand", "kept": False, "dropped": plain(RunEnds.SLOWER())}]).summary
    assert dropped and dropped.no_table == dropped.dropped == RunEnds.SLOWER()
    again = Fold({}, [*lines, begins])
    assert not again.window and not again.summary.comparisons and not again.summary.kept


def test_what_is_told_after_a_kill_is_no_part_of_the_line_that_the_kill_cut(tmp_path):
    leave(tmp_path, RunSummary(kept=True, steps=7))
    with (tmp_path / LOG_FILE).open("a") as log:
        log.write('{"kind": "stand", "kept"')
    tell_after(tmp_path, stand={"kept": False}, end={"ended": RunEnds.STOPPED()})
    found = RunSummary.read(tmp_path)
    assert not found.kept and found.ended == RunEnds.STOPPED() and found.steps == 7


@pytest.mark.parametrize(("run", "cost_s"), [("a", 3.0), ("b", 7.0)])
def test_a_tuner_goes_on_from_the_log_of_its_own_run(tmp_path, run, cost_s):
    """The folder of the earlier results may be another run's by now."""
    leave(tmp_path / "out", RunSummary(cost_s=7.0, run_id="b"))
    RunSummary(cost_s=3.0, run_id="a", trace=str(tmp_path / "out" / "trace")).write(tmp_path)
    daemon = Daemon.__new__(Daemon)
    daemon.run = SimpleNamespace(path=tmp_path, id=run)
    assert daemon._before().cost_s == cost_s


def test_letters_of_tables_go_on_behind_those_of_the_tuner_before():
    named = []
    names = TableNames(lambda letter, rows: named.append(letter), {"A": [row_of(GATHER, GOOD)], "AB": [{}]})
    assert names.of({GATHER: GOOD}) == "A" and names.of({GATHER: OTHER}) == "AC" and named == ["AC"]


def test_the_files_of_a_run_are_told_from_the_folder_that_its_tuner_had(folder, tmp_path, monkeypatch):
    """Results may be copied elsewhere; the paths in them are those of the run."""
    out = tmp_path / "out"
    monkeypatch.setattr(summarise, "EVERY_S", 0.0)
    with tuner_of(WatchedJob(folder, changes(1)), out) as one:
        last = one.serve()
    shutil.copytree(out, tmp_path / "copy", symlinks=True)
    assert RunSummary.read(tmp_path / "copy").table == last.table == str(out / "table.json")
