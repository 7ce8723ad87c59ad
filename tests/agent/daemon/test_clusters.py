"""The memory between jobs: the same job again begins with its table, and nothing that is remembered is believed."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.daemon.memory import Memory, Store, in_time, key_of
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.agent.report.outputs import VARIABLE, default_url
from dynamiccl.envs.bench.job_arena import AccountedWindows, play
from dynamiccl.envs.bench.scores import LossAccount, summary
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim.jobs import assemble, computing, draw_jobs
from dynamiccl.envs.sim.noise import log_uniform
from dynamiccl.envs.sim.windows import SimSearch
from dynamiccl.traces.reasons import Recalled
from dynamiccl.traces.records import Decision
from fake_job import SCATTER, STEP_MS, FakeJob
from oracle import oracle

FACTS = {"hardware": "8 x H100", "layout": "2 x 8 ranks", "nccl": "2.28.9"}
GOOD = Decision("ring", "ll128", 8)


def step_ms(decisions):
    return STEP_MS * (1 - 0.12 * (decisions.get(SCATTER) == GOOD))


def noisy(truth=step_ms):
    """A fake job with a little noise."""
    return FakeJob(truth, noise=0.003)


def tuned(where, truth=step_ms, job="train.py", facts=FACTS, windows=30):
    """A run on a fake job that asks the memory and leaves what it came to: (the tuner, its job, the memory)."""
    fake, said = noisy(truth), []
    memory = Memory(str(where), job, said.append)
    tuner = Tuner(
        LiveWindows(fake),
        make_chooser("expected-improvement", 0),
        SearchConfig(rounds=windows),
        recall=lambda windows: memory.recall(facts, windows.profiles),
    )
    tuner.run()
    memory.leave(tuner)
    assert not said
    return tuner, fake, memory


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A memory of one run that confirmed a table."""
    where = tmp_path_factory.mktemp("memory")
    tuner, _, memory = tuned(where)
    assert tuner.outcome.kept and tuner.decisions[SCATTER] == GOOD and memory.told()["jobs"] == 0
    return where


def first_tables(fake, n=1):
    """The first tables with a row that a job ran."""
    return [t for t in fake.tables if t.rules][:n]


def test_the_second_run_of_a_job_begins_with_the_table_that_the_first_confirmed(kept, tmp_path):
    (left,) = Store(str(kept)).read(key_of(FACTS))[0]
    decisions = {slot.slot: slot.decision for slot in left["slots"] if not slot.decision.is_auto}
    memory = Memory(str(kept), "train.py", print)
    fake = noisy()
    tuner = Tuner(LiveWindows(fake), ExpectedImprovement(), recall=lambda w: memory.recall(FACTS, w.profiles))
    outcome = tuner.run()
    (first,) = first_tables(fake)
    assert {rule.decision for rule in first.rules} == set(decisions.values()) and SCATTER in decisions
    assert "2 of 2 slots begin with what train.py came to" in str(memory.why)
    alone = Tuner(LiveWindows(noisy()), ExpectedImprovement()).run()
    assert outcome.kept and outcome.steps_to_first_gain <= alone.steps_to_first_gain


def test_it_is_compared_as_any_other_and_goes_where_it_does_not_hold(kept):
    """The same slots, the same times of calls: but the table of before now makes the step longer."""
    memory = Memory(str(kept), "train.py", print)
    fake = noisy(lambda d: STEP_MS * (1 + 0.1 * any(not x.is_auto for x in d.values())))
    tuner = Tuner(LiveWindows(fake), ExpectedImprovement(), recall=lambda w: memory.recall(FACTS, w.profiles))
    outcome = tuner.run()
    assert first_tables(fake) and not outcome.kept and not fake.confirmed


def test_another_cluster_or_other_times_of_calls_begin_from_nothing(kept):
    profiles = _profiles()
    memory = Memory(str(kept), "job", print)
    assert not memory.recall(FACTS | {"nccl": "2.30.7"}, profiles) and memory.told()["jobs"] == 0
    assert memory.recall(FACTS, profiles)
    slow = [replace(p, call_us=2 * p.call_us) for p in profiles]
    assert not memory.recall(FACTS, slow) and "took another time" in str(memory.why)
    assert not memory.recall(FACTS, [replace(p, n_bytes=2 * p.n_bytes) for p in profiles])


def test_the_slots_that_another_job_shares_begin_with_what_it_came_to(kept):
    shared, other = _profiles()
    found = Memory(str(kept), "job", print).recall(
        FACTS, [shared, replace(other, n_bytes=other.n_bytes // 3)]
    )
    assert set(found) == {shared.slot}


def test_the_run_that_had_most_of_the_slots_counts_and_of_these_the_newest(kept, tmp_path):
    store, profiles = Store(str(tmp_path)), _profiles()
    (name,) = (kept / key_of(FACTS)).glob("*.json")
    for stamp, decision, n in (("2", "ring/ll/1", 2), ("3", "ring/ll/2", 2), ("4", "ring/ll/4", 1)):
        told = json.loads(name.read_text())
        told["slots"] = [{**slot, "decision": decision} for slot in told["slots"]][:n]
        store.write(key_of(FACTS), f"{stamp}.json", told)
    found = Memory(str(tmp_path), "job", print).recall(FACTS, profiles)
    assert set(found.values()) == {Decision("ring", "ll", 2)} and len(found) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 2, "slo', "ValueError"),
        ('{"format": 1, "slots": [], "run": "of an older release"}', "format 1, this release reads 2"),
        ('{"format": 99}', "format 99, this release reads 2"),
        ("[1, 2]", "TypeError"),
        ('{"some": "thing of another"}', "KeyError: 'format'"),
        ("SLOTS", "parabola/simple"),
        ("BYTES", "without bytes or time"),
    ],
)
def test_what_is_damaged_foreign_or_old_is_passed_over_by_name(kept, tmp_path, text, why):
    (name,) = (kept / key_of(FACTS)).glob("*.json")
    folder = tmp_path / key_of(FACTS)
    folder.mkdir()
    (folder / "1.json").write_text(name.read_text())
    text = name.read_text().replace("ring/ll128/8", "parabola/simple/8") if text == "SLOTS" else text
    text = name.read_text().replace('"n_bytes": ', '"n_bytes": -') if text == "BYTES" else text
    (folder / "2.json").write_text(text)
    (folder / "notes.txt").write_text("not ours")
    said = []
    assert Memory(str(tmp_path), "job", said.append).recall(FACTS, _profiles())
    (told,) = said
    assert told.reason is Recalled.PASSED_OVER and "2.json" in str(told) and why in str(told)


def test_a_decision_that_this_job_may_not_run_is_left_to_nccl():
    windows = LiveWindows(FakeJob(lambda d: STEP_MS))
    job, default = windows.begin()
    masked = np.array([np.flatnonzero(~row)[0] for row in job.mask])
    search = Search(job, default, Prior.load(), first=masked)
    assert search.loop.trial is None and search.plan() is None


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_several_runs_write_beside_each_other_and_each_has_one_file(tmp_path, kind):
    url = str(tmp_path / "new" / "store") if kind == "folder" else f"memory://{tmp_path.name}"
    assert Store(url).read("x") == ([], [])
    tuner, *_ = tuned(url, windows=1)

    def leave(n):
        memory = Memory(url, f"job {n}", print)
        memory.facts = FACTS
        memory.leave(tuner)
        memory.leave(tuner)

    writers = [threading.Thread(target=leave, args=(n,)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    runs, passed = Store(url).read(key_of(FACTS))
    assert sorted(r["job"] for r in runs) == [*(f"job {n}" for n in range(8)), "train.py"] and not passed


def test_where_the_memory_is(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "off")
    assert default_url() is None
    monkeypatch.setenv(VARIABLE, "s3://team/clusters")
    assert default_url() == "s3://team/clusters"
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_url() == str(tmp_path / "dynamiccl" / "clusters")
    with pytest.raises(ValueError, match="cannot be opened"):
        Store("nosuchprotocol://x")
    assert key_of(FACTS) == key_of({**FACTS, "host": "a"}) != key_of({**FACTS, "nccl": "2.29.1"})


def test_a_store_that_fails_or_hangs_is_done_without(tmp_path):
    (tmp_path / "a file").write_text("")
    said = []
    memory = Memory(str(tmp_path / "a file"), "job --api-key 123", said.append)
    assert memory.job == "job --api-key ***"
    tuner, *_ = tuned(tmp_path / "whole", windows=1)
    assert memory.recall(FACTS, _profiles()) == {}
    memory.leave(tuner)
    assert any(told.reason is Recalled.NOT_LEFT for told in said)
    with pytest.raises(TimeoutError):
        in_time(threading.Event().wait, 0.05)
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["the same job", "a changed network"])
def test_a_second_job_is_no_worse_for_its_memory(kind):
    """Simulated pairs of jobs, every step billed: with the table of the first and, on the same draws, without."""
    rng = np.random.default_rng(7)
    first = draw_jobs(STANDARD.only("plain"), rng, 60)
    tables = [search.confirmed for search in _played(first, None)[1].searches]
    second = first.take(slice(None))
    if kind != "the same job":
        exposed, sites = log_uniform(rng, STANDARD.parts[0].exposed, len(first)), worsened(first.sites, rng)
        second = assemble(first.works, first.which, sites, exposed, STANDARD.parts[0], rng)
        computing(second, first.scale)
    with_it, without = (_played(second, known)[0] for known in (tables, None))
    assert with_it["lost"] < without["lost"] + 20 and with_it["slower"] == 0
    if kind == "the same job":
        assert with_it["steps_to_first_gain"][1] < without["steps_to_first_gain"][1]


def worsened(sites, rng):
    """The same clusters after their network changed: a neighbour's job, a lost link, a busy switch."""
    truth, n, many = sites.truth, len(sites), sites.fleet.n_nodes > 1
    crowding = np.maximum(truth.congestion, rng.uniform(0.01, 0.04, n))
    worse = replace(
        truth,
        bus_gbs=truth.bus_gbs * np.where(many, rng.uniform(0.35, 0.8, n), rng.uniform(0.6, 0.9, n)),
        net_us=truth.net_us * rng.uniform(1.0, 2.5, (n, 1)),
        ramp_bytes=truth.ramp_bytes * np.exp(rng.normal(0.0, 0.5, truth.ramp_bytes.shape)),
        congestion=np.where(many, crowding, truth.congestion),
    )
    return replace(sites, truth=worse)


def _played(jobs, tables):
    """Summary and searches of jobs that begin with these tables, if any."""
    jobs, rng, policy = jobs.take(slice(None)), np.random.default_rng(len(jobs)), ExpectedImprovement()
    calm = jobs.take(slice(None))
    calm.swing[:, 0] = 0.0
    ledger = LossAccount(jobs, oracle(calm)[1])
    sims = SimSearch(windows := AccountedWindows(jobs, rng, ledger), Prior.load(), SearchConfig())
    if tables is not None:
        told, seen = windows.begin(SearchConfig().profile_steps)
        begun = zip(told, seen, tables, strict=True)
        sims.searches = [Search(job, default, Prior.load(), first=table) for job, default, table in begun]
    play(policy, sims, ledger)
    return summary(ledger.scores()), sims


def _profiles():
    windows = LiveWindows(FakeJob(lambda d: STEP_MS))
    windows.begin()
    return windows.profiles
