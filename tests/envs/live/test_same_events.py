"""What a trace says of a job is the same whatever its layout on disk: digests that were taken of layout 2."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import COMM, COMM_DTYPE
from dynamiccl.traces.writer import TraceWriter
from paths import DATA
from ring_files import RingFile, kernel, step
from test_obedience import calls

#: (collectives, steps, digest).
RECORDED = (1022, 70, "f762063ad2f1e721")
RAN = (300, 60, "68dd588f847db02e")


def told(trace):
    """Numbers of events and steps, and a digest of all but the numbers of the processes, which are random."""
    text = hashlib.sha256()
    for frame in (trace.events, trace.steps, trace.comms, trace.offers.drop(columns="cost_us")):
        rows = frame.assign(pid=frame["rank"]) if "pid" in frame else frame
        # Rows leave the assembler as their kernel times come: their order is not what is compared.
        lines = sorted(rows.to_csv(index=False, header=False).splitlines())
        text.update("\n".join([*rows.columns, *lines]).encode())
    return len(trace.events), len(trace.steps), text.hexdigest()[:16]


def test_the_recording_of_a_job_has_the_events_that_it_had():
    assert told(Trace.read(DATA / "recordings" / "demo")) == RECORDED


def comm(rank):
    row = np.zeros(1, COMM_DTYPE)
    row["kind"], row["comm_id"], row["rank"], row["n_ranks"], row["n_nodes"] = COMM, 7, rank, 2, 1
    return row


@pytest.mark.parametrize("tuners", [1, 3])
def test_a_run_has_the_events_that_it_had(tmp_path, folder, tuners):
    """Two ranks with kernel times that come late or not at all; by one tuner, or by three, one after the other."""
    rings = [RingFile(folder.path, rank, 100 + rank).put(comm(rank)) for rank in (0, 1)]
    rng = np.random.default_rng(7)
    for tuner in range(tuners):
        job = Job(RunFolder(folder.path))
        with TraceWriter(Path(tmp_path), {}, existing="resume", part_rows=40) as writer:
            job.begin_trace(writer)
            for n in range(30 * tuner // tuners, 30 * (tuner + 1) // tuners):
                for rank, ring in enumerate(rings):
                    rows = calls(rank, range(5 * n, 5 * n + 5), asked=0)
                    rows["step"], rows["enqueue_ns"] = n, 1000 * rows["seq"] + rank
                    late = [kernel(rank, int(seq)) for seq in rng.permutation(rows["seq"])[:3] if seq % 3]
                    ring.put(rows, *late, step(n, rank))
                job.poll()
                job.take()
            job.take(everything=tuner == tuners - 1)
        job.end_trace()
    found = told(Trace.read(tmp_path))
    assert found[:2] == RAN[:2] and (tuners > 1 or found == RAN)
