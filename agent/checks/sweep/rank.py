"""One rank of a sweep: every setting of a collective in turn, on a communicator that is new in each round.

A setting is a table of ours that names one message, activated on all ranks between two collectives. What NCCL ran is
read from the profiler's events.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ....envs.nccl.plugin.bindings import Plugin
from ....envs.nccl.rings import Ring
from ....envs.nccl.shm import RunFolder, encode_table
from ....envs.nccl.steps import clock
from ....traces import records as rec
from ....traces.fingerprint import PRICE_CAP
from ....traces.here import program
from ....traces.names import ALL_REDUCE, PAIRS_OF, tuned_funcs
from ....traces.records import AUTO, FUNCS, Decision, Rule, Table, decision_from

#: PyTorch 2.13 gave them other names.
GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: Channels that are asked for; 0: NCCL's own count.
CHANNELS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
#: Timed calls of one visit. One before them does not count.
CALLS = 5
#: NCCL untouched is in each round twice: the second is the A/A.
UNTOUCHED, AGAIN = "untouched", "untouched again"
#: Columns of rows.csv. ``us``: median over the calls of a visit, each the maximum over ranks.
COLUMNS = ("round", "seconds", "func", "n_bytes", "arm", "asked", "ran", "obeyed", "calls", "us", "load")
#: Bytes of a message that runs all channels of a communicator.
LARGE = 2**25
#: Seconds to wait for an event, and for another rank.
PATIENCE_S, PEER_S = 2.0, 300.0


class Cell(NamedTuple):
    """A collective of so many bytes in the whole buffer."""

    func: str
    n_bytes: int


class Shape(NamedTuple):
    """The communicator as NCCL announced it."""

    n_ranks: int
    n_nodes: int


@dataclass(frozen=True)
class Plan:
    """What to measure. ``backend``: of torch.distributed; ``module`` is imported first and registers it."""

    cells: tuple[Cell, ...]
    rounds: int
    backend: str
    module: str = ""
    headroom: int | None = None
    all_reduce: str = ""  # the option, as of a job


class Arm(NamedTuple):
    """A setting of a cell: its name, the decision that is asked for, and what NCCL runs."""

    name: str
    asked: Decision
    ran: str


class Visit(NamedTuple):
    """A setting, called a few times: microseconds, what ran (as ``ring/ll/2``, sorted), whether data were right."""

    us: float
    ran: list[str]
    right: bool


class Rank:
    """This rank's device, communicators, table and events."""

    def __init__(self, plan: Plan) -> None:
        if plan.module:
            __import__(plan.module)
        self.plan = plan
        self.plugin = Plugin.load()
        self.run = RunFolder.create()
        os.environ["DYNAMICCL_RUN"] = str(self.run.path)  # after torch is imported: no probe is wanted
        self.device = _device(plan.backend)
        dist.init_process_group(plan.backend, timeout=timedelta(seconds=PEER_S))
        self.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=PEER_S))
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self._small = Cell("all_gather", 4096 * self.size)
        most = max(cell.n_bytes for cell in (*plan.cells, self._small)) // 4
        self._whole = (torch.arange(most, device=self.device) % 1000).float()
        self._out = torch.empty_like(self._whole)
        self._generation = 0
        self._ring: Ring | None = None
        self._group: Any = None

    def connect(self) -> Shape:
        """Make a new communicator in place of the last, and the NCCL behind it; its shape.

        Raises RuntimeError where NCCL has not loaded our plugin.
        """
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = dist.new_group(backend=self.plan.backend, timeout=timedelta(seconds=PEER_S))
        self.call(self._small)
        self.finish()
        if self._ring is None and self.plugin.open():
            self._ring = Ring.of_this_process(self.run.path)
            self.plugin.sample(False)
        found = self.gather(self._ring is not None)
        if not all(found):
            without = [str(rank) for rank, has in enumerate(found) if not has]
            raise RuntimeError(
                f"NCCL on rank {', '.join(without)} has not loaded our plugin: `dynamiccl doctor` names causes"
            )
        assert self._ring is not None
        comms = self._ring.known()
        comms = comms[comms["kind"] == rec.COMM].view(rec.COMM_DTYPE)
        if not len(comms):
            raise RuntimeError(
                "NCCL has announced no communicator to our plugin: `dynamiccl doctor` names causes"
            )
        return Shape(int(comms[-1]["n_ranks"]), int(comms[-1]["n_nodes"]))

    def visit(self, cell: Cell, decision: Decision, calls: int) -> tuple[Visit, Any]:
        """Call a cell under a setting, once untimed and ``calls`` times timed; NCCL's offer, if it is new."""
        assert self._ring is not None
        self._ring.drain()
        self._generation += 1
        rules = () if decision.is_auto else (Rule(0, 0, *cell, cell.n_bytes, decision),)
        self.plugin.activate(encode_table(Table(self._generation, rules)))
        self._out.fill_(float("nan"))  # so that a collective that writes nothing is found out
        dist.barrier(group=self.control)
        marks = []
        for _ in range(calls + 1):
            self.fill(cell)
            begin = self.mark()
            self.call(cell)
            marks.append((begin, self.mark()))
        self.finish()
        right = self._is_right(cell)
        mine, offer = self._events(cell, calls + 1)
        times = [self.us(*pair) for pair in marks[1:]]
        told = self.gather((times, mine, right))
        slowest = [max(of_call) for of_call in zip(*(one[0] for one in told), strict=True)]
        ran = sorted({plan for one in told for plan in one[1]})
        return Visit(statistics.median(slowest or [0.0]), ran, all(one[2] for one in told)), offer

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has to say, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def close(self) -> None:
        """Leave nothing in shared memory."""
        if self._ring is not None:
            self._ring.close()
        self.run.close()

    def fill(self, cell: Cell) -> None:
        """What the collective sums in place is put there, so that its time holds no copy."""
        if cell.func == ALL_REDUCE:
            n = cell.n_bytes // 4
            self._out[:n] = self._whole[:n]

    def call(self, cell: Cell, later: bool = False) -> Any:
        """The collective. ``later``: it returns its work, for whoever waits for it."""
        n = cell.n_bytes // 4
        share = n // self.size
        mine = self._whole[self.number * share : (self.number + 1) * share]
        if cell.func == "all_gather":
            return GATHER(self._out[:n], mine, group=self._group, async_op=later)
        if cell.func == ALL_REDUCE:
            return dist.all_reduce(self._out[:n], group=self._group, async_op=later)
        return SCATTER(self._out[:share], self._whole[:n], group=self._group, async_op=later)

    def _is_right(self, cell: Cell) -> bool:
        n = cell.n_bytes // 4
        share = n // self.size
        if cell.func == "all_gather":
            return torch.equal(self._out[:n], self._whole[:n])
        if cell.func == ALL_REDUCE:
            return torch.equal(self._out[:n], self._whole[:n] * self.size)
        mine = self._whole[self.number * share : (self.number + 1) * share]
        return torch.equal(self._out[:share], mine * self.size)

    def _events(self, cell: Cell, calls: int) -> tuple[list[str], Any]:
        """What these calls of the cell ran as, and NCCL's offer if it was told. Events may come late."""
        assert self._ring is not None
        end = time.monotonic() + PATIENCE_S
        found = self._ring.drain()
        while (of_cell := _of(found, cell, rec.COLL)) is not None and len(of_cell) < calls:
            if time.monotonic() > end:
                break
            time.sleep(0.0005)
            found = np.concatenate([found, self._ring.drain()])
        offers = _of(found, cell, rec.OFFER).view(rec.OFFER_DTYPE)
        ran = {f"{rec.ALGOS[e['algo']]}/{rec.PROTOS[e['proto']]}/{e['n_channels']}" for e in of_cell}
        return sorted(ran), offers[-1] if len(offers) else None

    def finish(self) -> None:
        """Wait until the GPU has done all that was enqueued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """A point in the GPU's stream of work; without a GPU, now."""
        if self.device.type != "cuda":
            return clock.now_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, begin: Any, end: Any) -> float:
        """Microseconds between two marks that the GPU has passed."""
        return (end - begin) / 1e3 if self.device.type != "cuda" else 1e3 * float(begin.elapsed_time(end))


def _device(backend: str) -> torch.device:
    """Of this rank; its GPU becomes the current one."""
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _of(records: Any, cell: Cell, kind: int) -> Any:
    mine = (records["kind"] == kind) & (records["n_bytes"] == cell.n_bytes)
    return records[mine & (records["func"] == FUNCS.index(cell.func))]


def offered(offer: Any, func: str, all_reduce: str) -> list[tuple[str, str]]:
    """Pairs that NCCL offers for a message, without those that a search would not try; none without an offer."""
    if offer is None:
        return []
    pairs = PAIRS_OF[func]
    costs = rec.pair_costs(offer["cost_us"], func)
    own = rec.ALGOS[offer["algo"]], rec.PROTOS[offer["proto"]]
    if own not in pairs:  # of all_reduce: left to NCCL, as in a job
        return []
    if func == ALL_REDUCE and all_reduce != "algo":
        costs[[algo != own[0] for algo, _ in pairs]] = -1
    priced = costs[costs >= 0]
    if not len(priced):
        return []
    return [pair for pair, cost in zip(pairs, costs, strict=True) if 0 <= cost <= PRICE_CAP * priced.min()]


def settings(pairs: Sequence[tuple[str, str]], n_nodes: int) -> list[Decision]:
    """What is asked for of each pair. Where NCCL does not clip a count to what an algorithm has, it is left to NCCL."""
    found = []
    for algo, proto in pairs:
        unclipped = algo == "collnet_direct" or (algo == "nvls" and n_nodes > 1)
        found += [Decision(algo, proto, n) for n in ((0,) if unclipped else CHANNELS)]
    return found


class Sweep:
    """A sweep on this rank; rank 0 writes its rows into ``folder``. ``say`` hears of progress on rank 0."""

    def __init__(self, rank: Rank, folder: Path, say: Callable[[str], object]) -> None:
        self.rank, self.folder, self.say = rank, folder, say
        self.shape = rank.connect()
        self.left_out = 0  # settings that NCCL did not obey, or whose data were wrong

    def own(self) -> dict[Cell, str]:
        """What NCCL runs untouched, of each cell."""
        return {cell: self._only(cell, AUTO) for cell in self.rank.plan.cells}

    def run(self, own: dict[Cell, str] | None = None) -> dict[str, Any]:
        """All rounds; what is noted about them. ``own``: what NCCL ran on a communicator without headroom, which the
        arm "untouched" then asks for. Raises RuntimeError."""
        rank, plan, began = self.rank, self.rank.plan, time.monotonic()
        self._tell(
            f"{self.shape.n_ranks} ranks on {self.shape.n_nodes} nodes: looking at {len(plan.cells)} messages"
        )
        arms = {cell: self._arms(cell, (own or {}).get(cell)) for cell in plan.cells}
        visits = sum(map(len, arms.values()))
        draw = random.Random(0)  # the same on all ranks
        with self._rows() as write:
            for number in range(plan.rounds):
                rank.connect()
                cells = draw.sample(plan.cells, len(plan.cells))
                for cell in cells:
                    for arm in draw.sample(arms[cell], len(arms[cell])):
                        visit, _ = rank.visit(cell, arm.asked, CALLS)
                        obeyed = visit.right and visit.ran == [arm.ran]
                        write(number, time.monotonic() - began, cell, arm, visit, obeyed)
                took = time.monotonic() - began
                left = took / (number + 1) * (plan.rounds - number - 1)
                self._tell(
                    f"round {number + 1} of {plan.rounds}: {visits} visits, {took:.0f} s, about {left:.0f} s left"
                )
        return {
            "communicator": self.shape._asdict(),
            "untouched": {f"{cell.func}:{cell.n_bytes}": arms[cell][0].ran for cell in plan.cells},
            "arms": {f"{c.func}:{c.n_bytes}": [arm.name for arm in arms[c]] for c in plan.cells},
            "left_out": self.left_out,
            "took_s": round(time.monotonic() - began, 1),
        }

    def _arms(self, cell: Cell, own: str | None) -> list[Arm]:
        """Untouched, again, and one arm for each other plan that NCCL runs under a table."""
        first, pairs = self._untouched(cell, own)
        arms = {first.ran: first}
        for decision in settings(pairs, self.shape.n_nodes):
            visit, _ = self.rank.visit(cell, decision, 1)
            if visit.right and len(visit.ran) == 1 and _obeys(decision, visit.ran[0]):
                arms.setdefault(visit.ran[0], Arm(visit.ran[0], decision, visit.ran[0]))
            else:
                self.left_out += 1
        return [first, first._replace(name=AGAIN), *list(arms.values())[1:]]

    def _untouched(self, cell: Cell, own: str | None) -> tuple[Arm, list[tuple[str, str]]]:
        """The arm, and the pairs that NCCL offers; rank 0 says which."""
        visit, offer = self.rank.visit(cell, AUTO, 1)
        mine = offered(offer, cell.func, self.rank.plan.all_reduce)
        pairs: list[tuple[str, str]] = self.rank.gather(mine)[0]
        asked = AUTO
        if own is not None:
            asked = decision_from(own)
            visit, _ = self.rank.visit(cell, asked, 1)
        if len(visit.ran) != 1 or own not in (None, visit.ran[0]):
            raise RuntimeError(
                f"{cell.func} of {cell.n_bytes} bytes runs {', '.join(visit.ran) or 'unseen'}, not as NCCL untouched"
                f" ({own or 'one plan'}): nothing can be compared with it"
            )
        return Arm(UNTOUCHED, asked, visit.ran[0]), pairs

    def _only(self, cell: Cell, decision: Decision) -> str:
        visit, _ = self.rank.visit(cell, decision, 1)
        if len(visit.ran) != 1:
            raise RuntimeError(
                f"{cell.func} of {cell.n_bytes} bytes runs {', '.join(visit.ran) or 'unseen'}: not one plan"
            )
        return visit.ran[0]

    @contextlib.contextmanager
    def _rows(self) -> Iterator[Callable[..., None]]:
        """Adds rows to rows.csv as they come; on rank 0."""
        if self.rank.number:
            yield lambda *_: None
            return
        with (self.folder / "rows.csv").open("w", newline="", buffering=1) as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(COLUMNS)

            def write(number: int, seconds: float, cell: Cell, arm: Arm, visit: Visit, obeyed: bool) -> None:
                load = os.getloadavg()[0]
                ran, us = " ".join(visit.ran), f"{visit.us:.2f}"
                told = (number, f"{seconds:.2f}", *cell, arm.name, arm.asked, ran, obeyed, CALLS, us)
                out.writerow((*told, f"{load:.2f}"))

            yield write

    def _tell(self, text: str) -> None:
        if self.rank.number == 0:
            self.say(text)


def _obeys(asked: Decision, ran: str) -> bool:
    """Whether NCCL ran what was asked for; it may take fewer channels."""
    did = decision_from(ran)
    is_pair = (did.algo, did.proto) == (asked.algo, asked.proto)
    return is_pair and (asked.n_channels == 0 or did.n_channels <= asked.n_channels)


def untouched(plan: Plan) -> dict[Cell, str]:
    """What NCCL runs on communicators without headroom: asked by processes of their own, since NCCL reads the variable
    once. All ranks call it. Also of LARGE messages. Raises RuntimeError."""
    cells = (*plan.cells, *(Cell(func, LARGE) for func in tuned_funcs(plan.all_reduce)))
    told = asdict(plan) | {"cells": list(dict.fromkeys(cells)), "headroom": None}
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    env |= {"MASTER_PORT": str(int(env["MASTER_PORT"]) + 1)}  # a store of their own
    with tempfile.TemporaryDirectory(prefix="dynamiccl-sweep-") as folder:
        answer = Path(folder, "own.json")
        done = subprocess.run([*program(__name__), json.dumps(told), str(answer)], env=env, check=False)
        if done.returncode:
            raise RuntimeError(f"the ranks without headroom ended with status {done.returncode}: see above")
        return {Cell(*cell): ran for cell, ran in json.loads(answer.read_text())}


def nccl_version() -> str:
    """Of the NCCL that this process has loaded, as that library says; "" without one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if os.path.basename(path).startswith("libnccl.so"):
            number = ctypes.c_int()
            if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
                n = number.value
                return f"{n // 10000}.{n // 100 % 100}.{n % 100}"
    return ""


def main() -> None:
    """What NCCL runs untouched, for :func:`untouched`."""
    told = json.loads(sys.argv[1])
    told["cells"] = tuple(Cell(*cell) for cell in told["cells"])
    rank = Rank(Plan(**told))
    own = Sweep(rank, Path(), print).own()
    Path(sys.argv[2]).write_text(json.dumps(list(own.items())))
    rank.gather(None)
    rank.close()
    os._exit(0)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()
