"""The probe where processes, groups, threads and objects come and go in ways that training loops do not show.

The jobs are loops of ``probe_ranks.py``.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement.published import EMPTY
from dynamiccl.envs.nccl.probe.probe import Probe
from dynamiccl.envs.nccl.shm import RunFolder
from test_probe import finish, start

#: What this machine may add to a limit of time: it runs other things beside.
SLACK_MS = 200


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
    said, errors = whole(["forks"], {**run.env(), "JITTER_S": "0.05", "WARM": "1"}, run)
    assert len(said) == 2, errors
    first, second = (s["generations"]["forks"] for s in said)
    assert first == second and len(set(first)) > 2
    assert not any("dynamiccl:" in error for error in errors), errors


@pytest.mark.slow
def test_a_job_that_makes_its_group_anew_is_tuned_on(run, tmp_path):
    env = {**run.env(), "JITTER_S": "0.4", "MEET": str(tmp_path / "store"), "WARM": "1"}
    said, errors = whole(["group anew"], env, run)
    assert len(said) == 2, errors
    first, second = (s["generations"]["group anew"] for s in said)
    assert first == second
    assert first[0] > 0 and len(set(first[8:])) > 1, first
    assert first[8] == 0, "a process that was not in the group before would have no table either"
    assert not any("dynamiccl:" in error for error in errors), errors


@pytest.mark.parametrize("fails", [False, True])
def test_a_table_goes_where_a_default_group_is_made_and_nowhere_else(fails):
    """Trainers make groups of no named ranks beside the default one too, to reach an inference engine, on one rank."""
    activated = []

    class Plugin:
        def forget_communicators(self):
            if fails:
                raise RuntimeError("of ours")

        activate = staticmethod(activated.append)

    c10d = SimpleNamespace(GroupMember=SimpleNamespace(WORLD=object()), _new_process_group_helper=lambda *args: args)
    probe = Probe("/nowhere")
    probe._plugin = Plugin()
    probe.clear_tables_before_groups(c10d)
    for ranks in ([], [0, 1], None):
        assert c10d._new_process_group_helper(2, 0, ranks) == (2, 0, ranks) and not activated
    c10d.GroupMember.WORLD = None
    assert c10d._new_process_group_helper(2, 0, []) == (2, 0, [])
    assert activated == ([] if fails else [EMPTY]) and probe._off == fails


@pytest.mark.slow
def test_ranks_without_a_process_group_change_no_table(run):
    """Horovod's, say. Before: each was taken for a job of one process, and changed tables by itself."""
    said, errors = finish(start(["plain"], 1, {**run.env(), "JITTER_S": "0.05", "COMM_RANKS": "2"}), run)
    assert set(said[0]["generations"]["plain"]) == {0}
    assert errors[0].count("several ranks, and no process group") == 1 and "NCCL decides alone" in errors[0], errors
    said, errors = finish(start(["plain"], 1, {**run.env(), "JITTER_S": "0.05"}), run)
    assert len(set(said[0]["generations"]["plain"])) > 1 and not errors[0], "one process alone"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_steps_no_more_holds_up_nobody(run, victim):
    """Seen: the others stood for 30 s. It answers the others' collectives, so the job goes on."""
    env = {**run.env(), "VICTIM": str(victim), "JITTER_S": "0.1", "DYNAMICCL_MEET_MS": "50", "WARM": "1"}
    said, errors = whole(["leaves early"], env, run)
    first, second = (s["generations"]["leaves early"] for s in said)
    assert first[:7] == second[:7] and len(set(first[9:] + second[9:])) == 1, (first, second)
    assert max(s["held_ms"] for s in said) < 50 + SLACK_MS and not any("Traceback" in error for error in errors)


@pytest.mark.slow
def test_no_table_changes_while_the_ranks_step_unevenly(run):
    """Under PyTorch's Join the ranks take different numbers of steps; before and after it they change together."""
    said, errors = whole(["uneven"], {**run.env(), "JITTER_S": "0.05", "WARM": "1"}, run)
    assert len(said) == 2, errors
    first, second = (s["generations"]["uneven"] for s in said)
    assert first == second and len(set(first)) > 2, (first, second)
    assert not any("dynamiccl:" in error for error in errors), errors


@pytest.mark.slow
def test_a_job_without_standard_error_is_not_troubled(run):
    said, errors = whole(["cannot speak"], {**run.env(), "VICTIM": "1", "JITTER_S": "0.02", "WARM": "1"}, run)
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
    env = {**os.environ, **run.env()}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "trained\n" and "Traceback" not in done.stderr, done.stderr
