"""Ranks of a job without PyTorch, by the hundred: the real agreement and the real plugin, called as NCCL calls it.

Each rank is a forked process. Its host runs ahead of its GPU as in training: a collective is enqueued at once, and only
``AHEAD`` steps later does the host wait until all ranks have come as far (by a meeting at the stand-in store). Which
table answered each collective of each communicator is noted: a table's channels say which one it is.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dynamiccl.envs.nccl.agreement.agreement import Agreement
from dynamiccl.envs.nccl.agreement.mailbox import TableMailbox
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.rings import Ring
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.steps.steps import Steps
from dynamiccl.traces.records import Decision, Rule, Table
from light_store import Store, StoreServer
from nccl_releases import Communicator

AHEAD = 1  # steps that a host may be ahead of the slowest rank's
N_BYTES = 1 << 20


def table(generation: int, trial_steps: int = 0) -> Table:
    """A table that is known by its channels."""
    row = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "ll", 1 + generation % 63))
    return Table(generation, (row,), trial_steps)


class LightRank:
    """One rank, in its own process."""

    def __init__(self, rank: int, n_ranks: int, port: int, folder: Path) -> None:
        self.rank, self.n_ranks, self.port = rank, n_ranks, port
        self.plugin = Plugin.load()
        self.plugin.open()
        self.steps = Steps(lambda: self.plugin.asked())
        self.work = Store(port)
        self.random = random.Random(rank)
        self.said: list[tuple[int | None, str]] = []
        self.answers: dict[int, list[int]] = defaultdict(list)  # channels by collective, by communicator
        self.steps_under: list[int] = []  # generation of each step, as the probe tells the tuner
        self.more: dict[str, Any] = {}
        self.agreement: Agreement | None = None
        self._comms: dict[int, Communicator] = {}
        self._mailbox = TableMailbox(folder / "table")
        self._optimizer = type("Optimizer", (), {})()
        self._folder = folder

    def attach(self, version: str = "") -> None:
        """As at the first step."""
        make, said = (
            (lambda: Store(self.port)),
            (lambda state, why, generation: self.said.append((state, str(why or "")))),
        )
        size = self.rank, self.n_ranks
        self.agreement = Agreement(*size, self.plugin, self.steps, self._mailbox, make, version, said)

    def comm(
        self, comm: int, n_ranks: int = 0, release: str = "2.29.7", with_profiler: bool = True
    ) -> Communicator:
        """The communicator of this id, made when it is first used."""
        if comm not in self._comms:
            size = n_ranks or self.n_ranks
            make = {"release": release, "with_profiler": with_profiler}
            self._comms[comm] = Communicator(self.plugin.path, comm, size, 1, self.rank % size, **make)
        return self._comms[comm]

    def destroy(self, comm: int) -> None:
        """The job lets go of that communicator."""
        self._comms.pop(comm).finalize()

    def call(self, comm: int = 7, n: int = 1, n_bytes: int = N_BYTES) -> None:
        """Enqueue so many all_gathers."""
        communicator = self.comm(comm)
        for _ in range(n):
            cost = np.full((7, 3), -1, np.float32)
            cost[1] = 20, 15, 10
            channels = communicator.get_coll_info("all_gather", n_bytes, cost)
            seq = len(self.answers[comm])
            self.answers[comm].append(channels)
            handle = communicator.start_coll(
                "all_gather", seq, n_bytes // self.n_ranks, "int8", 4, 8, "ring", "ll"
            )
            communicator.stop(handle)

    def step(self, i: int, calls: int = 4, late_s: float = 0.0) -> None:
        """One step of training: work on the host, collectives, an optimizer step."""
        self.steps.begun()
        for _ in range(calls):
            time.sleep(late_s / calls)
            self.call()
        if i >= AHEAD:
            self.work.meet(f"step {i - AHEAD}", self.n_ranks)
        self.ends()

    def ends(self) -> None:
        """An optimizer step, as the probe sees it."""
        if self.steps.stepped(self._optimizer):
            if self.agreement is None:
                self.attach()
            self.steps_under.append(self.plugin.ended().generation)
            if self.rank == 0:
                self.work.set("in force", str(self.steps_under[-1]))

    def result(self) -> dict[str, Any]:
        """What this rank says at its end."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        agreement = self.agreement
        return {
            "rank": self.rank,
            "answers": {str(comm): found for comm, found in self.answers.items()},
            "steps_under": self.steps_under,
            "said": self.said,
            "stopped": str(agreement.stopped or "") if agreement else None,
            "waited_ms": Ring.of_this_process(self._folder).waited_ns() / 1e6,
            "cpu_s": used.ru_utime + used.ru_stime,
            "rounds": agreement._leader.number if agreement and agreement._leader else 0,
            "round_s": list(agreement._pace._round_s) if agreement else [],
            **self.more,
        }


class Publisher:
    """A daemon that tries one table after the other: when one has been in force for some steps, or has not come.

    ``patience_s``: for how long it waits for a table, as the tuner does for as long as the job runs; by default some
    five times as long as a table is in force. ``most``: so many tables, or as many as come while it lives.
    """

    def __init__(
        self,
        folder: RunFolder,
        server: StoreServer,
        every_s: float,
        trial_steps: int = 0,
        patience_s: float = 0.0,
        most: int = sys.maxsize,
    ) -> None:
        self.generation, self.alive = 0, True
        self.published: dict[int, float] = {}  # when, by generation
        self.in_force: dict[int, float] = {}
        self._folder, self._server, self._every_s, self._trial_steps = folder, server, every_s, trial_steps
        self._patience_s, self._most = patience_s or max(1.0, 5 * every_s), most
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.alive and self.generation < self._most:
            self.generation += 1
            self._folder.table.publish(table(self.generation, self._trial_steps))
            self.published[self.generation] = time.monotonic()
            # A first trial may come and go between two steps, when nobody knows yet how many calls a step has.
            until = time.monotonic() + self._patience_s
            while self.alive and time.monotonic() < until:
                if self._server.values.get("in force") == str(self.generation):
                    self.in_force[self.generation] = time.monotonic()
                    time.sleep(self._every_s)
                    break
                time.sleep(0.002)


Program = Callable[[LightRank], None]


def run(
    n_ranks: int,
    program: Program,
    folder: RunFolder,
    beside: Callable[[StoreServer, list[int]], None] = lambda server, pids: None,
    attach_s: float = 20.0,
) -> tuple[list[dict[str, Any]], StoreServer]:
    """Run ``program`` on all ranks; what each says at its end ({} if it died), and the store's server.

    ``beside`` runs in this process while the job does.
    """
    server = StoreServer()
    os.environ["DYNAMICCL_RUN"] = str(folder.path)
    pids, pipes = [], []
    for rank in range(n_ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.environ["DYNAMICCL_ATTACH_S"] = str(attach_s)
                light = LightRank(rank, n_ranks, server.port, folder.path)
                program(light)
                with os.fdopen(write, "w") as file:
                    json.dump(light.result(), file)
                if light.agreement:
                    light.agreement.close()
                    light.agreement.join()
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    beside(server, pids)
    said = []
    for pid, pipe in zip(pids, pipes, strict=True):
        with os.fdopen(pipe) as file:
            text = file.read()
        os.waitpid(pid, 0)
        said.append(json.loads(text) if text else {})
    return said, server


def splits(ranks: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(collectives that two ranks ran under different tables, collectives that could be compared)."""
    split = compared = 0
    for comm in {comm for rank in ranks for comm in rank.get("answers", {})}:
        found = [rank["answers"][comm] for rank in ranks if comm in rank.get("answers", {})]
        for answers in zip(*found, strict=False):
            compared += 1
            split += len(set(answers)) > 1
    return split, compared
