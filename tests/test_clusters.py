"""The memory between jobs as a store: records of several writers, damage, age, and the commands."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from dynamiccl.agent.cli import app
from dynamiccl.agent.clusters import VARIABLE, Store, default_url, evidence_of, in_time, key_of, record_of
from dynamiccl.agent.remembering import Remembering
from dynamiccl.envs.memory import Notes
from dynamiccl.envs.sim.arms import distinct
from dynamiccl.envs.windows import Job
from dynamiccl.traces.files import Trace
from dynamiccl.traces.fingerprint import Fingerprint
from dynamiccl.traces.header import plain
from dynamiccl.traces.records import PAIRS, Slot
from dynamiccl.traces.slots import SlotProfile
from dynamiccl.traces.spaces import N_CONFIGS
from synthetic_trace import write_run
from typer.testing import CliRunner

FACTS = {"hardware": "8 x H100", "layout": "2 x 8 ranks", "nccl": "2.28.9"}


def profile(n_bytes=160e6, own=0):
    fingerprint = Fingerprint(
        is_reduce_scatter=np.array([1.0]),
        n_bytes=np.array([float(n_bytes)]),
        calls=np.array([12.0]),
        n_ranks=np.array([16.0]),
        n_nodes=np.array([2.0]),
        cost_us=np.linspace(100, 200, len(PAIRS))[None],
        own_pair=np.array([own]),
        own_channels=np.array([16.0]),
        comm_channels=np.array([16.0]),
        share=np.array([0.2]),
        exposed=np.array([np.nan]),
        memory_pressure=np.array([0.5]),
    )
    return SlotProfile(Slot(16, 2, "reduce_scatter", 28), int(n_bytes), 12.0, 900.0, "gpu", 0.2, fingerprint)


def evidence(log=-0.3, confirmed=12):
    p = profile()
    mask = distinct(p.fingerprint)
    mask[0, 12] = True
    job = Job(p.fingerprint.vector(), mask, np.array([0.2]), np.array([900.0]), np.full((1, N_CONFIGS), -1))
    notes = Notes(1)
    notes.add(np.array([12]), -0.05, 0.004, np.array([log]))
    return notes.evidence(job, job.call_us, np.array([confirmed]))


def record(run="run-1", days=0.0, **more):
    made = record_of(FACTS, run, [profile()], evidence(), **more)
    return made | {"written": (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")}


def test_a_record_holds_all_of_the_evidence_as_text_that_other_releases_read():
    made = json.loads(json.dumps(plain(record())))
    back, left = evidence_of(made, 3.0), evidence()
    assert back.age_days == 3.0
    for name in ("features", "mask", "share", "call_us", "logs", "counts", "tables", "savings", "deviations"):
        np.testing.assert_allclose(getattr(back, name), getattr(left, name), err_msg=name)
    assert back.confirmed.tolist() == [12]
    slot = made["slots"][0]
    assert slot["fingerprint"]["own_pair"] == "/".join(PAIRS[0]) and slot["fingerprint"]["exposed"] is None
    slot["durations"]["parabola/simple/8"] = [-0.9, 3]
    slot["may"].append("parabola/simple/8")
    slot["confirmed"] = "parabola/simple/8"
    newer = evidence_of(made, 0.0)
    assert (newer.logs[~np.isnan(newer.logs)] == left.logs[~np.isnan(left.logs)]).all() and not newer.confirmed.any()
    del slot["share"]
    assert evidence_of(made, 0.0) is None


def test_the_key_is_the_cluster_not_the_job(tmp_path):
    assert key_of(FACTS) == key_of({**FACTS, "host": "a"}) != key_of({**FACTS, "nccl": "2.29.1"})


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_several_writers_lose_nothing_and_are_merged_on_reading(tmp_path, kind):
    url = str(tmp_path / "new" / "store") if kind == "folder" else f"memory://{tmp_path.name}"
    assert Store(url).keys() == [] and Store(url).read("x").memory() is None
    writers = [threading.Thread(target=lambda i=i: Store(url).add(record(f"run-{i}", days=i))) for i in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert Store(url).keys() == [key_of(FACTS)]
    known = Store(url).read(key_of(FACTS))
    assert [r["run"] for r in known.records] == [f"run-{i}" for i in range(12)] and not known.damaged
    assert [e.age_days for e in known.memory().evidence] == pytest.approx(list(range(12)), abs=0.01)
    assert len(Store(url).read(key_of(FACTS), most=5).records) == 5
    assert Store(url).forget(key_of(FACTS), days=5.5) == 6
    assert Store(url).forget(key_of(FACTS)) == 6 and Store(url).keys() == []


def test_of_a_run_the_newest_record_counts_and_none_from_before_a_change(tmp_path):
    store = Store(str(tmp_path))
    for made in (record("a", 9), record("b", 8), record("b", 7), record("c", 6, contradicts=True), record("d", 5)):
        store.add(made)
    known = store.read(key_of(FACTS))
    assert [r["run"] for r in known.in_use] == ["d", "c"]
    store.add(record("d", 4))
    assert [e.age_days for e in store.read(key_of(FACTS)).memory().evidence] == pytest.approx([4, 6], abs=0.01)


def test_what_is_damaged_or_newer_is_left_out_and_named(tmp_path):
    store = Store(str(tmp_path))
    name = store.add(record("whole"))
    folder = tmp_path / key_of(FACTS)
    (folder / "20250101T000000-half.json").write_text(Path(name).read_text()[:200])
    (folder / "20250102T000000-newer.json").write_text(json.dumps({**record("newer"), "format": 99}))
    (folder / "notes.txt").write_text("not ours")
    known = store.read(key_of(FACTS))
    assert [r["run"] for r in known.records] == ["whole"] and len(known.damaged) == 2
    assert any("newer dynamiccl" in text for text in known.damaged)


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


def test_a_store_that_fails_or_hangs_is_done_without(tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    said = []
    keeper = Remembering(str(file), "run", "job --api-key 123", said.append)
    assert keeper.job == "job --api-key ***"
    assert keeper.recall(FACTS) is None
    with pytest.raises(TimeoutError):
        in_time(threading.Event().wait, 0.05)
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 / 0)


def run(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code in (0, 2), done.output
    return done


def test_the_commands_list_show_and_forget(tmp_path):
    Store(str(tmp_path)).add(record(gain={"mean": 0.1, "low": 0.05, "high": 0.15}, job="train.py"))
    where = ("--memory", tmp_path)
    listed = json.loads(run("clusters", *where, "--json").stdout)["clusters"]
    assert [c["jobs"] for c in listed] == [1] and listed[0]["hardware"] == "8 x H100"
    assert "8 x H100, 2 x 8 ranks, NCCL 2.28.9: 1 jobs" in run("clusters", *where).stdout
    shown = run("clusters", "show", key_of(FACTS)[:4], *where).stdout
    assert "train.py: saves 4.9 to 13.9 % of the step" in shown and "1 configs timed" in shown
    assert run("clusters", "show", "zzz", *where).exit_code == 2
    assert json.loads(run("clusters", "forget", key_of(FACTS), *where, "--older", 1, "--json").stdout)["removed"] == 0
    assert json.loads(run("clusters", "forget", key_of(FACTS), *where, "--json").stdout)["removed"] == 1
    assert "nothing is known" in run("clusters", *where).stdout


def test_a_recorded_job_is_learned_once(tmp_path):
    write_run(tmp_path / "run")
    done = run("learn", tmp_path / "run", "--memory", tmp_path / "store", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["learned"][0]
    assert told["slots"] > 0 and told["timed"] > 0
    again = run("learn", tmp_path / "run", "--memory", tmp_path / "store")
    assert again.exit_code == 0 and "configs timed" in again.stdout
    store = Store(str(tmp_path / "store"))
    known = store.read(store.keys()[0])
    assert len(known.records) == 2 and len(known.memory().evidence) == 1
    assert (known.memory().evidence[0].counts > 0).sum() == told["timed"]
    assert Trace.read(tmp_path / "run").header.get("cluster") in known.facts["hardware"]
