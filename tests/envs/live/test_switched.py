"""What is said of a job whose ranks have switched tables, while not all of them can follow."""

import pytest
from dynamiccl.envs.live.reader import Reader
from dynamiccl.envs.nccl.run_folder import STATUS
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RunEnds
from dynamiccl.traces.records import AgreementState, Table
from test_live import Ring

LATE = NotAgreeing.NOT_ALL_VOTED(rank=0, n=2, of=3)


@pytest.mark.parametrize(
    ("state", "why"), [(AgreementState.LOSING, LATE), (AgreementState.WAITING, NotTuning.NOT_ALL_THERE())]
)
def test_a_job_that_ends_in_its_search_is_not_said_to_have_switched_no_table(folder, monkeypatch, state, why):
    """Before: "before its ranks switched tables", as a rank was silent in the last round."""
    reader, ring = Reader(folder), Ring(folder)
    monkeypatch.setattr(folder, "rings", lambda: [ring])
    (folder.path / STATUS).write_text("0\n")
    reader.poll()
    reader.state = state, why
    ended = RunEnds.JOB_STATUS(status=0)
    assert reader.ended() == RunEnds.BEFORE_A_SWITCH(ended=ended, why=why)
    assert reader.waits_for() == NotTuning.NO_SWITCH_YET(why=why)
    folder.table.publish(Table(1))
    reader.poll()
    assert reader.ended() == ended
    assert reader.waits_for() == NotTuning.NOT_ON_ALL(why=why)
    reader.state = AgreementState.OPEN, None
    assert reader.waits_for() == NotTuning.NEXT_STEP()
