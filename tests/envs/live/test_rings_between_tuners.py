"""Rings that began or ended while no tuner, or that of another trace, was there."""

from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.shm import RunFolder
from ring_files import CAPACITY, RingFile, step
from test_joining import killed, rows_and_lost, served


def test_what_another_tuner_has_read_of_a_ring_that_is_gone_is_lost(folder, tmp_path):
    """Before: missing in the trace, and nothing told of it."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(50)))
    served(folder, tmp_path / "x", "replace")
    ring.put(*map(step, range(50, 100)))
    other = killed(folder, tmp_path / "y")
    ring.die()
    RingFile(folder.path, 0, 200).put(*map(step, range(20)))
    for _ in range(2):
        other.poll()
        other.take()
    assert not (folder.path / "ring-0-100").exists()
    for _ in range(2):
        served(folder, tmp_path / "x", "resume")
        assert rows_and_lost(tmp_path / "x") == 120
    for existing in ("replace", "resume"):
        assert served(folder, tmp_path / "z", existing).records_lost == 0, (
            "it was gone before that trace began"
        )


def test_a_ring_that_began_and_went_round_between_two_tuners_has_lost_records(folder, tmp_path):
    """Before: nobody was there, it said; had the tuner seen a single record of it, the same ones would have counted."""
    ring = RingFile(folder.path, 0, 100).put(*map(step, range(50)))
    served(folder, tmp_path, "replace")
    ring.die()
    RingFile(folder.path, 0, 200).put(*map(step, range(3 * CAPACITY)))
    served(folder, tmp_path, "resume")
    assert rows_and_lost(tmp_path) == 50 + 3 * CAPACITY
    job = Job(RunFolder(folder.path))
    job.poll()
    assert job.records_lost == 0, "without a trace nothing is lost"
