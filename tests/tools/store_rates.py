"""What the agreement asks of a real TCPStore: ``python store_rates.py --ranks 256`` prints the rates.

A node is a process, its ranks are threads of it, each with the real agreement and a connection of its own; what
stands in for NCCL and the plugin does nothing. Once rank 0 has heard of all ranks, a table comes each second (the
search), then none does (quiet). Every call on a connection counts as one request.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from dynamiccl.envs.nccl.agreement import agreement as agreements
from dynamiccl.envs.nccl.agreement import lookout
from dynamiccl.envs.nccl.agreement.leader import Leader
from dynamiccl.envs.nccl.plugin.bindings import CommView
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.records import Decision, Rule, Table
from torch.distributed import PrefixStore, TCPStore

EVERY_S = 1.0  # a table, in the search
_WATCHES = ("add begun", "add news")  # what is asked where no round runs
_SAME_BEGIN_S = 2.0  # until the phases begin: every node has read by then when that is


class Phases(NamedTuple):
    """Times by the clock of this machine, seconds."""

    search_s: float
    search_ends_s: float
    quiet_s: float
    ends_s: float


class Still:
    """In place of the plugin: one communicator that counts on, and is never at its limit. One agreement a rank."""

    def __init__(self, n_ranks: int, n_nodes: int) -> None:
        self.shape, self.ended = (n_ranks, n_nodes), 0

    def comms(self) -> dict[int, CommView]:
        made = int(100 * time.monotonic())
        return {7: CommView(*self.shape, made, {16: 1})}

    def hold(self, seconds: int) -> None: ...
    def started(self, life: int) -> None: ...

    def join(self) -> int:
        return 1

    def limit(self, owner: int, comm: int, distance: int) -> int:
        return self.comms()[comm].made + distance

    def identity(self) -> str:
        return "still"

    def tuners(self) -> int:
        return 1

    def waiting(self) -> int:
        return 0

    def stage(self, owner: int, message: bytes) -> None: ...
    def switch(self, owner: int, comm: int, *span: int) -> None: ...
    def lift(self, owner: int, generation: int) -> None: ...
    def part(self, owner: int) -> None: ...


class Tables:
    """In place of the table file."""

    def __init__(self) -> None:
        self.phases: Phases | None = None  # not known before all ranks have come
        self._generation = 0

    def take(self) -> tuple[int, bytes] | None:
        if self.phases is None:
            return None
        due = self.phases.search_s + self._generation * EVERY_S
        if not due <= time.monotonic() < self.phases.search_ends_s:
            return None
        self._generation += 1
        row = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "ll", 4))
        return self._generation, encode_table(Table(self._generation, (row,), 5))

    def confirmed(self) -> None:
        return None

    def refuses(self, found: tuple[int, bytes]) -> str:
        return ""

    def read_note(self) -> None: ...

    def trial_begins(self, found: tuple[int, bytes]) -> None: ...

    def trial_is_over(self) -> None: ...

    def tell_plans(self, why: str, lacks: str, is_last: bool) -> None: ...
    def default(self, generation: int) -> bytes:
        return encode_table(Table(generation))


class ThreadLocks:
    """In place of ``fcntl`` in the lookout: ranks are threads here, and a lock of fcntl's is a process's."""

    LOCK_EX, LOCK_NB, LOCK_UN = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.LOCK_UN

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def lockf(self, file: int, what: int) -> None:
        if what == self.LOCK_UN:
            self._lock.release()
        elif not self._lock.acquire(blocking=False):
            raise BlockingIOError


class Counted:
    """A connection that notes what is asked, and when."""

    def __init__(self, store: Any, asked: list[tuple[float, str]]) -> None:
        self._store, self._asked = store, asked

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def asks(*args: Any) -> Any:
            key = args[0][-1] if isinstance(args[0], list) and args[0] else args[0] if args else ""
            self._asked.append((time.monotonic(), f"{name} {str(key).rpartition('/')[2]}"))
            return method(*args)

        return asks if callable(method) and name != "has_extended_api" else method


def wait_for(place: Path, wait_s: float) -> str:
    """What another process has written there; ends this one if nothing comes."""
    until = time.monotonic() + wait_s
    while not place.exists():
        if time.monotonic() > until:
            raise SystemExit(f"{place.name}: nothing within {wait_s:.0f} s")
        time.sleep(0.05)
    return place.read_text()


def write_whole(place: Path, text: str) -> None:
    """Nobody reads half of it."""
    scratch = place.with_suffix(".part")
    scratch.write_text(text)
    scratch.rename(place)


def agreed_begin(folder: Path, leader: Leader | None, n_ranks: int, wait_s: float) -> float:
    """When all nodes begin, by this machine's clock: rank 0's node writes it once it has heard of all ranks."""
    until = time.monotonic() + wait_s
    while leader is not None and len(leader.here) < n_ranks - 1 and time.monotonic() < until:
        time.sleep(0.1)
    if leader is not None and len(leader.here) == n_ranks - 1:
        write_whole(folder / "begin", str(time.monotonic() + _SAME_BEGIN_S))
    return float(wait_for(folder / "begin", wait_s))


def phases_from(begin: float, search_s: float, quiet_s: float) -> Phases:
    """A search of ``search_s``, the time until it counts as over, and ``quiet_s`` without a round."""
    quiet = begin + search_s + lookout.QUIET_S + 2 * EVERY_S
    return Phases(begin, begin + search_s, quiet, quiet + quiet_s)


def run_node(node: int, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a node's ranks have asked, and the phases."""
    per_node, n_ranks = args.per_node, args.ranks
    port = int(wait_for(Path(folder) / "port", args.wait_s))
    own = Path(folder) / str(node)
    own.mkdir()
    lookout.shared_roots = lambda: iter([own])
    lookout.fcntl = ThreadLocks()  # type: ignore[assignment]
    plugin = Still(n_ranks, n_ranks // per_node)
    asked: list[tuple[float, str]] = []
    parts, tables = [], Tables()
    for rank in range(node * per_node, (node + 1) * per_node):

        def connect() -> Any:
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            return Counted(PrefixStore("dynamiccl", store), asked)

        parts.append(agreements.Agreement(rank, n_ranks, plugin, plugin, tables, connect))  # type: ignore[arg-type]
    leader = parts[0]._leader
    begin = agreed_begin(Path(folder), leader, n_ranks, args.wait_s)
    tables.phases = phases = phases_from(begin, args.search_s, args.quiet_s)
    time.sleep(max(0.0, phases.ends_s - time.monotonic()))
    rounds = leader.number if leader else 0
    for part in parts:
        part.close()
    for part in parts:
        part.join()
    return {"asked": asked, "rounds": rounds, "phases": phases}


def often(times: list[float]) -> float:
    """Requests a second from the first to the last: what falls at an edge of the phase makes no difference."""
    return (len(times) - 1) / (max(times) - min(times)) if len(times) > 1 else 0.0


def rates(found: list[dict[str, Any]], per_node: int) -> dict[str, Any]:
    """Requests a second in both phases. It is not quiet before the last round has ended, late on a busy machine."""
    phases = Phases(*found[0]["phases"])
    told: dict[str, Any] = {"rounds": found[0]["rounds"]}
    asked_all = [one for node in found for one in node["asked"] if one[0] < phases.ends_s]
    last_s = max((at for at, what in asked_all if what not in _WATCHES), default=0.0)
    quiet_s = max(phases.quiet_s, last_s + lookout.QUIET_S + EVERY_S)
    spans = {"search": phases[:2], "quiet": (quiet_s, phases.ends_s)}
    n_ranks = per_node * len(found)
    for name, (begin, end) in spans.items():
        seconds = max(end - begin, 1e-3)
        asked = [[(at, what) for at, what in one["asked"] if begin <= at < end] for one in found]
        of_nodes = [Counter(what for _, what in one) for one in asked]
        total = sum(len(one) for one in asked)
        looks = [[at for at, what in one if what == "add begun"] for one in asked]
        told[name] = {
            "seconds": round(seconds, 1),
            "requests_a_second": round(total / seconds, 2),
            "a_rank_and_second": round(total / n_ranks / seconds, 3),
            "of_the_busiest_node_a_second": round(max(often([at for at, _ in one]) for one in asked), 3),
            "looks_a_node_and_second": round(max(often(times) for times in looks), 3),
        }
    searched = told["search"]["requests_a_second"] * (phases.search_ends_s - phases.search_s)
    told["requests_a_rank_and_round"] = round(searched / n_ranks / max(1, told["rounds"]), 2)
    told["by_kind_in_quiet"] = dict(of_nodes[0] + of_nodes[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--search-s", type=float, default=10.0)
    parser.add_argument("--quiet-s", type=float, default=10.0)
    parser.add_argument("--wait-s", type=float, default=300.0, help="for all ranks to come")
    args = parser.parse_args()
    os.environ["DYNAMICCL_ATTACH_S"] = str(args.wait_s)
    n_nodes = args.ranks // args.per_node
    found: list[dict[str, Any]] = [{}] * n_nodes
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for node in range(n_nodes):
            read, write = os.pipe()
            if os.fork() == 0:
                told = run_node(node, folder, args)
                with os.fdopen(write, "w") as file:
                    json.dump(told, file)
                os._exit(0)
            os.close(write)
            pipes.append(read)
        # After the forks: a thread of the server may hold a lock that a forked process would wait for without end.
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        write_whole(Path(folder) / "port", str(server.port))

        def collect(node: int) -> None:
            with os.fdopen(pipes[node]) as file:
                found[node] = json.load(file)

        readers = [threading.Thread(target=collect, args=(node,)) for node in range(n_nodes)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    told = {"ranks": args.ranks, "nodes": n_nodes, **rates(found, args.per_node)}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
