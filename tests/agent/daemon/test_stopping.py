"""Ending a run from outside: its table is withdrawn, whatever its tuner does."""

import contextlib
import itertools
import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
from command import invoke
from dynamiccl.agent.daemon import stopping
from dynamiccl.agent.daemon.memory import Memory
from dynamiccl.agent.daemon.stopping import Stopped, end_tuning
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.live import locks
from dynamiccl.envs.live.job import Job, note_confirmed, read_confirmed
from dynamiccl.envs.live.locks import holder, lock
from dynamiccl.envs.nccl import run_folder
from dynamiccl.envs.nccl.run_folder import PLANS, RUN_ID, STOP, TUNER
from dynamiccl.envs.nccl.shm import RunFolder, decode_table
from dynamiccl.envs.nccl.tables import DROPPED, TABLE, load_table, to_json, why_dropped
from dynamiccl.traces.header import plain
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RunEnds
from dynamiccl.traces.records import Decision, Table
from fake_job import GATHER
from left_run import leave
from ring_files import RingFile

SILENT = NotAgreeing.NOT_REPORTED(rank=2)

KEPT = {GATHER: Decision("tree", "ll", 4)}


@pytest.fixture
def run(folder, monkeypatch):
    """A run whose tuner has kept a table. Rank 0 has seen the newest table each time that it is looked at, and says
    ``why`` not all ranks report the default; ``acts`` of the tuner, of which there is one for each look at it."""
    monkeypatch.setattr(stopping, "SEEN_S", 0.05)
    monkeypatch.setattr(stopping, "_EVERY_S", 0.01)
    tuner = SimpleNamespace(
        fd=lock(folder.path / TUNER, ""), acts=iter(()), why=None, told=True, seen=folder.table.generation
    )

    def publish(generation, decisions, *trial):
        folder.table.publish(table := Table.of(generation, decisions, *trial))
        if not any(trial):
            note_confirmed(folder.path, table)

    def end():
        os.close(tuner.fd)
        tuner.fd = -1

    def look(_):
        return next(tuner.acts, lambda: None)()

    def reports(_job):
        if tuner.told:
            word = {"generation": tuner.seen(), "why": tuner.why and tuner.why.as_json(), "is_last": False}
            (folder.path / PLANS).write_text(json.dumps(word))

    monkeypatch.setattr(stopping.time, "sleep", look)
    monkeypatch.setattr(Job, "poll", reports)
    tuner.publish, tuner.end, tuner.path, tuner.table = publish, end, folder.path, folder.table
    publish(1, KEPT)
    yield tuner
    if tuner.fd >= 0:
        os.close(tuner.fd)


def is_withdrawn(run):
    table = decode_table(run.table.read()[1])
    return not table.rules and not table.trial_steps and not read_confirmed(run.path)


def test_the_table_of_a_frozen_tuner_is_withdrawn_and_the_tuner_named(run):
    """Before: it stayed, and the command said "NCCL's default is set, but no step has run under it yet"."""
    found = end_tuning(run.path, 0.2)
    assert is_withdrawn(run) and run.table.generation() == 2 and found.in_force
    assert found.tuner_left == (holder(run.path / TUNER) or 0)


def test_a_frozen_tuner_that_tries_nothing_is_not_waited_for(run):
    run.publish(2, {})
    latest = time.monotonic() + 3
    run.acts = itertools.repeat(lambda: pytest.fail("it waits") if time.monotonic() > latest else None)
    assert not stopping._tries_a_table(run)


def test_the_table_of_a_tuner_that_dies_while_it_is_waited_for_is_withdrawn(run):
    """Before: it stayed, also where the tuner had published a trial meanwhile."""
    run.acts = iter([lambda: run.publish(2, KEPT, 20), run.end])
    found = end_tuning(run.path, 60)
    assert is_withdrawn(run) and run.table.generation() == 3
    assert found.in_force and found.had_tuner and found.tuner_left is None


def test_a_tuner_that_ends_as_it_should_is_left_its_own_table(run):
    """A new one would have to wait for another round of the ranks."""
    run.acts = iter([lambda: run.publish(2, {}), run.end])
    assert end_tuning(run.path, 60) == Stopped(had_tuner=True, job_runs=True, in_force=True)
    assert is_withdrawn(run) and run.table.generation() == 2


def test_a_trial_of_the_default_is_not_the_end_of_a_kept_table(run):
    """After it the kept table is in force again. Before: such a trial of a tuner that was frozen counted as the end."""
    run.publish(2, {}, 20)
    assert end_tuning(run.path, 0.2).in_force
    assert is_withdrawn(run) and run.table.generation() == 3


def test_a_table_that_a_tuner_publishes_as_it_wakes_up_is_withdrawn_too(run):
    """A disk that hung ends with an error: the tuner ends, and confirms what it had kept."""

    run.why = SILENT

    def wake():
        if run.table.generation() == 1:
            return
        run.publish(3, KEPT)
        run.end()
        run.why, run.acts = None, iter(())

    run.acts = itertools.repeat(wake)
    found = end_tuning(run.path, 0.2)
    assert is_withdrawn(run) and run.fd == -1 and found.tuner_left is None


def test_while_a_rank_reports_another_table_not_all_ranks_run_the_default(run):
    """Before: a step of rank 0 under the default was taken for one of all ranks. Then: status 1 "no step has run under
    it yet" although all ranks ran the default."""
    run.why = SILENT
    run.acts = iter([run.end])
    found = end_tuning(run.path, 0.2)
    assert not found.is_over and found.why == str(SILENT)
    run.acts = iter([lambda: setattr(run, "why", None)])
    assert end_tuning(run.path, 60).in_force and run.table.generation() == 2, "it is withdrawn once"


def test_rank_0_must_have_seen_the_empty_table(run):
    """What it said before may be of a trial that is not led yet."""
    run.seen, run.acts = (lambda: 1), iter([run.end])
    found = end_tuning(run.path, 0.2)
    assert not found.is_over and found.why == str(NotTuning.NOT_LOOKED())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"generation": "x", "why": null, "is_last": false}'])
def test_a_damaged_word_of_rank_0_proves_nothing(run, text):
    run.told, run.acts = False, iter([run.end])
    (run.path / PLANS).write_text(text)
    assert not end_tuning(run.path, 0.2).is_over


def test_where_the_ranks_have_not_begun_to_agree_no_table_is_in_force(run):
    run.told, run.acts = False, iter([run.end])
    assert end_tuning(run.path, 60).in_force and is_withdrawn(run)


@pytest.mark.parametrize("what", ["the ranks have switched", "the job began under a table"])
def test_where_the_word_of_rank_0_is_gone_a_table_may_be_in_force(run, monkeypatch, what):
    def poll(job):
        job.heard.has_switched = what == "the ranks have switched"
        job.untouched = not job.heard.has_switched

    monkeypatch.setattr(Job, "poll", poll)
    run.acts = iter([run.end])
    assert not end_tuning(run.path, 0.2).in_force


@pytest.mark.parametrize("n_looks", [1, 2, 5])
def test_a_job_that_ends_meanwhile_is_over(run, n_looks):
    """The tuner's last act removes the run folder. Before: "No such file or directory", status 2."""

    def remove():
        shutil.rmtree(run.path)
        run.acts, run.told = iter(()), False

    run.why = SILENT
    run.acts = iter([*[lambda: None] * (n_looks - 1), remove])
    found = end_tuning(run.path, 60 if n_looks < 5 else 0.1)
    assert found.is_over and not found.job_runs


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Stopped(True, True, True), "on all ranks; tuning has ended\n"),
        (
            Stopped(True, True, True, tuner_left=77),
            "all ranks\nthe tuner does not answer: end it by SIGKILL (process 77)\n",
        ),
        (
            Stopped(True, True, False, tuner_left=0),
            "check\nthe tuner does not answer: end it by SIGKILL (process that holds ",
        ),
    ],
)
def test_the_command_says_what_is_left_to_do(folder, monkeypatch, found, says):
    monkeypatch.setattr(stopping, "end_tuning", lambda *_: found)
    done = invoke(["stop", folder.path])
    assert says in done.stdout and done.exit_code == (0 if found.in_force else 1)


def test_a_lock_names_its_process_as_far_as_the_system_tells(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    assert holder(path) is None
    fd = lock(path, "")
    status = os.stat(path)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for pid, seen in (("4711", 4711), ("0", None), ("-1", None)):
        text = f"1: POSIX ADVISORY WRITE 1 {place} 0 EOF\n1: -> FLOCK ADVISORY WRITE 2 {place} 0 EOF\n"
        text += f"2: FLOCK ADVISORY WRITE 3 {place}0 0 EOF\n3: FLOCK ADVISORY WRITE {pid} {place} 0 EOF\n"
        (tmp_path / "locks").write_text(text)
        monkeypatch.setattr(locks, "Path", lambda _: tmp_path / "locks")
        assert holder(path) == seen
    with contextlib.suppress(OSError):
        os.close(fd)


def test_a_tuner_that_sums_up_after_its_job_is_not_stuck(run, monkeypatch):
    """Before: it was named as one to be killed."""
    monkeypatch.setattr(Job, "is_alive", lambda job: False)
    found = end_tuning(run.path, 0.2)
    assert not found.job_runs and found.tuner_left is None


# -- it looks before it writes -----------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_gets_no_files(tmp_path):
    """Before: root's `stop` made files in any folder of root that a user's link named."""
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run").symlink_to(target)
    for where in (tmp_path / "out", target):
        assert invoke(["stop", where]).exit_code == 2 and list(target.iterdir()) == []


def test_a_run_of_another_user_than_the_results_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run").symlink_to(folder.path)
    before, stat = sorted(folder.path.iterdir()), os.stat

    def other(path, *more, **named):
        found = stat(path, *more, **named)
        if str(path) == str(tmp_path / "out"):
            return os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))
        return found

    assert (folder.path / RUN_ID).is_file()
    monkeypatch.setattr(os, "stat", other)
    done = invoke(["stop", tmp_path / "out"])
    assert done.exit_code == 2 and "no run of this folder's owner" in done.stderr
    assert sorted(folder.path.iterdir()) == before


# -- what was found is kept --------------------------------------------------------------------------------------------


@pytest.fixture
def results(run, tmp_path):
    """The results of that run, its memory among them; ``run.end()`` has ended its tuner by SIGKILL."""
    out, facts = tmp_path / "out", {"nccl": "2.28.9"}
    out.mkdir()
    (out / TABLE).write_text(to_json(Table.of(1, KEPT)))
    memory = Memory(str(tmp_path / "memory"), "train.py", print)
    memory.facts = facts
    profile = SimpleNamespace(slot=GATHER, n_bytes=2**25, own="ring/simple/8", call_us=100.0)
    tuner = SimpleNamespace(outcome=RunSummary(), decisions=KEPT, windows=SimpleNamespace(profiles=[profile]))
    memory.leave(tuner)
    leave(out, RunSummary(kept=True, in_force="B", memory=memory.told()))
    RunSummary.read(out).write(run.path)

    def store():
        tuner.outcome = RunSummary(kept=True, speedup=1.2, speedup_ci95=[1.1, 1.3])
        memory.leave(tuner)

    def recalled(job="train.py"):
        return Memory(memory.url, job, print).recall(facts, [profile])

    return SimpleNamespace(out=out, store=store, recalled=recalled)


def test_stop_leaves_the_table_beside_and_says_where(run, results):
    """Before: it was deleted, and `apply` said "the run has confirmed no table, or is no run". Without a tuner it
    stayed as the run's table, and the summary said KEPT."""
    run.end()
    done = invoke(["stop", run.path])
    assert done.exit_code == 0 and f"in use is in {results.out / DROPPED}; " in done.stdout, done.output
    assert {r.decision for r in load_table(results.out / DROPPED).rules} == {KEPT[GATHER]}
    assert why_dropped(results.out / DROPPED) == RunEnds.STOPPED() and not (results.out / TABLE).exists()
    summary = RunSummary.read(results.out)
    assert not summary.kept and summary.dropped == summary.ended == RunEnds.STOPPED()
    assert json.loads((results.out / "summary.json").read_text()) == plain(vars(summary))
    refused = invoke(["apply", results.out, "--", "true"])
    assert refused.exit_code == 2
    assert f"dropped its table ({RunEnds.STOPPED()}): to use it all the same" in refused.stderr
    assert results.recalled() == KEPT, "the memory has it still"


@pytest.mark.parametrize("has_left", [True, False])
def test_a_table_that_did_harm_is_no_later_runs_first_one(run, results, has_left, tmp_path):
    """Before: the next run began with the table that somebody had stopped because it did harm."""
    run.end()
    if not has_left:
        shutil.rmtree(tmp_path / "memory")
    done = invoke(["stop", run.path, "--bad", "--json"])
    assert json.loads(done.stdout)["forgotten"] is has_left
    assert results.recalled() == results.recalled("another.py") == {}
    assert (results.out / DROPPED).exists()


def test_a_tuner_that_stores_its_table_as_it_ends_does_not_bring_it_back(run, results):
    """Before: the table was marked while its tuner lived, which then stored it anew."""
    run.acts = iter([lambda: run.publish(2, {}), results.store, run.end])
    done = invoke(["stop", run.path, "--bad", "--json"])
    assert json.loads(done.stdout)["forgotten"] and not results.recalled()


def test_a_memory_that_cannot_be_changed_is_an_error_after_the_run_is_stopped(run, results, tmp_path):
    run.end()
    (tmp_path / "memory").rename(tmp_path / "gone")
    (tmp_path / "memory").write_text("no folder")
    done = invoke(["stop", run.path, "--bad"])
    assert done.exit_code == 2 and "cannot be changed" in done.stderr and is_withdrawn(run)


def test_a_job_that_has_ended_keeps_its_table(run, results, monkeypatch):
    monkeypatch.setattr(Job, "is_alive", lambda job: False)
    assert end_tuning(run.path, 0.2).table is None
    assert (results.out / TABLE).exists() and not (results.out / DROPPED).exists()


# -- all runs of a user ------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Three runs on a machine of their own: one with a tuner, one whose ranks alone live, one that nobody is in."""
    root = tmp_path / f"dynamiccl-{os.geteuid()}"
    monkeypatch.setattr(run_folder, "shared_roots", lambda: iter([root]))
    monkeypatch.setattr(stopping, "shared_roots", lambda: iter([root]))
    root.mkdir(mode=0o700)
    runs = [RunFolder(run_folder._new_folder(root, name)) for name in ("tuned", "applied", "left")]
    for one in runs:
        one.table.publish(Table.of(1, KEPT))
    fds = [lock(runs[0].path / TUNER, ""), RingFile(runs[1].path, 0, 1).put().fd]
    (root / "of somebody").mkdir()
    monkeypatch.setattr(stopping, "SEEN_S", 0.05)
    yield runs
    for fd in fds:
        os.close(fd)


def test_all_runs_of_a_user_are_stopped(here, monkeypatch):
    """Before: an operator had to find each of them."""
    tuned, applied, _ = here
    begun = []

    def poll(job):
        begun.append([(run.path / STOP).exists() for run in here])

    monkeypatch.setattr(Job, "poll", poll)
    done = invoke(["stop", "--all", "--wait", "0.2", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and {one["run"] for one in told} == {str(tuned.path), str(applied.path)}
    assert [decode_table(run.table.read()[1]).rules == () for run in here] == [True, True, False]
    assert begun[0] == [True, True, False], "all tuners end at once, not one after the other"


def test_one_run_that_cannot_be_stopped_does_not_keep_the_others(here, monkeypatch):
    monkeypatch.setattr(Job, "poll", lambda job: None)
    first = min((run.path for run in here[:2]), key=lambda path: path.stat().st_mtime)
    end = stopping.end_tuning

    def fails(path, *more):
        if path == first:
            raise OSError("the disk hangs")
        return end(path, *more)

    monkeypatch.setattr(stopping, "end_tuning", fails)
    done = invoke(["stop", "--all", "--wait", "0.2"])
    assert done.exit_code == 1 and f"{first}: error: the disk hangs" in done.stdout
    assert "restored on all ranks" in done.stdout


def test_where_nothing_runs_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(stopping, "shared_roots", lambda: iter([tmp_path]))
    done = invoke(["stop", "--all"])
    assert (done.exit_code, done.stdout) == (0, "no run of this user is here\n")
