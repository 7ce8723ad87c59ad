"""The table of events: what holds after each, in the code that decides, on the page, and complete."""

import ast
from types import SimpleNamespace

import pytest
from dynamiccl.agent.daemon.daemon import Daemon
from dynamiccl.agent.daemon.events import Events
from dynamiccl.agent.daemon.outcome import Outcome
from dynamiccl.envs.live.fail_closed import TABLE, Holds, Until, page, row_of
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.traces.reasons import NotAgreeing, RowRefused, RunEnds
from paths import ROOT

#: The normal course: a trial that is not led, and a job that is over.
NORMAL = {NotAgreeing.NO_RHYTHM, NotAgreeing.FATAL_TRIAL, NotAgreeing.OLD_TRIAL, NotAgreeing.NO_ROOM}
NORMAL |= {NotAgreeing.DESTROYED, NotAgreeing.TABLE_STAYS}
NORMAL |= {
    RunEnds.JOB_ENDED,
    RunEnds.JOB_STATUS,
    RunEnds.ALL_STEPS,
    RunEnds.BEFORE_A_SWITCH,
    RunEnds.NOT_STARTED,
    RunEnds.SEARCHED_AGAIN,
}
NORMAL |= {RunEnds.NEVER_SWITCHED, RunEnds.NO_MORE_SWITCHES, RunEnds.SLOWER, RunEnds.NO_GAIN}


def given(reason):
    return reason(**dict.fromkeys(reason.gaps, 7))


def test_each_event_has_one_row():
    named = [reason for row in TABLE for reason in row.reasons]
    assert len(TABLE) <= 10 and len(named) == len(set(named))
    assert {*named} | NORMAL == {*NotAgreeing, *RunEnds, RowRefused.PLUGIN_REFUSES} and not NORMAL & {*named}


def test_the_page_shows_the_table_that_decides():
    told = (ROOT / "OPERATING.md").read_text(encoding="utf-8")
    assert told.partition("<!-- events -->\n")[2].partition("\n<!-- /events -->")[0] == page()


def test_the_innermost_reason_decides_and_what_nobody_has_foreseen_is_our_fault():
    inner = NotAgreeing.TABLE_STAYS(why=NotAgreeing.OTHER_PLANS(rank=1, other=2, count=3))
    assert row_of(RunEnds.NO_MORE_SWITCHES(why=inner)).holds is Holds.DEFAULT
    assert row_of(RunEnds.NO_MORE_SWITCHES(why="words of another release")).until is Until.NEXT_LIFE


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.event)
def test_the_tuner_does_what_the_table_says(row):
    daemon, told = Daemon.__new__(Daemon), []
    published = []
    daemon.job = SimpleNamespace(
        confirm=published.append, writer=None, audit=SimpleNamespace(mismatches=0, is_told=False)
    )
    daemon._events, daemon._closed = Events(lambda: 0), None
    daemon._events.tell("stand", kept=True)
    daemon.tuner = SimpleNamespace(
        result=Outcome(LiveWindows(SimpleNamespace(all_reduce="")), daemon._events)
    )
    daemon.on_phase, daemon._leave = told.append, lambda: None
    goes_on = daemon._obey(Closed(given(row.reasons[0])))
    assert published == [{}] * (row.holds is Holds.DEFAULT) and goes_on == (row.until is not Until.ASKED)
    assert daemon.outcome.kept == (row.holds is Holds.CONFIRMED)
    assert bool(daemon.outcome.failure) == (row.holds is Holds.DEFAULT and goes_on)
    n = len(told)
    assert n == 1
    daemon._obey(Closed(given(row.reasons[0])))
    assert len(told) == n or not goes_on, "it is said once"


def test_ranks_end_tuning_for_a_life_only_where_our_code_failed():
    """Or where plans differ: then the default is led from there on. Nothing else stops an agreement."""
    source = (ROOT / "envs" / "nccl" / "agreement" / "agreement.py").read_text(encoding="utf-8")
    stops = [
        node.args[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_stop"
    ]
    reasons = [NotAgreeing[one.func.attr] for one in stops]
    assert len(reasons) >= 4 and all(row_of(given(one)).until is Until.NEXT_LIFE for one in reasons)
