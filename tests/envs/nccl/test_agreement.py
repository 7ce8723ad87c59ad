"""The agreement of ranks in faults of every kind: never two tables at one collective, and nobody waits.

The jobs are those of ``agreement_jobs.py``: the real agreement and the real plugin in forked processes without PyTorch.
Every test looks at what each collective of each communicator was answered on every rank.
"""

import functools
import json
import os
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement import lookout as lookouts
from dynamiccl.envs.nccl.agreement.agreement import Agreement
from dynamiccl.envs.nccl.agreement.protocol import Switch
from dynamiccl.envs.nccl.agreement.store import Proposal
from dynamiccl.envs.nccl.plugin.bindings import CommView, Refused, Span
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RowRefused
from dynamiccl.traces.records import AgreementState, Table
from memory_store import MemoryStore
from nccl_halves import KEEPS_LOCK
from nccl_late import TELLS_LATE
from paths import HELPERS

JOBS = HELPERS / "agreement_jobs.py"


def stub(**more):
    """A plugin of a rank with one communicator of its own."""
    counts = SimpleNamespace(
        join=lambda: 1,
        hold=lambda seconds: None,
        started=lambda life: None,
        part=lambda owner: None,
        tuners=lambda: 1,
        identity=str,
        waiting=lambda: 0,
        comms=lambda: {7: CommView(1, 1, 64, {64: 1}, "", 4, 0)},
        limit=lambda owner, comm, distance: 64 + distance,
        lift=lambda owner, generation: None,
    )
    return SimpleNamespace(**{**vars(counts), **more})


def wait_until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture(params=["at once", pytest.param("later", marks=pytest.mark.slow)], autouse=True)
def tells(request, monkeypatch):
    """Both modes of the miniature NCCL; the second one with the slow tests."""
    if request.param == "later":
        monkeypatch.setenv(TELLS_LATE, "3")


def outcome(name, *numbers):
    """What the ranks of a job have said, and the daemon, in the mode of the test that asks."""
    return ran(name, *numbers, mode=os.environ.get(TELLS_LATE))


@functools.cache
def ran(name, *numbers, mode):
    """A job runs once in each mode, whatever is asked of it."""
    command = [sys.executable, str(JOBS), name, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    found["ranks"] = [rank for rank in found["ranks"] if rank]
    assert found["split"] == 0 and found["compared"] > 100, "two tables at one collective"
    return found


def tables(rank, comm=7):
    """The tables that a rank's collectives were answered by, one after the other."""
    answers = rank["answers"][str(comm)]
    return [a for i, a in enumerate(answers) if i == 0 or answers[i - 1] != a]


def waited_ms(found):
    return max(rank["waited_ms"] for rank in found["ranks"])


def test_ranks_change_tables_at_one_call_and_nobody_waits():
    found = outcome("healthy")
    assert len(tables(found["ranks"][0])) > 5 and waited_ms(found) == 0
    assert [code for code, _ in found["ranks"][0]["said"]] == [AgreementState.WAITING, AgreementState.OPEN]


@pytest.mark.slow
def test_hosts_that_are_apart_by_up_to_a_step_get_every_table():
    """Before: none in 200 steps, since all ranks had to stand at a step's end within 50 ms."""
    found = outcome("hosts_apart")
    assert len(found["took_s"]) >= 5 and found["published"] - len(found["took_s"]) <= 3
    assert waited_ms(found) == 0


@pytest.mark.slow
def test_64_ranks_that_are_late_at_random_get_every_table():
    found = outcome("many_hosts_apart")
    assert len(found["ranks"]) == 64 and len(found["took_s"]) >= 4 and waited_ms(found) == 0


def test_a_trial_ends_at_its_count_in_an_evaluation_without_a_tuner():
    """Before: 276 of 276 collectives of an evaluation ran under a trial whose lease was 5 s."""
    found = outcome("evaluation")
    for rank in found["ranks"]:
        evaluated = rank["answers"]["7"][rank["evaluates_from"] :]
        trial, stays = 1 + 2, 1 + 1  # channels of the two tables
        n = evaluated.count(trial)
        assert len(evaluated) == 600 and n < 25 * 4 and evaluated == [trial] * n + [stays] * (600 - n)


def test_a_communicator_with_a_rank_without_the_tuner_is_left_out_and_others_are_tuned():
    found = outcome("one_without_a_tuner")
    assert len(tables(found["ranks"][0], 8)) > 1 and tables(found["ranks"][0], 7) == [0]


def test_communicators_with_other_members_each_switch_alike():
    found = outcome("two_groups")
    assert len(tables(found["ranks"][1], 8)) > 3 and len(tables(found["ranks"][1], 9)) > 3


def test_ranks_that_issue_other_collectives_leave_with_that_communicator_alone():
    found = outcome("uneven_collectives")
    assert len(tables(found["ranks"][0], 7)) > len(tables(found["ranks"][0], 8))


@pytest.mark.parametrize("name", ["no_profiler", "versions_differ"])
def test_ranks_that_cannot_be_compared_get_no_table(name):
    found = outcome(name)
    assert all(tables(rank) == [0] for rank in found["ranks"])


def test_a_communicator_that_comes_later_gets_the_table_that_is_there_to_stay():
    found = outcome("late_communicator")
    assert tables(found["ranks"][0], 7) == [0, 2] and tables(found["ranks"][0], 8) == [0, 2]


def test_a_rank_that_comes_later_is_waited_for_in_the_background():
    found = outcome("late_rank")
    assert len(tables(found["ranks"][0])) > 3 and waited_ms(found) == 0


@pytest.mark.slow
@pytest.mark.timing  # a round between vote and decision as the store becomes late may hold a call for some answers
def test_a_store_that_answers_late_holds_nobody():
    found = outcome("store_late")
    assert waited_ms(found) == 0 and len(tables(found["ranks"][0])) > 2


def test_a_store_that_drops_its_connections_is_connected_to_again():
    """Before: rank 0 began a new life with the number of its last round, and the others waited for the first."""
    found = outcome("store_drops")
    assert waited_ms(found) < 1000 and len(tables(found["ranks"][0])) > 8


@pytest.mark.slow
def test_a_store_that_fails_at_random_moments_holds_calls_for_no_longer():
    """Of 120 failures none held a call (``agreement_jobs.py store_fails_at_random``, seeds 1 to 10)."""
    found = outcome("store_fails_at_random", 1, 8)
    assert len(found["held_ms"]) == 8 and max(found["held_ms"]) < 1000 and len(tables(found["ranks"][0])) > 8


@pytest.mark.slow
def test_a_store_that_fails_between_vote_and_decision_holds_calls_for_as_long():
    found = outcome("store_fails_after_the_votes")
    assert waited_ms(found) < 3500 and len(tables(found["ranks"][0])) > 2


def test_a_store_that_hangs_for_good_does_not_hold_calls_for_good():
    """Before: no limit. NCCL's watchdog does not see a call that is held before its launch."""
    found = outcome("store_hangs")
    assert 2000 <= waited_ms(found) < 3500
    for rank in found["ranks"]:
        assert len(rank["answers"]["7"]) == 600, "the job went on to its end"


@pytest.mark.parametrize("keeps", ["", "1"])
def test_a_call_that_holds_python_s_lock_is_let_go_by_the_agreement(monkeypatch, keeps):
    """Before: the agreement's thread, which is in Python, could not read the decision: the call was held to the end of
    its time, and then ran two ways with the others, 81 of 640."""
    monkeypatch.setenv(KEEPS_LOCK, keeps)
    ran.cache_clear()
    found = outcome("decision_late_for_one")
    assert found["compared"] == 640 and 1000 < waited_ms(found) < 5000


def test_where_the_store_is_gone_rank_0_still_says_that_all_run_the_default():
    """Before: `stop` said that no step had run under it. The trial had ended by itself on all ranks."""
    found = outcome("store_gone_in_a_trial")
    assert found["settled_s"] < 30
    for rank in found["ranks"]:
        assert tables(rank) == [0, 3, 0]


#: A job of three ranks with a group that is made anew and a thread beside the training; the others are slow tests.
FIRST = 6
SEEDS = [
    pytest.param(n, marks=() if n == FIRST else pytest.mark.slow)
    for n in range(int(os.environ.get("FAULTS", "12")))
]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_fails_no_call_runs_two_ways_and_after_quiet_all_plans_are_the_wanted_one(seed):
    """Rank 0 says that they are only where it is so: each later call is answered by it. Only a store holds calls."""
    found = outcome("settles", seed)
    print(f"seed {seed}: {found['faults']} settled in {found['settled_s']:.1f} s")
    is_stores = any(fault.startswith("store") for fault in found["faults"])
    assert found["settled_s"] < 60 and waited_ms(found) < (2000 if is_stores else 200)
    assert found["ranks"][0]["stopped"] == "" and len(tables(found["ranks"][0])) > 1
    for rank in found["ranks"]:
        assert rank["answers"]["7"][-1] == found["channels"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_dies_holds_nobody(seed):
    found = outcome("dies", seed)
    assert len(found["ranks"]) == 2 and waited_ms(found) < 200


def keeps_being_tuned(found):
    """Every table that the tuner asks for takes effect, to the end, and so does the last, the empty one.

    The first may come and go before a step ends; of the last trial the job's end may be in the way.
    """
    for rank in found["ranks"]:
        asked = set(range(2, found["emptied"] - 1))
        assert asked <= set(rank["steps_under"]), asked - set(rank["steps_under"])
        answers = rank["answers"]["7"]
        print(f"{len(tables(rank)) // 2} trials of {found['published']} tables on one communicator")
        assert any(answers[len(answers) * 5 // 6 :]), "before: none from the 27th group on"
        assert rank["steps_under"][-1] == found["emptied"] and answers[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lives", "idle_groups"])
def test_a_job_that_makes_groups_again_and_again_keeps_being_tuned(name):
    """Before: the 32 buffers were held by groups that were destroyed or rest, and even `stop` was refused."""
    keeps_being_tuned(outcome(name, 36))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), [("lives", 200), ("idle_groups", 100)])
def test_200_lives_of_a_group_and_100_idle_groups_keep_being_tuned(name, n):
    keeps_being_tuned(outcome(name, n))


@pytest.mark.slow
def test_hosts_a_step_of_1500_calls_apart_get_their_tables():
    """Before: 3 of 13, for want of a common count. Ten tables are asked for once the ranks have met."""
    found = outcome("far_apart")
    seen = set(found["ranks"][0]["steps_under"]) & set(found["asked"])
    print(f"{len(seen)} of {len(found['asked'])} tables took effect")
    assert len(found["asked"]) == 10 and len(seen) >= 9


def test_a_rank_whose_plugin_refuses_a_switch_says_so_and_changes_no_further_table():
    """Before: nobody looked, and the rank went on voting."""
    said, over = [], threading.Event()

    def refuses(*_args):
        raise OSError(22, "Invalid argument")

    def no_store():
        over.wait(10)
        raise ConnectionError("none")

    agreement = Agreement(
        1,
        2,
        stub(switch=refuses),
        None,
        None,
        no_store,
        tell=lambda state, text, generation: said.append(text),
    )
    agreement._do(Switch(7, Span(3)), Proposal(1, b"table", 1))
    over.set()
    agreement.join()
    assert said == [NotAgreeing.NOT_SWITCHED(rank=1, error="[Errno 22] Invalid argument")]
    assert agreement.stopped == said[0]


def test_a_refused_table_is_led_once_and_told_by_its_reason(tmp_path, monkeypatch):
    """Before: in silence, or as turns that the job's steps do not allow."""
    monkeypatch.setattr(lookouts, "shared_roots", lambda: iter([tmp_path]))
    said, staged, served = [], [], MemoryStore()

    def refuses(owner, message):
        staged.append(message)
        raise Refused(RowRefused.PLUGIN_REFUSES(error="x"))

    tables = [(2, encode_table(Table(2, (), 32, 2, 1, 0))), None, (3, encode_table(Table(3)))]
    published = SimpleNamespace(
        confirmed=lambda: (1, encode_table(Table(1))),
        take=lambda: tables.pop(0) if tables else None,
        refuses=lambda found: None,
        read_note=lambda: None,
        trial_begins=lambda found: None,
        trial_is_over=lambda: None,
        tell_plans=lambda *word: None,
        default=lambda generation: encode_table(Table(generation)),
    )
    agreement = Agreement(
        0,
        1,
        stub(stage=refuses),
        SimpleNamespace(ended=0),
        published,
        lambda: served,
        tell=lambda *word: said.append(word),
    )
    wait_until(lambda: len(staged) == 3)
    agreement._end.wait(0.1)
    agreement.close()
    agreement.join()
    assert len(staged) == 3 and [state for state, *_ in said] == [
        AgreementState.WAITING,
        AgreementState.LOSING,
    ]
    assert said[1][1:] == (RowRefused.PLUGIN_REFUSES(error="x"), 0)


def test_a_tuner_that_lives_hears_of_an_old_trial_at_once(tmp_path, monkeypatch):
    """It would wait for its first step for half a minute."""
    monkeypatch.setattr(lookouts, "shared_roots", lambda: iter([tmp_path]))
    said, served = [], MemoryStore()
    tables = [(5, encode_table(Table(5, (), 32)))]
    published = SimpleNamespace(
        confirmed=lambda: None,
        take=lambda: tables.pop(0) if tables else None,
        read_note=lambda: None,
        refuses=lambda found: NotAgreeing.OLD_TRIAL() if found[0] == 5 else None,
        tell_plans=lambda *word: None,
        default=lambda generation: encode_table(Table(generation)),
    )
    steps, tell = SimpleNamespace(ended=0), lambda *word: said.append(word)
    agreement = Agreement(0, 1, stub(), steps, published, lambda: served, tell=tell)
    wait_until(lambda: len(said) == 3)
    agreement.close()
    agreement.join()
    waiting = AgreementState.WAITING, NotTuning.NOT_ALL_THERE(), 0
    assert said == [waiting, (AgreementState.NO_TURNS, NotAgreeing.OLD_TRIAL(), 5), waiting]
    assert len(NotAgreeing.OLD_TRIAL().packed()) <= 80, "what a record holds"


def test_a_store_that_stays_away_ends_no_thread(monkeypatch):
    """Before: after 1,023 failures, 17 hours, an OverflowError in the job's output, and no table changed any more."""
    monkeypatch.setattr(agreements, "_SOON_S", 0.0)
    tries = []

    def refuses():
        tries.append(1)
        raise ConnectionRefusedError("refused")

    agreement = Agreement(1, 2, stub(), None, None, refuses)
    wait_until(lambda: len(tries) > 1100 or not agreement.is_alive())
    assert agreement.is_alive() and agreement.stopped is None
    agreement.close()
    agreement.join()


def test_a_fault_of_ours_in_the_thread_is_one_line_and_this_rank_parts():
    said, parted = [], []

    def tells(state, text, generation):
        said.append(text)
        if state == AgreementState.WAITING:
            raise struct.error("argument out of range")

    agreement = Agreement(0, 2, stub(part=parted.append), None, nothing_published(), no_store, tell=tells)
    wait_until(lambda: not agreement.is_alive())
    why = NotAgreeing.FAULT(rank=0, error="error: argument out of range")
    assert said[1:] == [agreement.stopped] == [why] and parted == [1]


def no_store():
    raise ConnectionError("none")


def nothing_published():
    nothing = {"confirmed": lambda: None, "take": lambda: None, "read_note": lambda: None}
    default = lambda generation: encode_table(Table(generation))  # noqa: E731
    return SimpleNamespace(**nothing, tell_plans=lambda *word: None, default=default)
