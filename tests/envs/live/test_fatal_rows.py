"""Rows in whose trials the ranks have ended: which of a table's rows these are, where rank 0 refuses all of it."""

import pytest
from dynamiccl.envs.nccl import life
from dynamiccl.envs.nccl.agreement.mailbox import TableMailbox
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import Decision, Slot, Table
from test_live_turns import job_of as job_of

FATAL = {Slot(2, 1, "all_gather", 20): Decision("ring", "ll", 4)}
INNOCENT = {
    Slot(2, 1, "reduce_scatter", 22): Decision("ring", "ll128", 8),
    Slot(2, 1, "all_gather", 24): Decision("ring", "simple", 2),
}
WINDOW = FATAL | INNOCENT


@pytest.fixture
def ends(folder, monkeypatch):
    """``ends(decisions)``: the ranks end in a trial of these, and are started again."""

    def end(decisions):
        for number, begins in enumerate((True, False)):
            monkeypatch.setattr(life, "_own", number + 1)
            rank_0 = TableMailbox(folder.path / "table")
            rank_0.read_note()
            if begins:
                rank_0.trial_begins((5, encode_table(Table.of(5, decisions, 40))))
        assert rank_0.refuses((9, encode_table(Table.of(9, WINDOW, 40)))) == NotAgreeing.FATAL_TRIAL()

    return end


@pytest.mark.parametrize("in_turns", [False, True])
def test_rows_that_were_in_no_fatal_trial_are_tried(ends, job_of, in_turns):
    """Before: the whole window was given up, and its other rows were reported as fatal and never tried again."""
    ends(FATAL)
    job, ring = job_of(fatal=[WINDOW])
    measured = job.alternate(WINDOW, 32) if in_turns else job.window(WINDOW, 5, one_of=8)
    assert {row.slot: row.decision for row in measured.disobeyed} == FATAL
    assert [table.rules for table in ring.tables if table.trial_steps][-1] == Table.of(0, INNOCENT).rules


@pytest.mark.parametrize("in_turns", [False, True])
def test_where_the_ranks_end_in_the_trial_of_the_rest_too_all_rows_come_back(ends, job_of, in_turns):
    """Before, in windows as in turns: only those of the first refusal."""
    ends(FATAL)
    job, _ = job_of(fatal=[WINDOW, INNOCENT])
    measured = job.alternate(WINDOW, 32) if in_turns else job.window(WINDOW, 5, one_of=8)
    assert {row.slot: row.decision for row in measured.disobeyed} == WINDOW


@pytest.mark.parametrize(
    "note", [None, "x", "7", "{}", '{"fatal": 3}', '{"fatal": [[]]}', '{"fatal": ["another row"]}']
)
def test_without_a_word_which_rows_they_are_all_that_are_new_come_back(folder, job_of, note):
    if note is not None:
        (folder.path / "tried").write_text(note)
    job, _ = job_of(fatal=[WINDOW])
    assert {row.slot: row.decision for row in job.window(WINDOW, 5, one_of=8).disobeyed} == WINDOW
