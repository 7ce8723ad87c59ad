"""The probe where processes, groups, threads and objects come and go in ways that training loops do not show.

The jobs are loops of ``probe_ranks.py``.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.probe.probe import Probe
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.reasons import NotAgreeing
from dynamiccl.traces.records import STEP, STEP_DTYPE
from test_probe import finish, start


@pytest.fixture
def run():
    folder = RunFolder.create()
    yield folder
    folder.close()


def whole(names, env, run):
    """What the ranks said, and their errors; all must have ended well, the interpreter's own end included."""
    processes = start(names, 2, env)
    said, errors = finish(processes, run)
    assert [p.returncode for p in processes] == [0, 0], errors
    return said, errors


@pytest.mark.slow
def test_children_of_a_rank_live_and_end_as_without_us(run):
    """Data loaders fork while a round is under way: the child has our objects, but not the threads behind them."""
    said, errors = whole(
        ["forks"], {**job_env(run.path), "JITTER_S": "0.02", "STEPS": "30", "WARM": "1"}, run
    )
    assert len(said) == 2, errors
    first, second = (s["generations"]["forks"] for s in said)
    assert first == second and len(set(first)) > 2
    assert not any("dynamiccl:" in error for error in errors), errors


@pytest.mark.slow
def test_a_job_that_makes_its_group_anew_is_tuned_on(run, tmp_path):
    env = {
        **job_env(run.path),
        "JITTER_S": "0.05",
        "STEPS": "60",
        "MEET": str(tmp_path / "store"),
        "WARM": "1",
    }
    said, errors = whole(["group anew"], env, run)
    assert len(said) == 2, errors
    first, second = (s["generations"]["group anew"] for s in said)
    assert first == second
    assert first[0] > 0 and len(set(first[8:])) > 1, first
    assert first[8] == 0, "a new communicator begins with no table: a process may be new in its group"
    assert not any("dynamiccl:" in error for error in errors), errors


@pytest.mark.slow
def test_ranks_without_a_process_group_change_no_table(run):
    """Horovod's, say. Before: each was taken for a job of one process, and changed tables by itself."""
    said, errors = finish(
        start(["plain"], 1, {**job_env(run.path), "JITTER_S": "0.05", "COMM_RANKS": "2"}), run
    )
    assert set(said[0]["generations"]["plain"]) == {0}
    assert (
        errors[0].count("no process group of torch.distributed") == 1 and "NCCL decides alone" in errors[0]
    ), errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaves early", "uneven"])
def test_ranks_that_step_unevenly_change_tables_alike(run, name):
    """Rank 1 has no more data, or takes other numbers of steps under PyTorch's Join: collectives are what counts.

    Before: no table changed from then on, and once the others stood for 30 s.
    """
    said, errors = whole(
        [name], {**job_env(run.path), "VICTIM": "1", "JITTER_S": "0.1", "STEPS": "40", "WARM": "1"}, run
    )
    first, second = (s["generations"][name] for s in said)
    assert first == second and len(set(first[12:])) > 1, (first, second)
    assert not any("Traceback" in error or "dynamiccl:" in error for error in errors), errors


@pytest.mark.slow
def test_a_job_without_standard_error_is_not_troubled(run):
    said, errors = whole(
        ["cannot speak"], {**job_env(run.path), "VICTIM": "1", "JITTER_S": "0.02", "WARM": "1"}, run
    )
    assert len(said) == 2, errors
    first, second = (s["generations"]["cannot speak"] for s in said)
    assert first == second


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_hashed_trains(run):
    program = """
import torch
class Odd(torch.optim.SGD):
    def __eq__(self, other):
        return self is other
p = torch.nn.Parameter(torch.zeros(2))
optimizer = Odd([p], 0.1)
for _ in range(4):
    p.sum().backward()
    optimizer.step()
print("trained")
"""
    env = {**os.environ, **job_env(run.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "trained\n" and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_job_that_a_rank_starts_is_not_of_its_run(run):
    """Before: it inherited DYNAMICCL_RUN, and its rank 0 led rounds of its own for the tables of the job around it."""
    program = """
import os, subprocess, sys, torch, torch.distributed as dist
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
within = "import os, torch; print('DYNAMICCL_RUN' in os.environ)"
print("DYNAMICCL_RUN" in os.environ, subprocess.check_output([sys.executable, "-c", within], text=True).strip())
"""
    env = {**os.environ, **job_env(run.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_agreements_that_are_over_are_kept_no_longer(run):
    """Before: a job that makes its group anew again and again kept all of them, with their connections."""
    over, under_way, last = (
        SimpleNamespace(close=lambda: None, is_alive=lambda alive=alive: alive)
        for alive in (False, True, False)
    )
    probe = Probe(str(run.path))
    for probe._agreement in (over, under_way, last):
        probe._attach(None)
    assert probe._left == [under_way, last]


#: Of a program: ``step()``, with a group or without; ``within``, run by Python, says whether it is of the run.
STEPS = """
import os, subprocess, sys, torch, torch.distributed as dist
from dynamiccl.envs.nccl.probe import probe
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
def step():
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
def make_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
within = [sys.executable, "-c", "import os, torch; print('DYNAMICCL_RUN' in os.environ)"]
"""


def said_by(run, program, **env):
    """What a process said that may step without a group."""
    env = {**os.environ, **job_env(run.path), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-c", STEPS + program], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_what_a_rank_starts_before_its_first_step_is_not_of_its_run(run):
    """Before: only from the first step on. The launcher of a node may have a RANK, but no LOCAL_RANK: not it."""
    program = "print(subprocess.check_output(within, text=True).strip())"
    assert said_by(run, program, RANK="0", LOCAL_RANK="0") == ["False"]
    assert said_by(run, program, RANK="0") == ["True"]


@pytest.mark.slow
def test_a_child_of_a_fork_is_no_rank_by_its_parents_group(run):
    """Before: the child took part as the parent's rank, with a life and a ring of its own."""
    program = """
make_group()
step()
if not os.fork():
    for _ in range(3):
        step()
    print(probe._probe._agreement is None, probe._probe._plugin is None)
    dist.distributed_c10d._world.default_pg = None
    dist.distributed_c10d.GroupMember.WORLD = None
    step()
    print(probe._probe._plugin is not None)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""
    assert said_by(run, program) == ["True"] * 3


@pytest.mark.slow
def test_steps_without_a_group_are_recorded_only_where_no_rank_0_is(run):
    """Before: another program beside the job, and a worker of any rank before its group, stepped as rank 0."""
    program = """
for _ in range(3):
    step()
(probe._probe._run / "nccl").write_text("2.29.7")  # the job's rank 0 has its group
for _ in range(2):
    step()
make_group()
for _ in range(2):
    step()
"""
    for env in {}, {"RANK": "5", "LOCAL_RANK": "5"}:
        assert said_by(run, program, **env) == []
        (run.path / "nccl").unlink()
    found = [ring.drain() for ring in run.rings()]
    ranks = [list(rows[rows["kind"] == STEP].view(STEP_DTYPE)["rank"]) for rows in found]
    assert sorted(ranks) == [[first, first, 0, 0] for first in (0, 5)]


def test_a_word_of_the_probe_is_never_found_half_written(tmp_path, monkeypatch):
    """Before: who looked as it was written found none."""
    word, found, rename = tmp_path / "agreement", [], os.replace
    one, two = NotAgreeing.NO_PLUGIN(rank=1), NotAgreeing.NO_PLUGIN(rank=2)
    probe = Probe(str(tmp_path))
    monkeypatch.setattr("dynamiccl.envs.nccl.probe.probe._default_group", lambda: probe)
    probe._tell(None, one)
    monkeypatch.setattr(os, "replace", lambda *names: found.append(word.read_text()) or rename(*names))
    probe._tell(None, two)
    assert found == [one.packed()] and word.read_text() == two.packed() and list(tmp_path.iterdir()) == [word]
