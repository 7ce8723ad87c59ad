"""Whose call it is: the rank of each process, the step of each call, and what is left out; one way for all formats.

A file may hold several processes, and a process may have left several files. What cannot be told is left out and named,
or refused where it would be added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..assemble import COMPUTE_COLUMNS, EVENT_COLUMNS, STEP_COLUMNS, complete, empty, joined
from ..outside import TraceError
from .found import MOST_RANKS, SYMMETRIC, Found, Gaps, Process, many, rank_in_name

#: Columns of events and of steps that no other tool records: 0.
_NOT_RECORDED = dict.fromkeys(("table_generation", "captured", "asked_bytes"), 0)
_NOT_RECORDED |= dict.fromkeys(("memory_used", "memory_total", "sampled", "sample_every"), 0)
#: Columns of an event that a reader may leave out, and their values then.
_EVENT_DEFAULTS = {
    "dtype": "unknown",
    "algo": "unknown",
    "proto": "unknown",
    "n_channels": 0,
    "n_nodes": 0,
    "step": 0,
    "seq": None,
    "start_ns": None,
    "end_ns": None,
}
#: What an event's numbers stay below; a damaged file holds anything.
_BELOW = {
    "comm_id": 1 << 64,
    "rank": MOST_RANKS,
    "n_ranks": MOST_RANKS,
    "n_channels": 1 << 15,
    "n_bytes": 1 << 60,
    "seq": 1 << 62,
    "pid": 1 << 62,
    "step": 1 << 62,
    "enqueue_ns": 1 << 62,
    "start_ns": 1 << 62,
    "end_ns": 1 << 62,
}


@dataclass
class LeftOut:
    """Calls of NCCL that do not say which collective they are: how many, and their GPU time in ns beside that of those
    that do."""

    calls: int = 0
    ns: int = 0
    read_ns: int = 0

    def share(self) -> str:
        """The part of NCCL's GPU time that was left out, for people; empty where no times are known."""
        total = self.ns + self.read_ns
        return f", {self.ns / total:.0%} of NCCL's time," if total else ""


@dataclass
class Job:
    """The calls, steps and other kernels of a job's ranks, as rows of a trace; ``notes`` say what is not known."""

    found: Found
    gaps: Gaps
    notes: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    computes: list[pd.DataFrame] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    outside: Counter[str] = field(default_factory=Counter)

    def events(self, ranks_per_node: int | None) -> pd.DataFrame:
        """The calls as EVENT_COLUMNS, in the order in which they were enqueued; at least one."""
        # As objects: a column with gaps must not become float64, clock values have more digits than that.
        filled = [{**_EVENT_DEFAULTS, **row} for row in self.rows]
        events = pd.DataFrame(filled, dtype=object).assign(**_NOT_RECORDED)
        events = events.sort_values("enqueue_ns", kind="stable", ignore_index=True)
        counted = events.groupby(["rank", "pid", "comm_id", "func"], sort=False).cumcount()
        events["seq"] = events["seq"].where(events["seq"].notna(), counted)
        if ranks_per_node:
            is_open = events["n_nodes"] == 0
            nodes = self._nodes(events[is_open], ranks_per_node)
            events["n_nodes"] = events["n_nodes"].where(~is_open, events["comm_id"].map(nodes))
        return complete(events, EVENT_COLUMNS)

    def _nodes(self, events: pd.DataFrame, ranks_per_node: int) -> dict[int, int]:
        """comm_id -> number of nodes that its ranks lie on; a note where these are not told."""
        nodes, groups = {}, self.found.groups
        untold = []
        for comm_id, n_ranks in events[["comm_id", "n_ranks"]].drop_duplicates("comm_id").to_numpy():
            ranks = groups.get(comm_id) or range(n_ranks)
            nodes[comm_id] = len({rank // ranks_per_node for rank in ranks})
            if not groups.get(comm_id):
                untold.append(n_ranks)
        if any(n_ranks > 1 for n_ranks in untold):
            self.notes.append(
                "on which nodes the ranks of a group lie: assumed packed on as few as hold them"
            )
        return nodes

    def step_frame(self) -> pd.DataFrame:
        """The steps as STEP_COLUMNS, in order; empty where the files mark none."""
        if not self.steps:
            return empty(STEP_COLUMNS)
        steps = complete(pd.DataFrame(self.steps).assign(**_NOT_RECORDED), STEP_COLUMNS)
        return steps.sort_values(["index", "rank"], ignore_index=True)

    def compute(self) -> pd.DataFrame:
        """The other kernels as COMPUTE_COLUMNS."""
        return joined([part.astype(COMPUTE_COLUMNS) for part in self.computes], COMPUTE_COLUMNS)

    def take(self, process: Process, rank: int | None) -> None:
        """Take in a process. ``rank`` is None for one of a log, whose calls say their ranks in communicators."""
        whose = {"rank": rank, "pid": rank if process.number is None else process.number}
        for call in process.calls:
            step = process.marks.step_at(call["enqueue_ns"])
            lasts = (call.get("end_ns") or 0) - (call.get("start_ns") or 0)
            if step is None:
                self.outside[process.outside] += 1
            elif call.get("untold"):
                self.left_out.calls += 1
                self.left_out.ns += max(0, lasts)
            elif call["func"] is not None:
                row = {**whose, "step": step, **call}
                row.setdefault("n_nodes", self.found.nodes.get(row["comm_id"], 0))
                if _is_possible(row):
                    self.left_out.read_ns += max(0, lasts)
                    self.rows.append(row)
                else:
                    self.left_out.calls += 1
        self.left_out.calls += process.unsaid
        # A rank also stands for its process: process ids repeat on other hosts.
        for begin, lasts, step in process.marks.marks:
            row = {"rank": rank, "pid": rank, "index": step}
            self.steps.append({**row, "end_ns": begin + lasts, "duration_ns": lasts})
        if process.compute is not None and len(process.compute[0]):
            start_ns, end_ns = process.compute
            self.computes.append(pd.DataFrame({"rank": rank, "start_ns": start_ns, "end_ns": end_ns}))

    def say(self) -> None:
        """Note what is left out, and what the files do not tell."""
        left_out, notes, gaps = self.left_out, self.notes, self.gaps
        if left_out.calls:
            total = left_out.calls + len(self.rows)
            first = f"{left_out.calls} of {total} calls of NCCL{left_out.share()} do not say which collective they are"
            notes.insert(0, f"{first}, and are left out: {gaps.calls}")
        if n := sum(row.get("algo") == SYMMETRIC for row in self.rows):
            kernels = "a symmetric kernel" if n == 1 else "symmetric kernels"
            notes.append(f"{many(n, 'call')} ran {kernels}, which no table reaches")
        for text, n in [*self.found.counted.items(), *self.outside.items()]:
            notes.append(text.format(n=n, calls=many(n, "call")))
        missing = {
            gaps.times: not any(row.get("start_ns") is not None for row in self.rows),
            gaps.compute: not self.computes,
            gaps.steps: not self.steps,
            gaps.choice: not any("algo" in row for row in self.rows),
        }
        notes += [note for note, is_missing in missing.items() if note and is_missing]


def _is_possible(row: dict[str, Any]) -> bool:
    """Whether a call's numbers can be: a damaged file holds anything."""
    numbers = ((row.get(name), below) for name, below in _BELOW.items())
    return all(value is None or (isinstance(value, int) and 0 <= value < below) for value, below in numbers)


def settle(found: Found, gaps: Gaps) -> Job:
    """The processes of all files as one job.

    Raises TraceError where two files hold the same calls or steps of a rank, which would be added up, and where no file
    says which rank it is of.
    """
    job = Job(found, gaps, list(found.notes))
    _refuse_same_calls(found.processes)
    owners: dict[int, list[Process]] = {}
    without: list[Process] = []  # a rank
    for process, rank in _ranks(found.processes, job.notes):
        if rank is None and process.number is None:
            without.append(process)
            continue
        if rank is not None:
            _claim(process, rank, owners.setdefault(rank, []))
        job.take(process, rank)
    untold = [process for process in without if process.holds_calls]
    if untold and not (job.rows or job.outside or job.left_out.calls):
        raise TraceError(_why_left_out(untold[0], gaps))
    job.notes += dict.fromkeys(f"left out: {_why_left_out(process, gaps)}" for process in without)
    return job


def _why_left_out(process: Process, gaps: Gaps) -> str:
    if not process.holds_calls:
        return f"{process.file} holds a process without a call of NCCL, and does not say its rank"
    return f"{process.file} does not say which rank it is of: {gaps.rank}"


def _ranks(processes: list[Process], notes: list[str]) -> Iterator[tuple[Process, int | None]]:
    """Each process with its rank, None where nothing tells it.

    A file's own word counts first. Then its name, if it holds one process and no other file has that number: a number
    that names share may be a rack's. Then its communicators and calls. The processes of a single file are numbered.
    """
    whole = _job_comm(processes)
    n_in_file = Counter(process.file for process in processes)
    names = Counter(map(rank_in_name, n_in_file))
    unnumbered = [process for process in processes if process.number is None and process.holds_calls]
    for process in processes:
        named = rank_in_name(process.file) if n_in_file[process.file] == 1 else None
        rank = _told(process, named, names[named] == 1, _shown(process, whole))
        if rank is None and len(n_in_file) == 1 and process in unnumbered:
            rank = unnumbered.index(process)
            _say_numbered(process.file, len(unnumbered), notes)
        yield process, rank


def _told(process: Process, named: int | None, is_only: bool, shown: int | None) -> int | None:
    """The rank by a file's own word, by its name (which it has for itself, or not), and by its calls."""
    if process.told is not None:
        return process.told if 0 <= process.told < MOST_RANKS else None
    return named if named is not None and (is_only or shown is None) else shown


def _say_numbered(file: Path, n: int, notes: list[str]) -> None:
    """Note that nothing tells the ranks of a file's processes."""
    told = "which ranks it is of: they are numbered in the order of its processes"
    note = f"{file.name} does not say {told if n > 1 else 'which rank it is of: taken to be rank 0'}"
    if note not in notes:
        notes.append(note)


def _shown(process: Process, whole: int | None) -> int | None:
    """The rank of a process by its part in the job's communicator, else the one that it has in all of its communicators
    or says in all of its calls. In a job of several groups it has another rank in each."""
    if whole is not None and whole in process.comms:
        return process.comms[whole].rank
    ranks = {member.rank for member in process.comms.values()} or process.called
    return min(ranks) if len(ranks) == 1 else None


def _job_comm(processes: list[Process]) -> int | None:
    """The communicator of the whole job: the widest of all, if all processes (two at least) have part in it."""
    made = [process.comms for process in processes if process.comms]
    widest = max((member.n_ranks for comms in made for member in comms.values()), default=0)
    of_each = [{number for number, member in comms.items() if member.n_ranks == widest} for comms in made]
    shared = set.intersection(*of_each) if len(of_each) > 1 else set()
    return min(shared, default=None)


def _claim(process: Process, rank: int, owners: list[Process]) -> None:
    """Note that a process holds its steps of a rank. Raises TraceError if another holds one of them too, or if one of
    the two marks no steps: they would be added up."""
    mine = process.marks.steps
    for other in owners:
        theirs = other.marks.steps
        shared = mine & theirs
        if shared or not mine or not theirs:
            what = f"step {min(shared)} of rank {rank}" if shared else f"rank {rank}, and one marks no steps"
            raise TraceError(
                f"{other.file} and {process.file} both hold {what}: give one file a rank; "
                "to compare two recordings put each into its own folder"
            )
    owners.append(process)


def _refuse_same_calls(processes: list[Process]) -> None:
    """Raises TraceError where two files hold one call: it would count twice."""
    seen: dict[Any, Path] = {}
    for process in processes:
        for call in process.calls:
            once = call.pop("once", None)
            other = seen.setdefault(once, process.file) if once is not None else process.file
            if other != process.file:
                raise TraceError(
                    f"{other} and {process.file} both hold a call of rank {call['rank']}: "
                    "give each log once, of one run"
                )
