"""What the agreement's jobs have for a daemon."""

from __future__ import annotations

import threading
import time

from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Decision, Lease, Rule, Table
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


def try_one(folder: RunFolder, server: StoreServer, lease_ms: int) -> None:
    """With generation 1 in force, a trial of generation 2; returns when that is in force. Nobody beats after it."""
    server.until_in_force(1)
    folder.table.publish(table(2, Lease(10_000, lease_ms)))
    folder.table.beat()
    server.until_in_force(2)
