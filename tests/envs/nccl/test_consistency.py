"""The rule that must never break: all ranks run the same collective the same way, while tables change under them."""

import os
import random
import subprocess
import sys
import time

import pandas as pd
import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.queries.consistency import audit
from dynamiccl.traces.records import Decision, Slot
from paths import HELPERS

RANK = HELPERS / "consistency_rank.py"
STEPS, CALLS, PROCESSES = 420, 60, 4


def random_table(rng):
    classes = (0, 0), (PROCESSES, 1), (PROCESSES, 2)
    slots = [Slot(*c, f, k) for c in classes for f in ("all_gather", "reduce_scatter") for k in (16, 22, 27)]
    choices = [Decision("ring", p, n) for p in ("ll", "ll128", "simple") for n in (0, 1, 4, 16)]
    return {s: rng.choice(choices) for s in rng.sample(slots, rng.randrange(1, len(slots)))}


@pytest.fixture(scope="module")
def stormy(tmp_path_factory):
    """Events of a job on four processes whose table changes every few steps."""
    rng = random.Random(5)
    run = RunFolder.create()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(PROCESSES),
    ]
    command += [str(RANK), str(STEPS), str(CALLS)]
    with open(tmp_path_factory.mktemp("job") / "log", "wb") as log:
        job = Job(
            run, subprocess.Popen(command, env={**os.environ, **job_env(run.path)}, stdout=log, stderr=log)
        )
    events, published, changed_at = [], 0, 0
    deadline = time.monotonic() + 240
    try:
        while job.is_alive():
            assert time.monotonic() < deadline, "the job hangs"
            job.poll()
            if job.last_step >= changed_at:
                job.publish(random_table(rng))
                published += 1
                changed_at = job.last_step + rng.randrange(1, 5)
            time.sleep(0.002)
        events = job.take_events()
        return job, events, published
    finally:
        job.process.kill()
        job.process.wait()
        run.close()


@pytest.mark.slow
def test_twenty_thousand_collectives_without_a_mismatch(stormy):
    job, events, published = stormy
    assert job.status == 0 and sum(job.lost.values()) == 0
    check = audit(events)
    assert check.calls_checked == STEPS * CALLS >= 20_000
    assert check.mismatches == 0, check.examples
    assert len(events) == PROCESSES * STEPS * CALLS
    assert published > 10 and events["table_generation"].nunique() > 5
    assert len(events[["algo", "proto", "n_channels"]].drop_duplicates()) > 6  # the tables were obeyed


@pytest.mark.slow
def test_the_audit_would_have_seen_a_rank_that_switched_late(stormy):
    """The same events with one rank one generation behind for one step: the check can fail."""
    _, events, _ = stormy
    late: pd.DataFrame = events.copy()
    some = (late["rank"] == 3) & (late["step"] == int(late["step"].median()))
    late.loc[some, "table_generation"] -= 1
    assert audit(late).mismatches == some.sum() > 0
