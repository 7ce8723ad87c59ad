"""The faults of tests/test_agreement.py, one a function: ``python agreement_jobs.py NAME`` prints what the ranks say.

A process of its own, without PyTorch, since its ranks are forked (light_ranks.py).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Decision, Lease, Rule, Table
from light_ranks import LightRank, StoreServer, descriptors, run


def table(generation: int, lease: Lease | None = None) -> Table:
    return Table(generation, (Rule(0, 0, "all_gather", 0, 2**30, Decision("ring", "ll", 1 + generation % 64)),), lease)


class Publisher:
    """A daemon that publishes a new table every ``every_s`` seconds, and beats."""

    def __init__(self, folder: RunFolder, every_s: float, lease: Lease | None = None) -> None:
        self.folder, self.every_s, self.lease = folder, every_s, lease
        self.generation = 0
        self.alive = True
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self.alive:
            self.generation += 1
            self.folder.table.publish(table(self.generation, self.lease))
            self.folder.table.beat()
            time.sleep(self.every_s)


def healthy(folder: RunFolder) -> Any:
    Publisher(folder, 0.05)
    return run(3, 120, folder)


def skips(folder: RunFolder) -> Any:
    """Rank 1 leaves out one optimizer step, under trials; a confirmed table was in force before."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        time.sleep(0.8)
        publisher = Publisher(folder, 0.05, Lease(10_000, 60_000))
        publisher.generation = 1

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 1 and i == 160):
            rank.optimizer_step()

    return run(3, 300, folder, step=step, beside=beside)


def skips_without_profiler(folder: RunFolder) -> Any:
    """The same where NCCL counts nothing for us: the tuner's questions prove the place."""

    def setup(rank: LightRank) -> None:
        rank.plugin.profiler = False

    Publisher(folder, 0.05, Lease(10_000, 60_000))

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 1 and i == 60):
            rank.optimizer_step()

    return run(2, 200, folder, step=step, setup=setup)


def local_scaler(folder: RunFolder) -> Any:
    """Rank 2's own GradScaler leaves out every seventh step."""
    Publisher(folder, 0.05, Lease(10_000, 60_000))

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 2 and i % 7 == 6):
            rank.optimizer_step()

    return run(3, 150, folder, step=step)


def uneven_collectives(folder: RunFolder) -> Any:
    """Rank 1 enqueues one collective more than the others on a communicator of theirs: seen before anything is hurt."""
    Publisher(folder, 0.05)

    def before(rank: LightRank, i: int) -> None:
        if rank.rank == 1 and i == 60:
            rank.plugin.made += 1

    return run(3, 150, folder, before, step_s=0.01)


def frozen(folder: RunFolder) -> Any:
    """Rank 1 is stopped for a while, in the midst of the switching."""
    Publisher(folder, 0.03)

    def beside(server: StoreServer, pids: list[int]) -> None:
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(float(os.environ.get("FROZEN_S", "3")))
        os.kill(pids[1], signal.SIGCONT)

    return run(3, 250, folder, beside=beside, step_s=0.01)


def late_store(folder: RunFolder) -> Any:
    """From some moment on the store takes a while for each answer; then there are new tables."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        time.sleep(1.0)
        server.late_s = 0.3
        Publisher(folder, 0.03).generation = 1

    return run(3, 200, folder, beside=beside, step_s=0.01)


def late_in_a_meeting(folder: RunFolder) -> Any:
    """The case that has a name: the store answers late from one moment to the next, while ranks stand."""
    folder.table.publish(table(1))

    def setup(rank: LightRank) -> None:
        ask = rank.store.compare_set

        def late(key: str, expected: str, desired: str) -> bytes:
            if key.startswith("log/"):
                time.sleep(0.3)
            return ask(key, expected, desired)

        rank.store.compare_set = late  # type: ignore[method-assign]

    return run(3, 150, folder, setup=setup, step_s=0.01)


def dead_daemon(folder: RunFolder) -> Any:
    """A confirmed table, then a trial, then silence."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        time.sleep(1.0)
        folder.table.publish(table(2, Lease(10_000, 400)))
        folder.table.beat()

    return run(2, 250, folder, beside=beside, step_s=0.01)


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


def leave_descriptors(n: int) -> None:
    used = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + n, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def few_descriptors(folder: RunFolder) -> Any:
    """Rank 1 has no descriptor left when its connections are to be made."""
    Publisher(folder, 0.05)

    def setup(rank: LightRank) -> None:
        if rank.rank == 1:
            leave_descriptors(0)

    return run(3, 100, folder, setup=setup, attach_s=0.6, step_s=0.02)


def few_descriptors_above(folder: RunFolder) -> Any:
    """Rank 0 can listen, but take nobody in."""
    Publisher(folder, 0.05)

    def setup(rank: LightRank) -> None:
        if rank.rank == 0:
            leave_descriptors(2)  # the bell and the listener

    return run(4, 100, folder, setup=setup, attach_s=0.6, step_s=0.02)


def breaks(folder: RunFolder) -> Any:
    """Rank 1's connections are cut three times."""
    Publisher(folder, 0.05)

    def before(rank: LightRank, i: int) -> None:
        if rank.rank == 1 and i in (40, 80, 120) and rank.agreement and rank.agreement._tree:
            for peer in list(rank.agreement._tree._by_fd.values()):
                peer.sock.shutdown(2)

    return run(3, 220, folder, before, step_s=0.01)


def refused(folder: RunFolder) -> Any:
    """The plugin of one rank refuses a table: nobody gets it."""
    Publisher(folder, 0.05)

    def before(rank: LightRank, i: int) -> None:
        rank.plugin.refuses = rank.rank == 1 and i > 60

    return run(2, 150, folder, before, step_s=0.01)


def main() -> None:
    folder = RunFolder.create()
    try:
        said, server = globals()[sys.argv[1]](folder)
    finally:
        folder.close()
    print(json.dumps({"ranks": said, "requests": server.requests}))


if __name__ == "__main__":
    main()
