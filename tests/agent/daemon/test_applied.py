"""A job under a fixed table: its step times beside some of the default, and what takes the table back."""

import re

import pytest
from dynamiccl.agent.daemon.applied import DISCARD, TURN_STEPS, TURNS, WARM_UP, Watch
from dynamiccl.envs.nccl import site_switch
from dynamiccl.envs.nccl.run_folder import STOP
from dynamiccl.envs.nccl.shm import decode_table
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import Decision, Rule, Table
from ring_files import RingFile, step

CEILING = Rule(0, 0, "reduce_scatter", 0, 99, Decision(None, None, 4), 256)
TABLE = Table(1, (Rule(0, 0, "all_gather", 0, 99, Decision("ring", "ll", 4)), CEILING))


@pytest.fixture
def job(folder, monkeypatch, tmp_path):
    """A job whose steps take 10 ms under the table, 12 ms without it, and become 0.1 ms slower from step to step."""
    monkeypatch.setattr(site_switch, "FILE", str(tmp_path / "off"))
    folder.table.publish(TABLE)
    return Job(folder)


class Job:
    def __init__(self, folder):
        self.folder, self.said, self.tables, self.n = folder, [], [], 0
        self.watch = Watch(folder, TABLE, "", self.said.append)
        self.ring = RingFile(folder.path, 0, 1)

    def table(self):
        return decode_table(self.folder.table.read()[1])

    def steps(self, n, late=2):
        """``n`` steps; the ranks take a new table ``late`` steps after it is published."""
        for _ in range(n):
            self.tables = [*self.tables, self.table()][-late - 1 :]
            now = self.tables[0]
            row = step(self.n)
            row["generation"] = now.generation
            row["duration_ns"] = (10 if TABLE.rules == now.rules else 12) * 1e6 + 1e5 * self.n
            self.ring.put(row)
            self.n += 1
            self.watch._count()


def test_steps_under_the_table_are_told_beside_some_of_the_default(job):
    """Before: a table that did harm on other nodes stayed unseen."""
    job.steps(WARM_UP + TURN_STEPS)
    assert job.table().rules == (CEILING,), "as NCCL is without the table, under --headroom too"
    job.steps(2 + DISCARD + 2 * TURN_STEPS)
    assert job.table().rules == TABLE.rules
    job.steps(1 + DISCARD + TURN_STEPS)
    assert not job.said
    job.steps(500)
    assert job.table().rules == TABLE.rules and job.table().generation == 3, "two changes, and it stays"
    table, default, n = re.fullmatch(
        r"a step takes ([\d.]+) ms \(.*\) under the table, ([\d.]+) ms .* default \((\d+) steps of each, .*\)",
        *job.said,
    ).groups()
    assert float(default) - float(table) == pytest.approx(2, abs=0.3), "the drift favours neither"
    assert int(n) == TURN_STEPS * TURNS.count(True) and job.watch.told == job.said[0]


def test_steps_of_other_tables_and_other_ranks_do_not_count(job):
    for rank, generation in ((1, 1), (0, 0)):
        row = step(0, rank)
        row["generation"] = generation
        for _ in range(200):
            job.ring.put(row)
            job.watch._count()
    assert job.table() == TABLE and not job.said


def test_the_sites_switch_takes_the_table_back_while_the_job_runs(job, tmp_path):
    """Before: a job under `apply` kept its table until it ended."""
    (tmp_path / "off").write_text("maintenance")
    job.watch.run()
    assert job.table().rules == (CEILING,) and job.table().generation == 2
    assert "maintenance" in job.said[0] and "go back to NCCL's default" in job.said[0]


def test_after_a_stop_nothing_is_published(job):
    (job.folder.path / STOP).touch()
    job.watch.run()
    assert job.table() == TABLE and job.said == [RunEnds.STOPPED()], "who stops a run withdraws its table"


def test_a_damaged_folder_ends_the_watch_in_one_line(job, monkeypatch):
    def gone():
        raise OSError("gone")

    monkeypatch.setattr(job.watch, "_count", gone)
    job.watch.run()
    assert job.said == ["the table stays as it is, and nothing is measured any more: gone"]
