"""The report of a job that was started again shows its last life, and says so. Before: two lives by step number."""

import json
from dataclasses import replace

import pytest
from dynamiccl.agent.commands.doctor import _slow_rank
from dynamiccl.agent.commands.show import tell
from dynamiccl.agent.daemon.tuner import LOOK_AGAIN, LookAgain
from dynamiccl.agent.report import runs
from dynamiccl.agent.report.html.course import Band, course_of
from dynamiccl.agent.report.html.figures import timeline_figure
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.losses import difference, loss_lines, read_losses
from dynamiccl.agent.report.slow_rank import find
from dynamiccl.agent.report.summary import LOG_FILE, RunSummary
from dynamiccl.traces.queries.costs import generations
from left_run import leave
from restarted import LIVES, restarted


def test_the_course_is_that_of_the_last_life():
    course = course_of(restarted())
    assert course.bands == [Band(0, 4, "default"), Band(5, 39, "A")]
    assert len(course.steps) == 40 and set(course.ms) == {80.0} and not course.on_trial.any()
    assert [mark.text for mark in course.marks] == ["switch to A"], "the verdict was in another life"


def test_the_timeline_is_that_of_the_last_life():
    trace = restarted()
    drawn = timeline_figure(trace, generations(trace, None), RunSummary())
    assert drawn.count("<rect") == 2 * 2, "one call of two ranks, of two kinds of steps"
    assert "80.0 ms" in drawn and "100.0 ms" not in drawn


def log_of_job(folder, *lives):
    """The log of a job beside its trace. Of each life: its steps and the loss of all of them."""
    lines = []
    for steps, loss in lives:
        lines.append({"n_params": 1, "first_step": steps[0]})
        lines += [{"step": step, "loss": loss} for step in steps]
        lines.append({"step": steps[-1], "held_out": loss + 1})
    (folder / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "trace"


@pytest.mark.parametrize("resumed_at", [0, 30, 90])
def test_losses_are_those_of_the_last_life_beside_its_own_tables(tmp_path, resumed_at):
    """Before: its tables were laid beside the losses of the life before, where the job had logged on."""
    folder = log_of_job(tmp_path, (range(90), 5.0), (range(resumed_at, resumed_at + 42), 3.0))
    found = read_losses(restarted(folder=folder))
    assert found.steps.tolist() == list(range(42)) and set(found.losses) == {3.0}
    assert found.held_out == [(41, 4.0)]
    assert found.steps[found.tuned].tolist() == list(range(LIVES[1][2] + 1, LIVES[1][0] + 1))
    resumed = f"the job resumed: step 0 here is step {resumed_at} of its log"
    assert (resumed in loss_lines(found)) == (resumed_at > 0)


def test_a_run_that_resumes_has_its_own_losses_beside_its_tables(tmp_path):
    """The log goes on with that of an earlier run, of which there is no trace."""
    folder = log_of_job(tmp_path, (range(200), 5.0), (range(200, 292), 3.0))
    found = read_losses(restarted(LIVES[:1], folder=folder))
    assert (found.first, found.steps.tolist(), set(found.losses)) == (200, list(range(92)), {3.0})
    assert found.steps[found.tuned].tolist() == list(range(61, 91))
    assert difference(found) is not None


def test_a_log_of_few_steps_says_where_its_life_began(tmp_path):
    """On a GPU the job logs one step in ten, so its first loss is not that of its first step."""
    folder = log_of_job(tmp_path, (range(90), 3.0))
    lines = (tmp_path / "job.jsonl").read_text().splitlines()
    (tmp_path / "job.jsonl").write_text("\n".join([lines[0], *lines[10:-1:10]]))
    found = read_losses(restarted(LIVES[:1], folder=folder))
    assert found.steps.tolist() == list(range(9, 90, 10))
    assert found.steps[found.tuned].tolist() == [69, 79, 89]


def test_a_log_that_does_not_say_where_a_life_begins_is_not_shown(tmp_path):
    (tmp_path / "job.jsonl").write_text('{"step": 0, "loss": 3.0}\n{"step": 1, "loss": 3.0}\n')
    assert read_losses(restarted(LIVES[:1], folder=tmp_path / "trace")) is None


def test_a_slow_rank_is_looked_for_in_the_last_life():
    """Rank 1 was late, in a process that has ended. Before: it was still named."""
    trace = restarted(((60, 100, 60, 20), (60, 100, 60, 21)))
    is_late = trace.events["pid"] == 11
    trace.events.loc[is_late, "start_ns"] = trace.events["end_ns"] - 1_000_000
    first = replace(trace, steps=trace.steps[trace.steps["pid"] < 20])
    first = replace(first, events=trace.events[trace.events["pid"] < 20])
    assert "wait for rank 1" in find(first)
    assert find(trace) == "" and "no rank" in _slow_rank([trace])


def test_show_counts_the_last_life_and_says_so():
    story = tell(restarted(), RunSummary())
    assert (story["steps"]["n"], story["steps"]["last"], story["steps"]["median_ms"]) == (40, 39, 80.0)
    assert story["steps"]["memory_pressure"] == {"least": 0.5, "most": 0.5}
    assert "started again: its 90 steps" in story["warnings"][0]


def test_the_report_says_what_it_lacks(tmp_path):
    html = write_report(tmp_path / "report.html", RunSummary(), restarted()).read_text()
    assert "the job was started again: its 90 steps" in html
    one_life = replace(restarted(LIVES[:1]), folder=tmp_path / "trace")
    assert "started again" not in write_report(tmp_path / "one.html", RunSummary(), one_life).read_text()


@pytest.mark.parametrize("later", [{"kind": "window", "last_step": 35}, {"kind": "job", "step": 35}])
def test_the_step_of_a_run_is_the_one_told_last(tmp_path, later):
    """Before: the largest, so that it stood still until the new processes had taken as many steps."""
    leave(tmp_path, RunSummary(steps=90))
    with (tmp_path / LOG_FILE).open("a") as log:
        log.write(json.dumps(later) + "\n")
    assert runs.state(tmp_path)["step"] == 35


def test_a_job_without_a_slot_is_looked_at_again_after_a_restart():
    look = LookAgain()
    look.put_off(1000)
    assert not look.is_due(1000 + LOOK_AGAIN - 1) and look.is_due(1000 + LOOK_AGAIN)
    assert not look.is_due(3) and look.is_due(3 + LOOK_AGAIN)
    look.cancel()
    assert not look.is_due(10**9)
