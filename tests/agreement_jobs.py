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

from dynamiccl.envs.nccl import agreement as agreements
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.tree import Tree
from dynamiccl.traces.records import Decision, Lease, Rule, Table
from light_ranks import LightRank, descriptors, run
from light_store import StoreServer


def table(generation: int, lease: Lease | None = None) -> Table:
    return Table(generation, (Rule(0, 0, "all_gather", 0, 2**30, Decision("ring", "ll", 1 + generation % 64)),), lease)


class Publisher:
    """A daemon that publishes a new table every ``every_s`` seconds, and beats."""

    def __init__(self, folder: RunFolder, every_s: float, lease: Lease | None = None, generation: int = 0) -> None:
        self.folder, self.every_s, self.lease, self.generation = folder, every_s, lease, generation
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
        server.until_in_force(1)
        Publisher(folder, 0.05, Lease(10_000, 60_000), generation=1)

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if not (rank.rank == 1 and i == 160):
            rank.optimizer_step()

    return run(3, 10_000, folder, step=step, beside=beside, until_stopped=True)


def skips_without_profiler(folder: RunFolder) -> Any:
    """The same where NCCL counts nothing for us: the tuner's questions prove the place."""

    def setup(rank: LightRank) -> None:
        rank.plugin.profiler = False

    Publisher(folder, 0.05, Lease(10_000, 60_000))
    left_out: list[int] = []

    def step(rank: LightRank, i: int) -> None:
        rank.backward()
        rank.collective(i)
        time.sleep(0.01)
        if rank.rank == 1 and i >= 60 and not left_out and any(rank.generations):
            left_out.append(i)
        else:
            rank.optimizer_step()

    return run(2, 10_000, folder, step=step, setup=setup, until_stopped=True)


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


def late_store(folder: RunFolder) -> Any:
    """From some moment on the store takes a while for each answer; then there are new tables."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        server.until_in_force(1)
        server.late_s = 0.3
        Publisher(folder, 0.03, generation=1)

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
        server.until_in_force(1)
        folder.table.publish(table(2, Lease(10_000, 400)))
        folder.table.beat()
        server.until_in_force(2)
        server.until_in_force(1)
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
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        server.until_in_force(1)
        folder.table.publish(table(2, Lease(10_000, 300)))
        folder.table.beat()
        server.until_in_force(2)
        server.until_in_force(1)
        folder.table.publish(table(3))
        server.until_in_force(3)
        server.enough()

    return run(2, 10_000, folder, beside=beside, step_s=0.01, until_stopped=True)


def probe_off(folder: RunFolder) -> Any:
    """The probe of rank 1 breaks while a trial is in force; the rank trains on."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        server.until_in_force(1)
        folder.table.publish(table(2, Lease(10_000, 600_000)))
        folder.table.beat()
        server.until_in_force(2)
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
        server.until_in_force(1)
        folder.table.publish(table(2, Lease(10_000, 600)))
        folder.table.beat()
        server.until_in_force(2)
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
    """Rank 1's connections are cut three times, each time after some steps of an open network."""
    Publisher(folder, 0.05)

    def beside(server: StoreServer, pids: list[int]) -> None:
        while server.values.get("cuts") != "3":
            time.sleep(0.01)
        generation = int(server.values["in force"])
        while int(server.values["in force"]) < generation + 5:
            time.sleep(0.01)
        server.enough()

    def before(rank: LightRank, i: int) -> None:
        cuts = rank.more.setdefault("cuts", [0])
        peers = list(rank.agreement._tree._by_fd.values()) if rank.agreement and rank.agreement._tree else []
        if rank.rank == 1 and len(cuts) <= 3 and i >= cuts[-1] + 30 and peers:
            cuts.append(i)
            for peer in peers:
                peer.sock.shutdown(2)
            rank.work.set("cuts", str(len(cuts) - 1))

    return run(3, 10_000, folder, before, beside=beside, step_s=0.01, until_stopped=True)


def away(folder: RunFolder) -> Any:
    """The network among the ranks is away for longer than the gate waits, in a trial; collectives go on over theirs."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        server.until_in_force(1)
        folder.table.publish(table(2, Lease(10_000, 300)))
        folder.table.beat()
        server.until_in_force(2)
        server.values["cut"] = "now"
        time.sleep(2.5)
        server.values["cut"] = "mended"
        server.until_in_force(1)
        server.enough()

    def before(rank: LightRank, i: int) -> None:
        word = rank.work.get("cut") if rank.agreement is not None else b""
        if word == b"now" and "cut" not in rank.more:
            rank.more["cut"], agreements.ATTACH_S = i, 0.4
            Tree.open = no_route  # type: ignore[method-assign]
            for peer in list(rank.agreement._tree._by_fd.values() if rank.agreement and rank.agreement._tree else ()):
                peer.sock.shutdown(2)
        elif word == b"mended" and rank.more.get("mended") is None:
            rank.more["mended"], agreements.ATTACH_S = i, 20.0
            Tree.open = OPEN  # type: ignore[method-assign]

    return run(3, 10_000, folder, before, beside=beside, step_s=0.02, until_stopped=True)


OPEN = Tree.open


def no_route(tree: Tree, limit_s: float) -> None:
    raise OSError("No route to host")


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
