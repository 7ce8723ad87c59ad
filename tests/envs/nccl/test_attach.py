"""The probe in frameworks that are packages of their own, under torchrun's restarts, and in jobs that did not ask.

The jobs are loops of ``probe_ranks.py``; ``test_probe.py`` has those that PyTorch itself brings.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.steps.steps import _RARER
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.traces.queries.consistency import audit
from probe_odd import PACKAGES
from probe_ranks import STEPS
from test_probe import JOB, finish, start, steps_of, table

INSTALLED = [name for name in PACKAGES if importlib.util.find_spec(name.split()[0])]


@pytest.fixture(scope="module")
def package_jobs():
    """The loops of all packages that there are in one job alone, and in one with the probe and changing tables."""
    env = {"DS_ACCELERATOR": "cpu", "JITTER_S": "0.02"}
    alone, errors = finish(start(INSTALLED, 2, env))
    assert len(alone) == 2, errors
    run = RunFolder.create()
    attached, errors = finish(start(INSTALLED, 2, {**env, **job_env(run.path), "WARM": "1"}), run)
    assert len(attached) == 2, errors
    assert not any("dynamiccl:" in error for error in errors), errors
    yield alone, attached, steps_of(run)
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PACKAGES))
def test_a_framework_is_attached_to_without_touching_it(request, name):
    """Tables change all the time, for the same collectives on both ranks, and the losses are those of the job alone.

    Seen at 679c0ae, DeepSpeed with two parameter groups: 19 boundaries in 10 engine steps of stage 1, 19 on one rank in
    stage 3 (29 on two: review).
    """
    if name not in INSTALLED:
        pytest.skip(f"{name.split()[0]} is not installed")
    alone, attached, steps = request.getfixturevalue("package_jobs")
    assert [said["losses"][name] for said in alone] == [said["losses"][name] for said in attached], (
        "not bit-equal"
    )
    first, second = (said["generations"][name] for said in attached)
    assert first == second
    assert len({g for one in INSTALLED for g in attached[0]["generations"][one]}) > 2  # in some loop or other
    # One boundary a step of the framework, whatever it does within; one passes until the optimizer of another loop has
    # taken the place of the one before, two after a warm loop so long that a 2nd step beside it is no rhythm yet, and
    # the first boundary of all begins the first step.
    warm = attached[0]["warm"]
    expected = STEPS * len(INSTALLED) + warm - len(INSTALLED) - 1 - (warm > 2 * _RARER)
    assert {rank: len(mine) for rank, mine in steps.items()} == {0: expected, 1: expected}


@pytest.mark.slow
def test_workers_that_torchrun_starts_anew_agree_again():
    """A worker dies in mid-job: the new workers attach to the same run, switch together, and the audit agrees."""
    run = RunFolder.create()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(JOB), "dies once"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
    env |= {
        **job_env(run.path),
        **Emulated("dgx-h100-2x8", 1.0, 1.0).env(),
        "BACKEND": "emulated",
        "JITTER_S": "0.1",
        "WARM": "1",
    }
    try:
        job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        watcher, pids = Job(run, job), set()
        while job.poll() is None:
            watcher.generation += 1
            run.table.publish(table(watcher.generation))
            watcher.rest()
            pids |= {ring.pid for ring in run.rings()}
        out, error = job.communicate(timeout=60)
        events = watcher.take_events()
        left = {ring.pid for ring in run.rings()}
    finally:
        run.close()
    assert job.returncode == 0, error
    said = [json.JSONDecoder().raw_decode(out, at.start())[0] for at in re.finditer(r'\{"rank"', out)]
    assert len(pids) == 4 and sorted(s["rank"] for s in said) == [0, 1]  # two workers, then two others
    assert left == pids, "only a tuner that writes a trace removes rings"
    first, second = (s["generations"]["dies once"] for s in said)
    assert first == second and len(set(first)) > 1 and min(first[-3:]) > 1
    assert events["pid"].nunique() == 4  # a number of the process's life, not the system's
    starts = {one.ring.process: one.start for one in watcher.sources.by_name.values()}
    assert sorted(Counter(starts.values()).values()) == [2, 2] and all(starts.values())
    check = audit(events, starts=starts)
    assert check.calls_checked > 40 and check.mismatches == 0


TRAINS = """
import sys, time
start = time.process_time()
import torch
imported = time.process_time() - start
torch.set_num_threads(1)
p = torch.nn.Parameter(torch.zeros(64))
p.grad = torch.ones(64)
o = torch.optim.SGD([p], lr=0.1)
times = []
for _ in range(2000):
    start = time.perf_counter()
    o.step()
    times.append(time.perf_counter() - start)
print(imported, sorted(times)[1000])
print(*(m for m in sys.modules if m.startswith("dynamiccl")), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_job_that_did_not_ask_costs_nothing_that_can_be_measured():
    """Import and step with the package installed and the run variable unset, against PyTorch's loading switched off."""
    seen = {"1": [], "0": []}
    for order in ("01", "10"):
        for autoload in order:
            env = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
            env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = autoload
            done = subprocess.run(
                [sys.executable, "-c", TRAINS], env=env, capture_output=True, text=True, check=True
            )
            seen[autoload].append([float(x) for x in done.stdout.split()])
            assert not set(done.stderr.split()) - {"dynamiccl_autoload"}
    on, off = ([min(x) for x in zip(*seen[autoload], strict=True)] for autoload in "10")
    print(
        f"import {on[0]:.3f} s with, {off[0]:.3f} s without; optimizer step {1e6 * on[1]:.2f} us, {1e6 * off[1]:.2f} us"
    )
    assert on[0] < 1.2 * off[0] + 0.1 and on[1] < 1.2 * off[1]
