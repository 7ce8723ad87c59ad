"""The jobs of tests/envs/nccl/test_agreement.py, one a function: ``python agreement_jobs.py NAME`` prints what
the ranks say.

A process of its own, without PyTorch, since its ranks are forked (light_ranks.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from dynamiccl.envs.nccl.agreement import agreement
from dynamiccl.envs.nccl.agreement.protocol import Decision
from dynamiccl.envs.nccl.run_folder import PLANS
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Table
from group_jobs import far_apart, idle_groups, lives
from light_jobs import Found, found, tries
from light_ranks import LightRank, Publisher, run, table
from light_store import StoreServer

__all__ = ["far_apart", "idle_groups", "lives"]  # jobs, too


def healthy(folder: RunFolder) -> Found:
    def program(rank: LightRank) -> None:
        for i in range(150):
            rank.step(i, 4, 0.01)

    return tries(folder, 3, program)


def hosts_apart(folder: RunFolder) -> Found:
    """Two ranks; the host of each is late by up to a whole step of half a second, at random, in each step."""

    def program(rank: LightRank) -> None:
        for i in range(100):
            rank.step(i, 8, rank.random.uniform(0, 0.5))

    return tries(folder, 2, program, trial_steps=20, every_s=1.0)


def many_hosts_apart(folder: RunFolder) -> Found:
    """64 ranks, steps of a second, each rank late by 0 to 300 ms."""

    def program(rank: LightRank) -> None:
        for i in range(45):
            rank.step(i, 4, 0.7 + rank.random.uniform(0, 0.3))

    return tries(folder, 64, program, trial_steps=20, every_s=1.0)


def evaluation(folder: RunFolder) -> Found:
    """A trial is in force when all ranks go into a long evaluation; its tuner is dead."""

    def program(rank: LightRank) -> None:
        for i in range(600):
            if rank.rank == 0 and rank.steps_under[-1:] == [2] and rank.work.get("ends at") == b"None":
                rank.work.set("ends at", str(i + 3))
            if rank.work.get("ends at") == str(i).encode():
                break
            rank.step(i, 4, 0.01)
        rank.work.meet("evaluates", rank.n_ranks)
        rank.more["evaluates_from"] = len(rank.answers[7])
        rank.call(7, 600)

    def beside(server: StoreServer, pids: list[int]) -> None:
        folder.table.publish(table(1))
        _until(server, "1")
        folder.table.publish(table(2, 25))

    return found(*run(2, program, folder, beside))


def _until(server: StoreServer, generation: str, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while server.values.get("in force") != generation:
        if time.monotonic() > end:
            raise TimeoutError(f"generation {generation} never came into force")
        time.sleep(0.005)


def one_without_a_tuner(folder: RunFolder) -> Found:
    """Rank 2 has no agreement; communicator 7 has all three ranks, 8 the first two."""

    def program(rank: LightRank) -> None:
        for i in range(100):
            if rank.rank < 2:
                rank.comm(8, 2)
                rank.call(8, 3)
                rank.step(i, 3, 0.01)
            else:
                rank.call(7, 3)
                time.sleep(0.01)
                if i >= 1:
                    rank.work.meet(f"step {i - 1}", 3)

    return tries(folder, 3, program, attach_s=0.5)


def two_groups(folder: RunFolder) -> Found:
    """Rank 1 is in two communicators with other members each."""

    def program(rank: LightRank) -> None:
        for i in range(120):
            if rank.rank < 2:
                rank.comm(8, 2)
                rank.call(8, 2)
            if rank.rank > 0:
                rank.comm(9, 2)
                rank.call(9, 5)
            rank.step(i, 2, rank.random.uniform(0, 0.02))

    return tries(folder, 3, program)


def uneven_collectives(folder: RunFolder) -> Found:
    """Rank 1 enqueues other collectives on communicator 8: NCCL would hang sooner or later."""

    def program(rank: LightRank) -> None:
        for i in range(500):
            rank.call(8, 2, 1 << (21 if rank.rank == 1 and i == 40 else 20))
            rank.step(i, 4, 0.01)

    return tries(folder, 2, program)


def no_profiler(folder: RunFolder) -> Found:
    """NCCL asks our tuner on rank 1 and tells our profiler there of nothing."""

    def program(rank: LightRank) -> None:
        rank.comm(7, with_profiler=rank.rank != 1)
        for i in range(80):
            rank.step(i, 4, 0.01)

    return tries(folder, 2, program, attach_s=0.5)


def versions_differ(folder: RunFolder) -> Found:
    def program(rank: LightRank) -> None:
        rank.call(7, 4)
        rank.attach(version=f"NCCL 2.2{rank.rank}")
        for i in range(80):
            rank.step(i, 4, 0.01)

    return tries(folder, 2, program, attach_s=0.5)


def late_communicator(folder: RunFolder) -> Found:
    """A communicator that is made when a table is there to stay has that table too."""

    def program(rank: LightRank) -> None:
        for i in range(200):
            if i >= 60:
                rank.comm(8)
                rank.call(8, 4)
            rank.step(i, 4, 0.01)

    def beside(server: StoreServer, pids: list[int]) -> None:
        folder.table.publish(table(1))

    return found(*run(2, program, folder, beside))


def late_rank(folder: RunFolder) -> Found:
    """Rank 1 takes its first step seconds after the others."""

    def program(rank: LightRank) -> None:
        for i in range(300):  # on a busy machine a table takes 60 steps
            if rank.rank == 1 and i < 60:
                rank.call(7, 4)
                rank.work.meet(f"step {i - 1}", 2) if i >= 1 else None
                time.sleep(0.01)
            else:
                rank.step(i, 4, 0.01)

    return tries(folder, 2, program)


def store_late(folder: RunFolder) -> Found:
    """From some moment on the store takes 0.2 s for each answer."""

    def program(rank: LightRank) -> None:
        for i in range(150):
            rank.step(i, 4, 0.02)

    def beside(server: StoreServer, pids: list[int]) -> None:
        _until(server, "2")
        server.late_s = 0.2

    return tries(folder, 2, program, beside=beside)


def store_fails_after_the_votes(folder: RunFolder, seconds: float = 3.0) -> Found:
    """For so long the store answers nothing to do with a decision, when the limits are set."""

    def program(rank: LightRank) -> None:
        for i in range(150):
            rank.step(i, 4, 0.02)

    def beside(server: StoreServer, pids: list[int]) -> None:
        _until(server, "2")
        server.silent_for("decision", seconds)

    return tries(folder, 2, program, beside=beside)


def decision_late_for_one(folder: RunFolder) -> Found:
    """In one round the decision comes to rank 1 when it has long reached its limit. A call is held for at most 6 s."""
    agreement.HOLD_S = 6

    def program(rank: LightRank) -> None:
        for i in range(160):
            rank.step(i, 4, 0.02)
            if rank.rank == 1 and rank.agreement is not None and not late:
                late.append(rank.agreement._store.decision)
                rank.agreement._store.decision = decision

    late: list[Callable[[int], Decision | None]] = []
    waits = [3.0]

    def decision(number: int) -> Decision | None:
        if number == 6 and waits:
            time.sleep(waits.pop())
        return late[0](number)

    return tries(folder, 2, program, trial_steps=20)


def store_hangs(folder: RunFolder) -> Found:
    """The same for good, with its connections open. A call is held for 2 s."""
    agreement.HOLD_S = 2
    return store_fails_after_the_votes(folder, 3600.0)


def store_drops(folder: RunFolder) -> Found:
    """For a second the store drops every connection of the agreement."""

    def program(rank: LightRank) -> None:
        for i in range(250):
            rank.step(i, 4, 0.02)

    def beside(server: StoreServer, pids: list[int]) -> None:
        _until(server, "2")
        server.drops_for(1.0)

    return tries(folder, 2, program, beside=beside)


def store_gone_in_a_trial(folder: RunFolder) -> Found:
    """The store drops every connection for good while a trial is under way over the default; then `stop` publishes the
    empty table. ``settled_s``: until rank 0 says that all run the default."""
    done: dict[str, Any] = {}

    def program(rank: LightRank) -> None:
        for i in range(300):
            rank.step(i, 4, 0.02)

    def beside(server: StoreServer, pids: list[int]) -> None:
        folder.table.publish(Table(1))
        time.sleep(1.0)
        folder.table.publish(table(2, 40))
        _until(server, "2")
        time.sleep(0.4)
        server.drops_for(3600.0)
        folder.table.publish(Table(3))
        began = time.monotonic()
        while not _has_settled(folder, 3, True) and time.monotonic() < began + 60:
            time.sleep(0.05)
        done["settled_s"] = time.monotonic() - began

    return found(*run(2, program, folder, beside), **done)


def store_fails_at_random(folder: RunFolder, seed: int, failures: int = 12) -> Found:
    """Again and again the store is silent for a second, from a random moment on; a new table comes each half second.

    ``held_ms``: how long a training thread waited in each.
    """
    draw, held_ms, over = random.Random(seed), [], "over"

    def program(rank: LightRank) -> None:
        for i in range(10_000):
            if rank.work.get("ends at") == str(i).encode():
                break
            if rank.rank == 0 and rank.work.check([over]) and rank.work.get("ends at") == b"None":
                rank.work.set("ends at", str(i + 3))
            rank.step(i, 4, 0.02)

    def waited_ms() -> float:
        return max(ring.waited_ns() for ring in folder.rings()) / 1e6

    def beside(server: StoreServer, pids: list[int]) -> None:
        _until(server, "2")
        for _ in range(failures):
            time.sleep(draw.uniform(0.5, 1.5))
            before = waited_ms()
            server.silent_for("/", 1.0)  # keys of a round have one, the job's own have not
            time.sleep(2.0)
            held_ms.append(round(waited_ms() - before, 1))
        server.values[over] = "yes"

    return tries(folder, 2, program, every_s=0.5, beside=beside) | {"held_ms": held_ms}


def settles(folder: RunFolder, seed: int) -> Found:
    """Faults at random moments under trials; in half of the jobs a group is made anew, in half another thread has
    collectives of its own, whenever it likes. Then quiet: a table to stay is wanted, the default in half of the jobs.
    ``settled_s``: until all ranks report it."""
    draw = random.Random(seed)
    n_ranks, is_default, has_lives = draw.choice([2, 2, 3]), draw.random() < 0.5, draw.random() < 0.5
    has_side = draw.random() < 0.5
    kinds = [
        "freeze a rank",
        "freeze rank 0",
        "freeze all",
        "store late",
        "store silent",
        "store drops",
        "tuner",
    ]

    def program(rank: LightRank) -> None:
        over, pace = threading.Event(), random.Random(f"{seed} {rank.rank}")

        def beside_training() -> None:
            while not over.wait(pace.expovariate(1 / 0.02)):
                rank.call(8)

        side = threading.Thread(target=beside_training)
        if has_side:
            side.start()
        for i in range(10_000):
            if rank.work.get("ends at") == str(i).encode():
                break
            if rank.rank == 0 and rank.work.check(["over"]) and rank.work.get("ends at") == b"None":
                rank.work.set("ends at", str(i + 3))
            if has_lives:
                rank.call(100 + i // 60, 2)
                if i % 60 == 59:
                    rank.destroy(100 + i // 60)
            rank.step(i, 4, rank.random.uniform(0, 0.02))
        over.set()
        if has_side:
            side.join()

    def fault(server: StoreServer, pids: list[int], daemon: Publisher) -> str:
        kind = draw.choice(kinds)
        seconds = draw.uniform(0.05, 1.5)
        who = pids if "all" in kind else [pids[0] if "0" in kind else draw.choice(pids[1:])]
        if kind.startswith("freeze"):
            for pid in who:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            for pid in who:
                os.kill(pid, signal.SIGCONT)
        elif kind == "store late":
            server.late_s = seconds / 5
            time.sleep(0.5)
            server.late_s = 0.0
        elif kind == "store silent":
            server.silent_for("/", seconds)
        elif kind == "store drops":
            server.drops_for(seconds)
        else:
            daemon.alive = False
        return kind

    done: dict[str, Any] = {}

    def beside(server: StoreServer, pids: list[int]) -> None:
        daemon = Publisher(folder, server, 0.05, 20)
        while int(server.values.get("in force", "0")) < 2:
            time.sleep(0.005)
        done["faults"] = []
        for _ in range(draw.randrange(1, 4)):
            time.sleep(draw.uniform(0.0, 0.6))
            done["faults"].append(fault(server, pids, daemon))
        daemon.alive = False
        daemon.thread.join()
        wanted = Table(daemon.generation + 1) if is_default else table(daemon.generation + 1)
        folder.table.publish(wanted)
        began = time.monotonic()
        while not _has_settled(folder, wanted.generation, is_default) and time.monotonic() < began + 60:
            time.sleep(0.05)
        done["settled_s"] = time.monotonic() - began
        done["channels"] = 0 if is_default else 1 + wanted.generation % 63
        # It holds from a call ahead, a far one after a round in which a call was held.
        while server.values["in force"] != str(wanted.generation) and time.monotonic() < began + 90:
            time.sleep(0.05)
        server.values["over"] = "yes"

    return found(*run(n_ranks, program, folder, beside), **done)


def _has_settled(folder: RunFolder, generation: int, is_default: bool) -> bool:
    """Whether rank 0 has found that all report the default, or that none lacks what stays."""
    with contextlib.suppress(OSError, ValueError):
        word = json.loads((folder.path / PLANS).read_text())
        return word["generation"] >= generation and (
            word["why"] is None if is_default else word["lacks"] is None
        )
    return False


def dies(folder: RunFolder, seed: int) -> Found:
    """A rank is killed at a random moment: what the others have issued until then is alike, and nobody waits for it."""
    draw = random.Random(seed)
    victim, last = draw.randrange(3), draw.randrange(60, 140)

    def program(rank: LightRank) -> None:
        for i in range(last + 40):
            if i >= last and rank.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if i < last:
                rank.step(i, 4, 0.01)
            else:  # what would hold the others up without us too, the next collective, is left out
                rank.call(9, 4)
                rank.ends()
                time.sleep(0.01)

    return tries(folder, 3, program)


def main() -> None:
    name, *numbers = sys.argv[1:]
    folder = RunFolder.create()
    try:
        print(json.dumps(globals()[name](folder, *map(int, numbers))))
    finally:
        folder.close()


if __name__ == "__main__":
    main()
