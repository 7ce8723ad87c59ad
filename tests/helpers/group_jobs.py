"""Jobs of tests/envs/nccl/test_agreement.py that make groups, keep them, destroy them, or are far apart."""

from __future__ import annotations

import time

from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Table
from light_jobs import Found, found
from light_ranks import LightRank, Program, Publisher, run
from light_store import StoreServer


def lives(folder: RunFolder, n: int = 200) -> Found:
    """The job makes its group anew every 40 steps, so many times."""

    def program(rank: LightRank) -> None:
        for life in range(n):
            for i in range(40 * life, 40 * life + 40):
                rank.call(100 + life, 4)
                rank.step(i, 2, 0.004)
            rank.destroy(100 + life)
        _until_stopped(rank, 40 * n)

    return tries_and_stops(folder, program)


def idle_groups(folder: RunFolder, n: int = 100) -> Found:
    """Every 40 steps the job makes another group, uses it until the next comes, and keeps it."""

    def program(rank: LightRank) -> None:
        for group in range(n):
            for i in range(40 * group, 40 * group + 40):
                rank.call(100 + group, 4)
                rank.step(i, 2, 0.004)
        _until_stopped(rank, 40 * n)

    return tries_and_stops(folder, program)


def tries_and_stops(folder: RunFolder, program: Program) -> Found:
    """A daemon tries one table after the other, and takes the last back when the job asks for it.

    ``emptied``: the generation of the empty table at the end.
    """
    found_by: list[Publisher] = []

    def beside(server: StoreServer, pids: list[int]) -> None:
        daemon = Publisher(folder, server, 0.4, 15, patience_s=60)
        found_by.append(daemon)
        while "stops" not in server.values:
            time.sleep(0.01)
        daemon.alive = False
        time.sleep(0.3)
        daemon.generation += 1
        folder.table.publish(Table(daemon.generation))
        server.values["emptied"] = str(daemon.generation)

    ranks, server = run(2, program, folder, beside)
    (daemon,) = found_by
    return found(ranks, server, published=daemon.generation, emptied=daemon.generation)


def _until_stopped(rank: LightRank, steps: int) -> None:
    """Go on until the tuner's last table, the empty one, is in force, or for 400 steps."""
    if rank.rank == 0:
        rank.work.set("stops", "yes")
    for i in range(steps, steps + 400):
        if rank.work.get("ends at") == str(i).encode():
            break
        is_told = rank.rank == 0 and rank.work.get("ends at") == b"None"
        if is_told and rank.work.get("emptied") == str(rank.steps_under[-1]).encode():
            rank.work.set("ends at", str(i + 3))
        rank.step(i, 2, 0.01)


def far_apart(folder: RunFolder) -> Found:
    """1,500 calls in a step, and hosts that are a step apart, until eleven tables have had their time.

    ``asked``: all but the first, which comes before the ranks meet.
    """
    n_tables, over = 11, "over"

    def program(rank: LightRank) -> None:
        for i in range(2000):
            if rank.work.get("ends at") == str(i).encode():
                break
            if rank.rank == 0 and rank.work.check([over]) and rank.work.get("ends at") == b"None":
                rank.work.set("ends at", str(i + 3))
            time.sleep(0.5 * (rank.rank == 1 and i == 0))
            rank.call(7, 1500)
            time.sleep(0.2)
            rank.step(i, 0)

    def beside(server: StoreServer, pids: list[int]) -> None:
        daemon = Publisher(folder, server, 1.0, 3, most=n_tables)
        daemon.thread.join()
        server.values[over] = "yes"

    return found(*run(2, program, folder, beside), asked=list(range(2, n_tables + 1)))
