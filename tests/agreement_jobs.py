"""The faults of tests/test_agreement.py, one a function: ``python agreement_jobs.py NAME`` prints what the ranks say.

A process of its own, without PyTorch, since its ranks are forked (light_ranks.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import agreement_network
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Lease
from light_daemon import Publisher, table, try_one
from light_ranks import LightRank, run
from light_store import StoreServer


def healthy(folder: RunFolder) -> Any:
    Publisher(folder, 0.05)
    return run(3, 120, folder)


def skips(folder: RunFolder) -> Any:
    """Rank 1 leaves out one optimizer step, under trials; a confirmed table was in force before."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        server.until_in_force(1)
        Publisher(folder, 0.05, Lease(10_000, 60_000), generation=1)

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 1 and i == 160):
            rank.optimizer_step()

    return run(3, 10_000, folder, step=step, beside=beside, until_stopped=True)


def own_model(folder: RunFolder) -> Any:
    """Rank 0 trains a small model of its own: before the job does, beside each of its steps, and a hundred in a row."""
    Publisher(folder, 0.05)
    own = type("Optimizer", (), {})()

    def trains_its_own(rank: LightRank, steps: int) -> None:
        for _ in range((rank.rank == 0) * steps):
            rank.backward()
            rank.optimizer_step(own)

    def step(rank: LightRank, i: int) -> None:
        trains_its_own(rank, 40 if i == 0 else 0)
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        rank.optimizer_step()
        trains_its_own(rank, 100 if i == 60 else 1)

    return run(3, 120, folder, step=step)


def own_passes(folder: RunFolder) -> Any:
    """Rank 0 makes backward passes of its own, which no step follows: nobody can tell them from the job's."""
    Publisher(folder, 0.05, Lease(10_000, 60_000))

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        if rank.rank == 0:
            rank.backward()
        rank.collective(i)
        time.sleep(0.08)  # rank 0 would be at a place by backward passes when the others are half way to it
        rank.optimizer_step()

    return run(2, 10_000, folder, step=step, until_stopped=True)


def uncounted(folder: RunFolder) -> Any:
    """NCCL asks our tuner on rank 1 and tells our profiler there of nothing."""

    def setup(rank: LightRank) -> None:
        rank.plugin.profiler = rank.rank != 1

    Publisher(folder, 0.05, Lease(10_000, 60_000))
    return run(3, 10_000, folder, setup=setup, until_stopped=True)


def local_scaler(folder: RunFolder) -> Any:
    """Rank 2's own GradScaler leaves out every seventh step, from the first table on."""
    Publisher(folder, 0.05, Lease(10_000, 60_000))

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 2 and i % 7 == 6 and any(rank.generations)):
            rank.optimizer_step()

    return run(3, 10_000, folder, step=step, until_stopped=True)


def uneven_collectives(folder: RunFolder) -> Any:
    """Rank 1 enqueues one collective more than the others on a communicator of theirs: seen before anything is hurt."""
    Publisher(folder, 0.05)

    def before(rank: LightRank, i: int) -> None:
        if rank.rank == 1 and i == 60:
            rank.plugin.made += 1

    return run(3, 10_000, folder, before, step_s=0.01, until_stopped=True)


def frozen(folder: RunFolder) -> Any:
    """Rank 1 is stopped for a while, in the midst of the switching."""
    Publisher(folder, 0.03)

    def beside(server: StoreServer, pids: list[int]) -> None:
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(float(os.environ.get("FROZEN_S", "3")))
        os.kill(pids[1], signal.SIGCONT)

    return run(3, 250, folder, beside=beside, step_s=0.01)


def dead_daemon(folder: RunFolder, then: tuple[int, ...] = ()) -> Any:
    """A confirmed table, then a trial, then silence; ``then`` the generations that another daemon confirms."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        try_one(folder, server, 400)
        server.until_in_force(1)
        for generation in then:
            folder.table.publish(table(generation))
            server.until_in_force(generation)
        server.enough()

    return run(2, 10_000, folder, beside=beside, step_s=0.01, until_stopped=True)


def forgotten_trial(folder: RunFolder) -> Any:
    """The daemon lives, but nothing follows its trial of twenty steps."""

    def beside(server: StoreServer, pids: list[int]) -> None:
        folder.table.publish(table(1, Lease(20, 60_000)))
        while folder.table.heartbeat_ns() or True:
            folder.table.beat()
            time.sleep(0.05)
            if not os.path.exists(f"/proc/{pids[0]}/fd") or _ended(pids):
                return

    return run(2, 150, folder, beside=beside, step_s=0.01)


def _ended(pids: list[int]) -> bool:
    with open(f"/proc/{pids[0]}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def versions_differ(folder: RunFolder) -> Any:
    Publisher(folder, 0.05)

    def setup(rank: LightRank) -> None:
        rank.plugin.version = "2" if rank.rank == 2 else "1"

    return run(3, 60, folder, setup=setup)


def no_tuner(folder: RunFolder) -> Any:
    Publisher(folder, 0.05)

    def setup(rank: LightRank) -> None:
        rank.plugin.tuners = int(rank.rank != 1)

    return run(3, 100, folder, setup=setup, attach_s=0.6, step_s=0.02)


def _dies(folder: RunFolder, victim: int) -> Any:
    """A rank is gone in mid-step, when places are appointed and others may stand at them.

    What would hold the others up without us too, their next collective, is left out from then on.
    """
    Publisher(folder, 0.02)
    last = 120

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        if i < last:
            rank.collective(i)
        elif rank.rank == victim:
            os._exit(0)
        time.sleep(0.005)
        rank.optimizer_step()

    return run(3, last + 60, folder, step=step, survivors=2)


def rank_0_dies(folder: RunFolder) -> Any:
    return _dies(folder, 0)


def another_rank_dies(folder: RunFolder) -> Any:
    return _dies(folder, 1)


def comes_back(folder: RunFolder) -> Any:
    """A daemon dies in a trial; one that takes its place confirms another table."""
    return dead_daemon(folder, (3,))


def probe_off(folder: RunFolder) -> Any:
    """The probe of rank 1 breaks while a trial is in force; the rank trains on."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        try_one(folder, server, 600_000)
        server.values["break"] = "now"

    def before(rank: LightRank, i: int) -> None:
        if rank.rank == 1 and "left" not in rank.more and rank.work.get("break") == b"now":
            rank.more["left"] = i
            assert rank.agreement is not None
            rank.agreement.leave("rank 1: probe off: RuntimeError: seeded")

    return run(3, 10_000, folder, before, beside=beside, step_s=0.01, until_stopped=True)


def steps_no_more(folder: RunFolder) -> Any:
    """Rank 1 takes no optimizer step any more while a trial is in force; passes and collectives go on."""
    folder.table.publish(table(1))
    stops: list[int] = []

    def beside(server: StoreServer, pids: list[int]) -> None:
        try_one(folder, server, 600)
        server.values["stop"] = "now"
        time.sleep(1)
        steps = len(server.values)  # each leaves its mark
        while len(server.values) < steps + 250:
            time.sleep(0.01)
        server.enough()

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.005)
        if rank.rank == 1 and not stops and rank.work.get("stop") == b"now":
            stops.append(i)
        if not stops:
            rank.optimizer_step()

    return run(3, 10_000, folder, step=step, beside=beside, until_stopped=True)


def interrupted(folder: RunFolder) -> Any:
    """Rank 1 is interrupted from the keyboard in each of its meetings, and trains on."""
    Publisher(folder, 0.05)

    def setup(rank: LightRank) -> None:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        rank.interrupts, rank.more["interrupts"] = rank.rank == 1, 0

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.005)
        try:
            rank.optimizer_step()
        except KeyboardInterrupt:
            rank.more["interrupts"] += 1

    return run(2, 150, folder, step=step, setup=setup)


def refused(folder: RunFolder) -> Any:
    """The plugin of one rank refuses a table: nobody gets it."""
    Publisher(folder, 0.05)

    def before(rank: LightRank, i: int) -> None:
        rank.plugin.refuses = rank.rank == 1 and i > 60

    return run(2, 150, folder, before, step_s=0.01)


def main() -> None:
    folder = RunFolder.create()
    try:
        said, server = {**vars(agreement_network), **globals()}[sys.argv[1]](folder)
    finally:
        folder.close()
    print(json.dumps({"ranks": said, "requests": server.requests}))


if __name__ == "__main__":
    main()
