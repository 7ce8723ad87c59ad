"""Ranks of a job without PyTorch, by the hundred: the real agreement, over a store and a plugin that stand in.

Each rank is a forked process that steps through a program: a backward pass, a collective in which all ranks meet (over
the stand-in store's server, as training meets over NCCL), an optimizer step. ``run`` starts them and gathers what they
say; scenarios are functions that a rank calls before each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement import rounds
from dynamiccl.envs.nccl.agreement.agreement import Agreement
from dynamiccl.envs.nccl.agreement.published import TableMailbox
from dynamiccl.envs.nccl.shm import decode_table
from dynamiccl.envs.nccl.steps.steps import Steps
from dynamiccl.traces.records import AgreementState
from light_store import Store, StoreServer


class StandIn:
    """What the agreement asks of the plugin."""

    def __init__(self) -> None:
        self.tuners, self.asked, self.made = 1, 0, 0
        self.generation, self.staged = 0, 0
        self.profiler, self.version = True, "1"
        self.refuses = False

    def stage(self, message: bytes) -> int:
        if self.refuses:
            raise ValueError("the plugin refuses the table")
        self.staged = decode_table(message).generation
        return self.staged

    def counts(self) -> dict[int, int]:
        return {7: self.made} if self.profiler else {}

    @property
    def untold(self) -> bool:
        return not self.profiler and self.asked > 0

    def identity(self) -> str:
        return f"plugin {self.version}"


class LightRank:
    """One rank, in its own process."""

    def __init__(self, rank: int, n_ranks: int, port: int, run: str) -> None:
        self.rank, self.n_ranks = rank, n_ranks
        self.plugin = StandIn()
        self.steps = Steps(lambda: self.plugin.asked)
        self.store, self.work = Store(port), Store(port)
        self.said: list[tuple[int | None, str]] = []
        self.began = self.open_s = 0.0
        self.more: dict[str, Any] = {}  # that this rank is to say
        self.generations: list[int] = []  # of each collective
        self.agreement: Agreement | None = None
        self.ended = self.interrupts = False
        self.meetings: list[dict[str, float]] = []
        self._optimizer = type("Optimizer", (), {})()
        self._published = TableMailbox(Path(run) / "table")

    def attach(self) -> None:
        """As at the first boundary."""
        self.began = time.monotonic()
        self.agreement = Agreement(
            self.rank,
            self.n_ranks,
            self.plugin,  # type: ignore[arg-type]
            self.steps,
            self._published,
            lambda: (self.store, "127.0.0.1"),
            tell=self.tell,
        )
        self._watch_meetings(self.agreement)

    def _watch_meetings(self, agreement: Agreement) -> None:
        """Of each meeting: how long the training thread stood, and what of it the protocol is not to blame for."""
        meet, ask = agreement._meet, agreement.store.log
        asked_s = [0.0]

        def asks(attempt: int, word: str) -> str:
            began = time.monotonic()
            try:
                return ask(attempt, word)
            finally:
                asked_s[0] += time.monotonic() - began

        def meets(began: float) -> bool:
            asked_s[0], before = 0.0, _kept_off()
            if self.interrupts:
                signal.setitimer(signal.ITIMER_REAL, 0.001)  # when it stands, and has said so
            try:
                return meet(began)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                stood = time.monotonic() - began
                ms = {"stood": stood, "store": asked_s[0], "off": _kept_off_since(before)}
                self.meetings.append({name: 1e3 * value for name, value in ms.items()})

        agreement._meet, agreement.store.log = meets, asks  # type: ignore[method-assign]

    def tell(self, state: int | None, text: str) -> None:
        """The agreement's word."""
        self.said.append((state, text))
        if state == AgreementState.OPEN and not self.open_s:
            self.open_s = time.monotonic() - self.began
            self.store._ask("opened")

    def collective(self, i: int) -> None:
        """Runs under the table in force; ends when all ranks have come."""
        self.plugin.made += 1
        self.plugin.asked += 1
        if self.rank == 0 and self.plugin.generation != (self.generations or [0])[-1]:
            self.work.set("in force", str(self.plugin.generation))
        self.generations.append(self.plugin.generation)
        self.work.meet(f"collective {i}", self.n_ranks)

    def sees_the_end(self, i: int) -> bool:
        """Whether the agreement has ended for some while, or `enough` was said; asked on all ranks in the same step."""
        if self.rank == 0 and self.agreement is not None and self.agreement.stopped:
            if self.ended:
                self.work.set(f"over {i}", "yes")
            self.ended = True
        if self.rank == 0 and self.work.get("enough") == b"yes":
            self.work.set(f"over {i}", "yes")
        self.work.meet(f"over {i}?", self.n_ranks)
        return self.work.get(f"over {i}") == b"yes"

    def backward(self) -> None:
        self.steps.begun()

    def optimizer_step(self, optimizer: Any = None) -> None:
        if not self.steps.stepped(optimizer or self._optimizer):
            return
        if self.agreement is None:
            self.attach()
        assert self.agreement is not None
        try:
            if self.agreement.boundary():
                self.plugin.generation = self.plugin.staged
        finally:
            self.agreement.proceed()


def _kept_off() -> dict[str, float]:
    """Seconds so far in which each thread of this process could have run and was not let, and that a host took away."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/schedstat") as file:
            found[thread] = int(file.read().split()[1]) / 1e9
    with open("/proc/stat") as file:
        found["stolen"] = int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    return found


def _kept_off_since(before: dict[str, float]) -> float:
    """The machine's doing, not ours: threads wait for one another, so all of them count."""
    return sum(max(0.0, value - before.get(name, value)) for name, value in _kept_off().items())


Scenario = Callable[[LightRank, int], None]


def run(
    n_ranks: int,
    n_steps: int,
    folder: Any,
    before_step: Scenario | None = None,
    *,
    setup: Callable[[LightRank], None] = lambda rank: None,
    step: Callable[[LightRank, int], None] | None = None,
    beside: Callable[[StoreServer, list[int]], None] = lambda server, pids: None,
    step_s: float = 0.005,
    attach_s: float = 20.0,
    meet_ms: float = 50.0,
    prompt_s: float = rounds.PROMPT_S,
    survivors: int | None = None,
    until_stopped: bool = False,
) -> tuple[list[dict[str, Any]], StoreServer]:
    """Run the job; what each rank says at its end ({} if it died), and the store's server.

    ``beside`` runs in this process while the job does; ``survivors`` are the ranks that come to the end.
    ``until_stopped`` ends it some steps after the agreement, however long that takes on this machine.
    """
    server = StoreServer()
    pids, pipes = [], []
    for rank in range(n_ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(read)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                agreements.ATTACH_S, agreements.MEET_S, rounds.PROMPT_S = attach_s, meet_ms / 1e3, prompt_s
                said = _rank(
                    LightRank(rank, n_ranks, server.port, str(folder.path)),
                    *(n_steps, before_step, setup, step, step_s, survivors or n_ranks, until_stopped),
                )
                os.write(write, json.dumps(said).encode())
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


def descriptors() -> int:
    """That this process has open; lifts its limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return len(os.listdir("/proc/self/fd")) - 1


def _rank(
    rank: LightRank,
    n_steps: int,
    before: Scenario | None,
    setup: Any,
    step: Any,
    step_s: float,
    at_the_end: int,
    until: bool,
) -> dict[str, Any]:
    before_us = descriptors()
    setup(rank)
    began = time.monotonic()
    for i in range(n_steps):
        if before is not None:
            before(rank, i)
        if step is not None:
            step(rank, i)
        else:
            rank.backward()
            rank.collective(i)
            time.sleep(step_s)
            rank.optimizer_step()
        if until and i % 20 == 19 and rank.sees_the_end(i):
            break
    agreement = rank.agreement
    used = resource.getrusage(resource.RUSAGE_SELF)
    said = {
        "rank": rank.rank,
        "generations": rank.generations,
        "held_ms": 1e3 * agreement.held_s if agreement else 0.0,
        "meetings": rank.meetings,
        "stopped": agreement.stopped if agreement else None,
        "said": rank.said,
        "descriptors": descriptors(),
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - began,
        "open_s": rank.open_s,
        "descriptors_before": before_us,
        **rank.more,
    }
    rank.work.meet("the end", at_the_end)
    if agreement:
        agreement.close()
        agreement.join()
    return said
