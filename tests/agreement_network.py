"""Faults of the network and the store, for agreement_jobs.py, which runs them."""

from __future__ import annotations

import contextlib
import resource
import time
from typing import Any

from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement.tree import Tree
from dynamiccl.envs.nccl.shm import RunFolder
from light_daemon import Publisher, table, try_one
from light_ranks import LightRank, descriptors, run
from light_store import StoreServer


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
            if "/log/" in key:
                time.sleep(0.3)
            return ask(key, expected, desired)

        rank.store.compare_set = late  # type: ignore[method-assign]

    return run(3, 150, folder, setup=setup, step_s=0.01)


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


def peers_of(rank: LightRank) -> list[Any]:
    """Those that a rank is connected to. Another rank's cut may end the tree at any moment."""
    tree = rank.agreement._tree if rank.agreement else None
    return list(tree._by_fd.values()) if tree else []


def cut(peers: list[Any]) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):  # closed meanwhile
            peer.sock.shutdown(2)


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
        peers = peers_of(rank)
        if rank.rank == 1 and len(cuts) <= 3 and i >= cuts[-1] + 30 and peers:
            cuts.append(i)
            cut(peers)
            rank.work.set("cuts", str(len(cuts) - 1))

    return run(3, 10_000, folder, before, beside=beside, step_s=0.01, until_stopped=True)


def away(folder: RunFolder) -> Any:
    """The network among the ranks is away for longer than the gate waits, in a trial; collectives go on over theirs."""
    folder.table.publish(table(1))

    def beside(server: StoreServer, pids: list[int]) -> None:
        try_one(folder, server, 300)
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
            cut(peers_of(rank))
        elif word == b"mended" and rank.more.get("mended") is None:
            rank.more["mended"], agreements.ATTACH_S = i, 20.0
            Tree.open = OPEN  # type: ignore[method-assign]

    return run(3, 10_000, folder, before, beside=beside, step_s=0.02, until_stopped=True)


OPEN = Tree.open


def no_route(tree: Tree, limit_s: float) -> None:
    raise OSError("No route to host")
