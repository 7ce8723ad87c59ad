"""The memory between jobs: what a run confirmed is the first table of the next run of that job on the same cluster.

One JSON file a run, in a folder or wherever fsspec writes (``s3://bucket/folder``), below the cluster's key. A run
begins with the newest table that had most of its slots. agent/README.md says what is skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec

from ...envs.live.windows import LiveWindows
from ...envs.nccl.steps.nvml import gpus
from ...traces.header import masked, plain
from ...traces.outside import parse_json
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import Recalled, Why
from ...traces.records import AUTO, Decision, Slot, decision_from
from ..report.outputs import full_url
from .request import Request
from .tuner import Tuner

#: Of the files; those of any other are not read. Runs of a cluster that are looked at, the newest.
FORMAT, MOST_RUNS = 2, 40
#: Most bytes of a file, and the largest size of a message that is believed.
MOST_BYTES, LARGEST = 4 << 20, 2**62
#: A store that does not answer for so long is not waited for.
WAIT_S = 15.0
#: What tells clusters apart: GPUs or the emulated cluster, nodes x ranks, NCCL's release.
FACTS = ("hardware", "layout", "nccl")
#: Logs by which the message and the default's time of the same slot may differ between two runs.
SAME_SIZE, SAME_TIME = 0.015, 0.5
#: In the run folder: NCCL's release in the job, as rank 0's probe found it.
NCCL = "nccl"


def key_of(facts: Mapping[str, Any]) -> str:
    """The folder of a cluster: the same for the same FACTS on every machine and in every release."""
    known = {name: str(facts.get(name) or "unknown") for name in FACTS}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Kept:
    """One slot of a run, and what the run decided for it."""

    slot: Slot
    n_bytes: int
    own: str  # NCCL's own choice
    call_us: float  # of it
    decision: Decision

    @classmethod
    def of(cls, p: SlotProfile, decision: Decision = AUTO) -> Kept:
        """Of a slot as a run found it."""
        return cls(p.slot, p.n_bytes, p.own.rpartition("/")[0], p.call_us, decision)

    def is_again(self, other: Kept) -> bool:
        """Whether it is the same slot, and its calls take what they took."""
        sizes = math.log(self.n_bytes / other.n_bytes)
        times = math.log(self.call_us / other.call_us)
        return (
            (self.slot, self.own) == (other.slot, other.own)
            and abs(sizes) < SAME_SIZE
            and abs(times) < SAME_TIME
        )


def parsed(text: bytes) -> dict[str, Any]:
    """What a file holds, its slots as :class:`Kept`. Raises an exception of some kind for a file that is no memory."""
    told = parse_json(text, MOST_BYTES)
    if told["format"] != FORMAT:
        raise ValueError(f"format {told['format']}, this release reads {FORMAT}")
    slots = [
        {**s, "slot": Slot(**s["slot"]), "decision": decision_from(s["decision"])} for s in told["slots"]
    ]
    told["slots"] = [Kept(**slot) for slot in slots]
    told["failed"] = bool(told.get("failed", False))
    for kept in told["slots"]:
        if type(kept.n_bytes) is not int or not 0 < kept.n_bytes <= LARGEST or not kept.call_us > 0:
            raise ValueError("a slot without bytes or time, or with more bytes than a message can have")
    (
        datetime.fromisoformat(told["written"]),
        told["job"],
        told["speedup"],
        [told["cluster"][fact] for fact in FACTS],
    )
    return dict(told)


class Store:
    """A place for runs. Raises ValueError for a URL that nothing installed here can open."""

    def __init__(self, url: str) -> None:
        self.url = full_url(url)
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the memory {url} cannot be opened: {error}") from None

    def read(self, key: str) -> tuple[list[dict[str, Any]], list[str]]:
        """The runs of a cluster, the newest first, and what was passed over, each with the reason. Raises OSError."""
        folder, runs, passed = f"{self.root}/{key}", list[dict[str, Any]](), list[str]()
        names = self.files.ls(folder, detail=False) if self.files.exists(folder) else []
        for name in sorted((str(name) for name in names if str(name).endswith(".json")), reverse=True)[
            :MOST_RUNS
        ]:
            try:
                runs.append(parsed(self.files.cat_file(name, end=MOST_BYTES + 1)))
            except Exception as error:  # whoever wrote it may have written anything: the other files are read
                passed.append(f"{name} ({type(error).__name__}: {error})")
        return runs, passed

    def write(self, key: str, name: str, told: Mapping[str, Any]) -> None:
        """Write a file of a cluster, or write it anew. Raises OSError."""
        self.files.makedirs(f"{self.root}/{key}", exist_ok=True)
        with (
            self.files.transaction,
            self.files.open(f"{self.root}/{key}/{name}", "wb") as file,
        ):  # all of it or nothing
            file.write(json.dumps(plain(told), indent=1).encode())


class Memory:
    """The memory at ``url`` as one run uses it; ``say`` hears what fails. Nothing here stops the run."""

    def __init__(self, url: str, job: str, say: Callable[[Why], None]) -> None:
        self.url, self.job, self._say = url, masked(job), say
        self.facts: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.why = Recalled.NOTHING_KNOWN()
        self._left: dict[str, Any] = {}  # what was written last
        self._name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:12]}.json"

    def recall(self, facts: dict[str, str], profiles: Sequence[SlotProfile]) -> dict[Slot, Decision]:
        """The table to be tried first in a job of these slots on that cluster; empty: none."""
        self.facts = facts
        mine = list(map(Kept.of, profiles))
        try:
            self.runs, passed = in_time(lambda: Store(self.url).read(key_of(facts)))
        except Exception as error:  # whatever a file system or an object store can raise
            self._say(Recalled.UNREADABLE(url=self.url, error=error))
            return {}
        for file in passed:
            self._say(Recalled.PASSED_OVER(file=file))
        if self.runs:
            self.why = Recalled.NOTHING_ALIKE()
        return self._best_of_runs(mine)

    def _best_of_runs(self, mine: Sequence[Kept]) -> dict[Slot, Decision]:
        """The decisions of the run that has most of these slots."""
        table = dict[Slot, Decision]()
        withdrawn: list[Kept] = []  # slots of failed runs of other jobs: earlier runs may have the same table
        for run in self.runs:
            if run["failed"] and run["job"] == self.job:
                self.why = Recalled.FAILED_BEFORE(written=run["written"])
                break
            if run["failed"]:
                withdrawn += run["slots"]
                continue
            left = [m for m in mine if not any(kept.is_again(m) for kept in withdrawn)]
            found = {m.slot: kept.decision for m in left for kept in run["slots"] if kept.is_again(m)}
            if len(found) > len(table):
                table = found
                self.why = _begins_with(found, len(mine), run)
        return table

    def leave(self, tuner: Tuner) -> None:
        """Write down what the run has come to by now, unless that is written already.

        A run that failed is marked. So the next job does not begin with the table that was withdrawn, nor with the same
        table in the file of an earlier run.
        """
        o, table = tuner.outcome, tuner.decisions
        if o.failure:
            table = {}
        told: dict[str, Any] = {"format": FORMAT, "job": self.job}
        told |= {"cluster": {fact: self.facts.get(fact) or "unknown" for fact in FACTS}}
        told |= {"failed": bool(o.failure)}
        told |= {"speedup": [o.speedup, *o.speedup_ci95] if o.kept and o.speedup_ci95 else None}
        profiles = tuner.windows.profiles
        told |= {"slots": [vars(Kept.of(p, table.get(p.slot, AUTO))) for p in profiles]}
        if told == self._left:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            in_time(lambda: Store(self.url).write(key_of(self.facts), self._name, told | {"written": now}))
            self._left = told
        except Exception as error:
            self._say(Recalled.NOT_LEFT(url=self.url, error=error))

    def told(self) -> dict[str, Any]:
        """For the summary."""
        key = key_of(self.facts) if self.facts else None
        found = {"url": self.url, "cluster": key, "file": self._name}
        return found | {"jobs": len(self.runs), "why": self.why}


def mark_failed(told: Mapping[str, Any]) -> bool:
    """Mark what a run left in the memory as left by a run that failed: no later run begins with it.

    Args:
        told: :meth:`Memory.told` of that run.

    Returns:
        False if the run left nothing.

    Raises:
        OSError, ValueError: if the store does not answer, or does not take it.
    """
    store, cluster, name = Store(str(told["url"])), str(told["cluster"]), str(told["file"])

    def mark() -> bool:
        try:
            left = parse_json(store.files.cat_file(f"{store.root}/{cluster}/{name}"), MOST_BYTES)
        except FileNotFoundError:
            return False
        store.write(cluster, name, left | {"failed": True})
        return True

    try:
        return bool(in_time(mark))
    except Exception as error:  # whatever a file system or an object store can raise
        raise OSError(f"the memory {store.url} cannot be changed: {error}") from None


def _begins_with(table: Mapping[Slot, Decision], n_slots: int, run: Mapping[str, Any]) -> Why:
    """How much of a job begins with a table of before."""
    n_rows = sum(not decision.is_auto for decision in table.values())
    facts = {"job": run["job"], "written": run["written"]}
    if n_rows:
        return Recalled.BEGINS_WITH_TABLE(rows=n_rows, slots=n_slots, **facts)
    return Recalled.BEGINS_WITH_DEFAULT(**facts)


def in_time(work: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """What ``work`` returns or raises. Raises TimeoutError where it takes too long, and leaves it to itself."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="dynamiccl-memory", daemon=True).start()
    if not wait([done], seconds).done:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    return done.result()


def facts_of(windows: LiveWindows, request: Request) -> dict[str, str]:
    """What tells the cluster of a running job from others: FACTS."""
    comms = windows.job.assembler.comms.values()
    n_ranks, n_nodes = max(((c.n_ranks, c.n_nodes) for c in comms), default=(0, 0))
    layout = (
        f"{n_nodes} x {n_ranks // n_nodes} ranks" if n_nodes else "unknown"
    )  # of the largest communicator
    release = str(request.facts.get("nccl", ""))
    if request.emulated is not None:  # its seed is what may change from one run to the next
        scales = f"bytes x {request.emulated.bytes_scale:g}, compute x {request.emulated.compute_scale:g}"
        cluster = Path(request.emulated.cluster).name  # a file's folder says nothing, and may name its user
        hardware = f"emulated {cluster}, {scales}"
    else:
        names = gpus()
        hardware = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or "no GPU"
        with contextlib.suppress(OSError):
            release = (windows.job.run.path / NCCL).read_text().strip()
    return {"hardware": hardware, "layout": layout, "nccl": release or "unknown"}
