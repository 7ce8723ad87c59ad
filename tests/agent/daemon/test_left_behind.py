"""What lies on disk while the job lives, and whatever ends its tuner: others read nothing else."""

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dynamiccl.agent.daemon import daemon as daemons
from dynamiccl.agent.daemon import summarise
from dynamiccl.agent.daemon.memory import FACTS, FORMAT, Kept, Memory, Store, key_of
from dynamiccl.agent.daemon.stopping import ended_politely
from dynamiccl.agent.report import runs
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.nccl.run_folder import STOP
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.tables import DROPPED, TABLE, load_table, why_dropped
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import TUNED_FUNCS, Slot
from fake_job import GATHER
from left_run import leave
from watched_job import GOOD, OTHER, WatchedJob, tuner_of

TWO_WAYS = RunEnds.TWO_WAYS(example="x")


def remembered(where):
    """The settings in the memory's newest file."""
    (cluster,) = where.iterdir()
    runs, passed = Store(str(where)).read(cluster.name)
    assert not passed
    return {slot.slot: slot.decision for slot in runs[0]["slots"] if not slot.decision.is_auto}


def table_of(out):
    path = out / TABLE
    return {rule.decision for rule in load_table(path).rules} if path.exists() else set()


def test_after_the_verdict_all_files_follow_the_table(folder, tmp_path):
    """Before: they stayed as the verdict left them until the job ended, in weeks: KEPT, with the gain of a table that
    was long dropped, and `apply` ran it."""
    out, memory, stands = tmp_path / "out", tmp_path / "memory", []

    def look(job):
        if len(stands) == 12:
            job.best = OTHER
        summary, one = RunSummary.read(out), state(out)
        assert table_of(out) == set(job.confirmed.values())
        if tuner.search.is_over:  # while a new search runs, the memory holds the last verdict
            assert remembered(memory) == job.confirmed
        assert summary.kept == one["kept"] == bool(job.confirmed)
        rows = tuner.windows.decisions(tuner.search.confirmed)
        assert summary.in_force == tuner.names.of(rows) and summary.dropped == tuner.outcome.dropped
        stands.append((summary.in_force, tuner.search.marks.reopened, verdict(summary).split()[0]))
        return tuner.search.marks.reopened < 1 or not tuner.search.is_done

    with tuner_of(WatchedJob(folder, look), out, memory) as one:
        tuner = one.tuner
        last = one.serve()
    assert {word for _, _, word in stands} >= {"KEPT", "REVERTED:"} and stands[0][0] != stands[-1][0]
    assert last.kept and set(one.job.confirmed.values()) == {OTHER}
    assert {rule.decision for rule in load_table(out / DROPPED).rules} == {GOOD} and why_dropped(
        out / DROPPED
    )


@pytest.mark.parametrize("when", ["at the verdict", "in the watch"])
def test_a_table_that_somebody_stops_lies_beside_with_the_reason(folder, tmp_path, monkeypatch, when):
    """Also one that was confirmed a moment before, when no summary was written yet. Before: it was gone."""
    out, memory, n_looks = tmp_path / "out", tmp_path / "memory", []

    def check(job):
        n_looks.append(0)
        summaries = (out / "summary.json").exists()
        if job.confirmed and table_of(out) and (summaries or when == "at the verdict"):
            (folder.path / STOP).touch()
            raise Closed(RunEnds.STOPPED())
        assert len(n_looks) < 2000

    monkeypatch.setattr(WatchedJob, "check", check)
    with tuner_of(WatchedJob(folder, lambda job: len(n_looks) < 2000), out, memory) as one:
        last = one.serve()
    assert not last.kept and not table_of(out) and last.dropped == RunEnds.STOPPED()
    assert {rule.decision for rule in load_table(out / DROPPED).rules} == {GOOD}
    assert why_dropped(out / DROPPED) == RunEnds.STOPPED() and set(remembered(memory).values()) == {GOOD}


@pytest.mark.parametrize("when", ["after the verdict", "in the search"])
def test_ranks_that_disagree_are_in_the_metrics_while_the_job_lives_and_their_table_goes_everywhere(
    folder, tmp_path, monkeypatch, when
):
    """Before: the count came with the job's end, so the alert could not fire; the memory kept the table for the next
    job, and table.json for `apply`."""
    out, memory, counts, looks = tmp_path / "out", tmp_path / "memory", [], []
    monkeypatch.setattr(summarise, "EVERY_S", 0.0)

    def look(job):
        looks.append(one.outcome.failure)
        counts.append(state(out)["mismatches"])
        if one.outcome.failure:
            assert counts[-1] and not state(out)["kept"] and not table_of(out) and remembered(memory) == {}
        job.audit.mismatches = 0 if len(looks) < 3 and when == "after the verdict" else len(looks)
        return len(looks) < 9

    def tell(line):
        counts.append(state(out)["mismatches"])
        job.audit.mismatches = int(when == "in the search" and line.phase == "search")

    job = WatchedJob(folder, look)
    with tuner_of(job, out, memory) as one:
        one.on_window = tell
        last = one.serve()
    assert counts[0] == 0 and counts[-1] == 8 and counts == sorted(counts), counts
    assert looks[4] and last.failure and not last.kept


def test_a_run_that_failed_hides_the_same_table_of_an_earlier_run(folder, tmp_path):
    """Before: it left nothing, so the next job began with the table that had just been withdrawn."""
    memory = tmp_path / "memory"
    with tuner_of(WatchedJob(RunFolder.create(), lambda job: False), tmp_path / "first", memory) as one:
        one.memory._name = "19991231T235959-first.json"
        one.serve()
    assert remembered(memory)
    facts = one.memory.facts

    def disagree(line):
        job.audit.mismatches = 1

    job = WatchedJob(folder, lambda job: not one.outcome.failure)
    with tuner_of(job, tmp_path / "second", memory) as one:
        one.on_window = disagree
        assert one.serve().failure
    profiles = one.tuner.windows.profiles
    for job in ("the next", ""):  # "": the same one
        found = Memory(str(memory), job, print).recall(facts, profiles)
        assert all(decision.is_auto for decision in found.values())


def test_a_run_that_failed_with_fewer_slots_hides_the_whole_table_of_its_job(tmp_path):
    """Before: the earlier run's file fitted more slots, and won."""
    store, facts = Store(str(tmp_path)), {"nccl": "2.28.9"}
    slots = [Kept(Slot(16, 2, func, 25), 2**25, "ring/simple", 100.0, GOOD) for func in TUNED_FUNCS]
    profiles = [
        SimpleNamespace(slot=s.slot, n_bytes=s.n_bytes, own=f"{s.own}/8", call_us=s.call_us) for s in slots
    ]

    def write(name, job, some, failed):
        told = {"format": FORMAT, "job": job, "failed": failed, "cluster": dict.fromkeys(FACTS, "unknown")}
        told |= {"speedup": None, "slots": [vars(s) for s in some], "written": "2026-11-28T04:00:00+00:00"}
        store.write(key_of(facts), name, told)

    write("1.json", "mine", slots, failed=False)
    assert len(Memory(str(tmp_path), "mine", print).recall(facts, profiles)) == 2
    write("2.json", "mine", slots[:1], failed=True)
    assert Memory(str(tmp_path), "mine", print).recall(facts, profiles) == {}
    assert set(Memory(str(tmp_path), "other", print).recall(facts, profiles)) == {slots[1].slot}


def test_a_tuner_that_joins_and_fails_at_once_leaves_word_of_it(folder, tmp_path):
    """Before: without a search it left nothing, and the file of the job's earlier tuner went on to recommend the
    table."""
    memory, job = tmp_path / "memory", WatchedJob(folder, lambda job: not one.outcome.failure)
    job.confirmed, job.audit.mismatches = {GATHER: GOOD}, 1
    with tuner_of(job, tmp_path / "out", memory) as one:
        assert one.serve().failure
    (cluster,) = memory.iterdir()
    assert Store(str(memory)).read(cluster.name)[0][0]["failed"]


def test_the_death_of_a_tuner_shows_also_after_it_dropped_a_table(folder, tmp_path, monkeypatch):
    """Before: a table that had been dropped was taken for the reason why the tuner ended, and no alert came."""
    monkeypatch.setattr(runs, "_job_lives", lambda run: True)
    out = tmp_path / "out"
    with tuner_of(WatchedJob(folder, lambda job: False), out) as one:
        summary = one.serve()
    alone = {"ended": None, "failure": None, "dropped": None}
    for reasons, has_died in (
        (alone, True),
        (alone | {"dropped": RunEnds.SLOWER()}, True),
        (alone | {"failure": TWO_WAYS, "ended": TWO_WAYS}, True),
        (alone | {"ended": RunEnds.STOPPED()}, False),
    ):
        leave(out, replace(summary, **reasons))
        assert state(out)["tuner_died"] == has_died, reasons


def test_figures_that_move_by_themselves_are_written_now_and_then(folder, tmp_path, monkeypatch):
    out, seen = tmp_path / "out", []
    monkeypatch.setattr(summarise, "EVERY_S", 0.0)

    def look(job):
        written = json.loads((out / "summary.json").read_text())["records_lost"]
        seen.append((state(out)["step"], job.last_step, written))
        job.lost["a ring"] = len(seen)
        if len(seen) == 20:  # from here on the files are young
            monkeypatch.setattr(summarise, "EVERY_S", 1e9)
        return len(seen) < 30

    with tuner_of(WatchedJob(folder, look), out) as one:
        one.serve()
    behind = [now - told for told, now, _ in seen]
    assert all(0 <= steps <= 40 for steps in behind)
    lost = [records for _, _, records in seen]
    assert lost[0] == 0 and lost[19] >= 17 and lost[-1] == lost[21]


@pytest.fixture
def ctrl_c():
    """Ctrl-C is heard: a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("first", [None, signal.SIGINT, signal.SIGTERM])
def test_a_further_signal_at_the_end_costs_nothing_of_the_results(folder, tmp_path, monkeypatch, first):
    """Before: a traceback, no summary, and the run folder stayed in /dev/shm. ``first`` ends the tuner; None: the job's
    end does."""
    out, memory, order = tmp_path / "out", tmp_path / "memory", []
    leave = Memory.leave

    def look(job):
        if first is not None:
            os.kill(os.getpid(), first)
        return False

    def again(everything=False):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)

    def leaves(memory, tuner):
        order.append(RunSummary.read(out).ended)  # the summary comes first: a store may take its time
        return leave(memory, tuner)

    def draws(page):
        order.append("page")
        os.kill(os.getpid(), signal.SIGTERM)  # now it cuts short what is left
        order.append("drawn")
        return ""

    job = WatchedJob(folder, look)
    monkeypatch.setattr(job, "take", again)
    monkeypatch.setattr(Memory, "leave", leaves)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with tuner_of(job, out, memory) as one, monkeypatch.context() as patch:
        patch.setattr(daemons.ReportPage, "draw_last", draws)
        try:
            with ended_politely() as signals:
                last = one.serve(signals)
        except KeyboardInterrupt:
            pytest.fail("a signal at the end ended the tuner")
    ended = {None: None, signal.SIGINT: RunEnds.INTERRUPTED(), signal.SIGTERM: RunEnds.TERMINATED()}[first]
    assert last.ended == ended == RunSummary.read(out).ended and last.kept and table_of(out)
    assert order == [None, ended, "page"] and not folder.path.exists()
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_signal_while_the_tuner_starts_ends_it_like_a_later_one(folder, tmp_path, monkeypatch):
    """Before: a traceback, no summary and the wrong status, if SIGTERM came before the trace was open."""
    out = tmp_path / "out"

    def link_and_kill(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(daemons, "link", link_and_kill)
    with tuner_of(WatchedJob(folder, lambda job: True), out) as one, ended_politely() as signals:
        summary = one.serve(signals)
    assert summary.ended == RunEnds.TERMINATED() == RunSummary.read(out).ended and not summary.kept


def test_a_tuner_that_ends_after_stop_does_not_publish_its_table_again(folder, tmp_path):
    """A frozen tuner that a signal wakes and ends has not looked for `stop` before it ends."""

    def look(job):
        assert job.confirmed or (folder.path / STOP).exists()
        if not (folder.path / STOP).exists():
            (folder.path / STOP).touch()
            raise KeyboardInterrupt
        return True

    with tuner_of(WatchedJob(folder, look), tmp_path / "out") as one:
        summary = one.serve()
    assert one.job.confirmed == {} and not summary.kept and summary.dropped == RunEnds.STOPPED()


def test_a_store_that_hangs_costs_the_memory_and_not_the_summary(folder, tmp_path, monkeypatch):
    """Before: a launcher that is in a hurry killed the tuner while it waited for the store, before the summary."""
    out, seen = tmp_path / "out", []
    monkeypatch.setattr(Memory, "leave", lambda *_: seen.append((state(out)["kept"], bool(table_of(out)))))
    with tuner_of(WatchedJob(folder, lambda job: False), out, tmp_path / "memory") as one:
        one.serve()
    assert seen and set(seen) == {(True, True)}


def test_what_was_remembered_is_not_written_again(tmp_path, folder, monkeypatch):
    """A slow store is asked at the verdict and where the table changes, not once more at the end."""
    written, write = [], Store.write
    monkeypatch.setattr(Store, "write", lambda *args: (written.append(args[2]), write(*args)))
    with tuner_of(WatchedJob(folder, lambda job: False), tmp_path / "out", tmp_path / "memory") as one:
        one.serve()
        one.memory.leave(one.tuner)
    assert len(written) == 1


def test_a_restarted_tuner_tells_the_earlier_figures_until_it_has_searched_itself(folder, tmp_path):
    """Before: to the end of the job, "verdict after the change: KEPT A: 25 % shorter", of the table before it."""
    out = tmp_path / "out"
    with tuner_of(WatchedJob(folder, lambda job: False), out) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "close", lambda remove: None)
        first, kept = one.serve(), dict(one.job.confirmed)
    dear = {"cost_s": 1000.0, "budget_s": 2000.0, "windows": 50, "trials": 4, "trials_cost_s": 9.0}
    vars(first).update(dear, speedup=3.0, speedup_ci95=[2.9, 3.1])
    leave(out, first)
    for fd in (one._lock, one._out_lock):
        os.close(fd)
    job, stands, said = WatchedJob(folder, lambda job: look(job)), [], []
    job.confirm(kept)

    def look(job):
        summary = RunSummary.read(out)
        stands.append(summary)
        if len(stands) == 12:
            assert (summary.cost_s, summary.speedup, summary.steps_to_verdict) == (
                1000.0,
                3.0,
                first.steps_to_verdict,
            )
            assert state(out)["cost_s"] == 1000.0
            job.best, job.base_ms = OTHER, 0.9 * job.base_ms
        marks = two.tuner.search.marks
        return marks.reopened < 1 or not two.tuner.search.is_over

    with tuner_of(job, out) as two:
        two.on_phase = said.append
        last = two.serve()
    assert last.kept and set(job.confirmed.values()) == {OTHER} and last.speedup < 1.5
    told = last.decisions
    assert {(row["func"], row["algo"], row["n_channels"]) for row in told} >= {(GATHER.func, "ring", 4)}
    assert any(
        (text.startswith("verdict after the change: KEPT") and " 25." in text) or " 24." in text
        for text in said
    )
    assert (
        last.cost_s > 990
        and last.budget_s > 2000
        and last.windows > 50
        and last.steps_to_verdict == first.steps_to_verdict
    )


def test_figures_of_another_run_in_the_same_folder_are_not_told(folder, tmp_path):
    """A table of this run is in force, but the folder of results holds the summary of another."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "lock").touch()
    RunSummary(run="/elsewhere", kept=True, speedup=3.0, speedup_ci95=[2.9, 3.1], cost_s=7.0).write(out)
    job = WatchedJob(folder, lambda job: False)
    job.confirm({GATHER: OTHER})
    with tuner_of(job, out) as one:
        last = one.serve()
    assert last.speedup is None and last.cost_s == 0 and last.kept and last.in_force != "default"
