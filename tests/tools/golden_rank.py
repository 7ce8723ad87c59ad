"""One rank of a job of ``golden_nccl.py`` with a publisher of tables in the tuner's place, which forces each kind of
trial.

  golden_rank.py --kinds abba,baab --headroom 4 --out FOLDER -- python golden_job.py ...

Run on every rank. Each rank has a run folder of its own; beside rank 0 tables are published, one after the other, each
as soon as the one before has run and ended. FOLDER/calls-RANK.npz keeps every collective that the rank recorded, and
FOLDER/published.json the tables. ``--kinds`` is a list of

  abba, baab  the table and NCCL's default take turns, step by step
  few         the table holds at one call of eight
  whole       the table holds for some steps
  stay        the table stays until the next one
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import numpy as np
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.assemble import as_records
from dynamiccl.traces.names import tuned_funcs
from dynamiccl.traces.records import COLL, COLL_DTYPE, STATE, STATE_DTYPE, Decision, Rule, Table

#: Steps of a trial, one turn in so many, steps of a turn, whether the table's turn is the inner one.
SHAPES = {
    "abba": (16, 2, 1, 0),
    "baab": (16, 2, 1, 1),
    "few": (16, 8, 0, 0),
    "whole": (16, 0, 0, 0),
    "stay": (0, 0, 0, 0),
}
#: A table that has not run after so long is replaced.
PATIENCE_S = 6.0
#: How long it stays: a trial's steps may be slow.
HOLDS_S = 0.3
KEPT = ("comm_id", "func", "seq", "rank", "algo", "proto", "n_channels", "n_bytes", "generation", "step")
#: The largest number that the rules take.
ANY_SIZE = 2**40


class Publisher:
    """Publishes one table after the other."""

    def __init__(self, run, kinds, headroom, all_reduce):
        self._run, self._kinds, self._headroom = run, cycle(kinds), headroom
        self._all_reduce = all_reduce
        self.published = []
        self._at = 0.0
        self._ran_at = None

    def see(self, generations):
        """The generations of calls that were just read."""
        now = time.monotonic()
        newest = len(self.published)
        if newest and self._ran_at is None and newest in generations:
            self._ran_at = now
        is_over = self._ran_at is not None and now - self._ran_at > HOLDS_S
        if len(generations) and (not newest or is_over or now - self._at > PATIENCE_S):
            self._publish(newest + 1)
            self._at, self._ran_at = now, None

    def _publish(self, generation):
        kind = next(self._kinds)
        channels = 1 + (generation - 1) % self._headroom
        decision = Decision("ring", "simple", channels)
        rules = tuple(Rule(0, 0, func, 0, ANY_SIZE, decision) for func in tuned_funcs(self._all_reduce))
        self._run.table.publish(Table(generation, rules, *SHAPES[kind]))
        self.published.append({"generation": generation, "kind": kind, "n_channels": channels})


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--headroom", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--all-reduce", default="", help="the job's option")
    parser.add_argument("job", nargs="+")
    return parser.parse_args()


def main():
    options = parsed()
    rank = int(os.environ["RANK"])
    options.out.mkdir(parents=True, exist_ok=True)
    run = RunFolder.create()
    environment = job_env(run.path, options.headroom, options.all_reduce)
    job = subprocess.Popen(options.job, env={**os.environ, **environment})
    signal.signal(signal.SIGTERM, lambda *_: job.kill())
    told = options.kinds.split(","), options.headroom, options.all_reduce
    publisher = Publisher(run, *told) if rank == 0 else None
    calls, states = [], []

    def read():
        for ring in run.rings():
            rows = as_records(ring.drain(), COLL_DTYPE)
            found = rows[rows["kind"] == COLL]
            calls.append(found[list(KEPT)].copy())
            for state in rows[rows["kind"] == STATE].view(STATE_DTYPE):
                states.append(bytes(state["text"]).split(b"\0", 1)[0].decode(errors="replace"))
            if publisher:
                publisher.see(set(found["generation"].tolist()))

    try:
        while job.poll() is None:
            read()
            time.sleep(0.02)
        read()
    finally:
        rows = np.concatenate(calls) if calls else np.zeros(0, COLL_DTYPE)[list(KEPT)]
        np.savez_compressed(options.out / f"calls-{rank}.npz", **{name: rows[name] for name in KEPT})
        if publisher:
            told = {"tables": publisher.published, "states": list(dict.fromkeys(states))}
            (options.out / "published.json").write_text(json.dumps(told, indent=1))
        run.close()
    sys.exit(job.returncode if job.returncode >= 0 else 128 - job.returncode)


if __name__ == "__main__":
    main()
