"""Jobs of four processes in which two tables take turns: every call and every step is held against the agreed turns."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.turns import NOBODY, TRIAL
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.search.config import LONG_TURN_STEPS
from dynamiccl.traces.records import (
    COLL,
    COLL_DTYPE,
    FUNCS,
    STEP,
    STEP_DTYPE,
    TUNED_FUNCS,
    Decision,
    Slot,
    Table,
)
from paths import HELPERS

PROCESSES = 4
TABLE = {
    Slot(*shape, func, 22): Decision("ring", "ll", 4)
    for shape in ((PROCESSES, 1), (2, 1))
    for func in ("all_gather", "reduce_scatter")
}
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))


class Records(Job):
    """A job that keeps what its rings say."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows, self.tables = [], []

    def publish(self, decisions, *trial):
        generation = super().publish(decisions, *trial)
        self.tables.append(Table.of(generation, decisions, *trial))
        return generation

    def _read(self, records, *more):
        self.rows.append(records)
        super()._read(records, *more)

    def of(self, kind, dtype):
        rows = np.concatenate(self.rows)
        return rows[rows["kind"] == kind].view(dtype)


@contextmanager
def running(kind, path):
    """A job that was seen to train; it is killed in the end. Its accumulation changes once ``path / "changes"`` is."""
    folder = RunFolder.create()
    command = [sys.executable, *LAUNCH, str(HELPERS / "turns_rank.py"), kind, str(path / "changes")]
    with open(path / "log", "wb") as file:
        env = {**os.environ, **job_env(folder.path)}
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    job = Records(folder, process)
    try:
        job.window({}, 12)
        yield job
        assert sum(job.lost.values()) == 0 and job.audit.mismatches == 0 and job.audit.calls_checked > 1000
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait()
        folder.close()


def measured(job, n, n_steps=32):
    """So many measurements in turns."""
    return [job.alternate(TABLE, n_steps) for _ in range(n)]


def check_turns(job, found, mixed=0):
    """Each step that counts was answered by its table alone, on all communicators with a table, by all ranks, and if
    turns are of agreed steps in as many calls; and each call of a lease by the table whose turn it was. ``mixed``: so
    many steps at most that count were no table's."""
    calls, steps = job.of(COLL, COLL_DTYPE), job.of(STEP, STEP_DTYPE)
    calls = calls[np.isin(calls["func"], [FUNCS.index(func) for func in TUNED_FUNCS])]
    usual = {}
    n_checked = 0
    for turns in found:
        counted = dict(zip(turns.steps.tolist(), turns.arms.tolist(), strict=True))
        for step, arm in counted.items():
            if arm == NOBODY:
                continue
            of_step = calls[calls["step"] == step]
            is_trial = np.isin(of_step["generation"], turns.generations)
            is_own = is_trial.all() if arm == TRIAL else not is_trial.any()
            mixed -= not is_own
            assert len(of_step) and mixed >= 0, f"step {step}"
            made = [int((of_step["rank"] == rank).sum()) for rank in range(PROCESSES)]
            n_checked += 1
            lease = int(steps[(steps["step"] == step) & (steps["rank"] == 0)]["trial"][0])
            if turns.turn_steps < LONG_TURN_STEPS:
                usual.setdefault(lease, set()).add(tuple(made))
    assert all(len(sizes) == 1 for sizes in usual.values()), "steps of two lengths in one lease"
    check_calls(job, calls, {g for turns in found for g in turns.generations})
    return n_checked


def check_calls(job, calls, generations):
    """The auditor's turns: A B B A by the number of each call's group, one order for all of a lease's calls."""
    for generation in generations:
        table = next(table for table in job.tables if table.generation == generation)
        for comm in np.unique(calls["comm_id"]):
            rows = calls[(calls["comm_id"] == comm) & (calls["first"] > 0)]
            tried = np.unique(rows[rows["generation"] == generation]["first"].astype(np.int64))
            if len(tried) < 2:
                continue
            length = first_run(tried, table.swap)
            since = tried[0] - (length if table.swap else 0)
            turn = (tried - since) // length
            due = np.isin(turn % 4, [1, 2] if table.swap else [0, 3])
            assert due.all(), f"table {generation} on communicator {comm:x}"
            others = rows[rows["generation"] != generation]["first"].astype(np.int64)
            inside = others[(others >= since) & (others <= tried[-1])]
            assert not np.isin((inside - since) // length % 4, [1, 2] if table.swap else [0, 3]).any()


def first_run(tried, swap):
    """Calls of a turn: the trial's first turn is one, or with ``swap`` two."""
    gaps = np.flatnonzero(np.diff(tried) > 1)
    n = int(gaps[0]) + 1 if len(gaps) else len(tried)
    return n // 2 if swap else n


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "tenth"])
def test_a_job_whose_steps_are_alike_takes_turns(kind, tmp_path):
    with running(kind, tmp_path) as job:
        found = measured(job, 3)
    arms = np.concatenate([turns.arms for turns in found])
    print(f"{(arms != NOBODY).sum()} of {len(arms)} steps count")
    assert (arms != NOBODY).mean() > 0.7 and check_turns(job, found) > 60
    assert {turns.turn_steps for turns in found} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mixed"), [("uneven", 0), ("uneven hsdp", 3)])
def test_a_job_whose_steps_are_not_alike_takes_long_turns(kind, mixed, tmp_path):
    """Two communicators of all ranks have other calls in each step. Of one without rank 0 nobody knows in which step
    it changes: near the one in which rank 0's do."""
    with running(kind, tmp_path) as job:
        found = measured(job, 3)
    arms = np.concatenate([turns.arms for turns in found])
    print(f"{len(arms)} steps count, beside {sum(turns.others for turns in found)}")
    assert {turns.turn_steps for turns in found} == {LONG_TURN_STEPS} and (arms != NOBODY).all()
    assert check_turns(job, found, mixed) == 3 * 4 * LONG_TURN_STEPS


@pytest.mark.slow
def test_a_job_whose_accumulation_changes_goes_on_in_turns_of_the_new_length(tmp_path):
    """From four micro-batches to two, in the midst of a lease."""
    with running("accumulation", tmp_path) as job:
        found = measured(job, 2)
        timer = threading.Timer(0.3, (tmp_path / "changes").touch)
        timer.start()
        found += measured(job, 3)
        timer.join()
    lengths = check_turns(job, found)
    assert lengths > 100
