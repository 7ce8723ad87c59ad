"""Which trials rank 0 leads after a restart: what its mailbox notes of them in the run folder."""

import json
from itertools import count

import pytest
from dynamiccl.envs.nccl import life
from dynamiccl.envs.nccl.agreement.leader import Leader
from dynamiccl.envs.nccl.agreement.mailbox import TableMailbox
from dynamiccl.envs.nccl.agreement.plans import Told
from dynamiccl.envs.nccl.agreement.protocol import ABORT, Decision
from dynamiccl.envs.nccl.plugin.bindings import Plan, Span
from dynamiccl.envs.nccl.run_folder import TRIED
from dynamiccl.envs.nccl.shm import TableFile, encode_table
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import Decision as Choice
from dynamiccl.traces.records import Rule, Table

TRIAL, TURNS = (8,), (32, 2, 1, 0)
UNTIL = {7: Span(128, 160), 9: Span(128, 160)}
FATAL = Rule(2, 1, "all_gather", 2**19 + 1, 2**20, Choice("ring", "simple", 7))
OTHER = Rule(2, 1, "reduce_scatter", 2**19 + 1, 2**20, Choice("ring", "ll", 2))


class Lives:
    """Rank 0 in one life after the other, each a process; a daemon beside it."""

    def __init__(self, folder):
        self.folder = folder

    def publish(self, generation, rules, *trial):
        file = TableFile(self.folder / "table", write=True)
        file.publish(Table(generation, rules, *trial))
        file.close()

    def confirm(self, *rules):
        (self.folder / "confirmed").write_bytes(encode_table(Table(1, rules)))

    def begin(self):
        return Leader(1, TableMailbox(self.folder / "table"))

    def tries(self, leader, generation, rules, spans=None, *trial):
        """The reason why the trial is not led; empty if it is."""
        self.publish(generation, rules, *(trial or TRIAL))
        if not (why := leader.look()[1]):
            message = generation, encode_table(Table(generation, rules, *(trial or TRIAL)))
            leader.begin_round(message)
            leader.ended(message, Decision(generation, spans) if spans else ABORT, {}, {}, {7, 9})
        return why

    def sees(self, leader, count_7, count_9, until=160):
        """So many collectives are made on the communicators of the trial, which ends then."""
        counts = {7: count_7, 9: count_9}
        leader.sees({comm: Told(1, Plan(n, 0, 128, 5, 128, until)) for comm, n in counts.items()})


@pytest.fixture
def restarted(monkeypatch):
    """The next life is another process."""
    lives = count(1)
    return lambda: monkeypatch.setattr(life, "_own", next(lives))


@pytest.mark.parametrize("trial", [TRIAL, TURNS])
def test_rows_in_whose_trial_the_ranks_ended_are_not_tried_again(tmp_path, restarted, trial):
    """Before: the tuner began the trial again under the next number, and it ended each restart of the job."""
    job = Lives(tmp_path)
    leader = job.begin()
    assert job.tries(leader, 2, (FATAL,), UNTIL, *trial) is None
    job.sees(leader, 128, 140)
    for n in range(3):
        restarted()
        leader = job.begin()
        assert leader.look() == (2 + n, NotAgreeing.FATAL_TRIAL())
        assert job.tries(leader, 3 + n, (FATAL,), UNTIL, *trial) == NotAgreeing.FATAL_TRIAL()
    assert job.tries(leader, 6, (FATAL, OTHER), UNTIL) == NotAgreeing.FATAL_TRIAL(), "nor beside another row"
    assert job.tries(leader, 6, (OTHER,), UNTIL) is None, "other rows may be tried"
    restarted()
    leader = job.begin()
    assert {job.tries(leader, 7 + i, (row,), UNTIL) for i, row in enumerate((FATAL, OTHER))} == {
        NotAgreeing.FATAL_TRIAL()
    }
    assert len(NotAgreeing.FATAL_TRIAL().packed()) <= 80, "what a record holds"


@pytest.mark.parametrize("ends", ["by itself", "withdrawn", "lost"])
def test_rows_whose_trial_the_ranks_outlived_are_tried_again(tmp_path, restarted, ends):
    """A job is started again for other reasons too."""
    job = Lives(tmp_path)
    leader = job.begin()
    job.tries(leader, 2, (FATAL,), None if ends == "lost" else UNTIL)
    if ends == "withdrawn":
        leader.ended((3, encode_table(Table(3))), Decision(3, {7: Span(140), 9: Span(140)}), {}, {}, {7, 9})
        job.sees(leader, 139, 139, 140)
    if ends != "lost":
        assert json.loads((tmp_path / "tried").read_text())["rows"], "it is under way"
        job.sees(leader, 160, 161)
    restarted()
    assert job.tries(job.begin(), 4, (FATAL,), UNTIL) is None


def test_rows_of_the_confirmed_table_are_not_unproven(tmp_path, restarted):
    """A trial of them without one, or of none at all: what ended the ranks was something else."""
    job = Lives(tmp_path)
    job.confirm(FATAL, OTHER)
    for generation, rules in enumerate(((FATAL,), ()), 2):
        job.tries(job.begin(), generation, rules, UNTIL)
        restarted()
        assert job.begin().look() == (generation, NotAgreeing.OLD_TRIAL())
        assert job.tries(job.begin(), 10 + generation, rules, UNTIL) is None


@pytest.mark.parametrize("note", ["x", "7", "{}", '{"process": "", "generation": 2, "rows": "", "fatal": 3}'])
def test_a_damaged_note_of_a_trial_counts_as_none(tmp_path, note):
    (tmp_path / "tried").write_text(note)
    job = Lives(tmp_path)
    job.publish(2, (FATAL,), *TRIAL)
    assert job.begin().look() == (0, None)


def test_a_trial_is_begun_in_one_life_only(tmp_path):
    """Before: after each restart an unproven table ran for the whole trial again, also where its tuner was dead."""
    job = Lives(tmp_path)
    leader = job.begin()
    job.publish(2, (FATAL,), *TRIAL)
    assert leader.look() == (0, None) and leader.next()[0] == 2
    leader.begin_round(leader.next())
    after = job.begin()
    assert after.look() == (2, NotAgreeing.OLD_TRIAL()) and after.next() is None
    job.publish(3, (FATAL,), *TRIAL)
    assert after.look() == (0, None) and after.next()[0] == 3, "the process has outlived its group"
    job.publish(2, (FATAL,))
    after = job.begin()
    assert after.look() == (0, None) and after.next()[0] == 2, "it is there to stay"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"process": "x"',
        "[]",
        '{"process": "x", "generation": 1, "rows": 1, "fatal": []}',
        '{"process": "x", "generation": 1, "rows": [[1]], "fatal": [{}]}',
    ],
)
def test_a_damaged_note_of_trials_ends_no_agreement(tmp_path, text):
    """Before: a RecursionError, or a TypeError at the first trial, and no rank changed its table."""
    (tmp_path / TRIED).write_text(text)
    job = Lives(tmp_path)
    leader = job.begin()
    assert job.tries(leader, 2, (OTHER,), UNTIL) is None
