"""The memory between jobs: records of what tuners measured, one file each, in a folder or an object store.

A record is written once and never changed, under a name of its own, so any number of jobs may write to one place; they
are put together when they are read. Places are fsspec URLs: a local folder, a shared one, ``s3://bucket/folder``.
Records hold durations, prices and decisions as text, no number that only one release understands: what a reader does
not know it leaves out. What to believe of them is decided in ``envs/memory.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np

from ..envs.memory import Evidence, Memory
from ..traces.fingerprint import Fingerprint
from ..traces.header import plain
from ..traces.records import AUTO, PAIRS, Decision, decision_from
from ..traces.slots import SlotProfile
from ..traces.spaces import N_CONFIGS, action_of, actions_of, config_index, decision_of

Array = np.ndarray[Any, Any]
Found = TypeVar("Found")

FORMAT = 1
#: Records of a cluster that are read, the newest.
MOST_RECORDS = 40
#: A store that does not answer for so long is not waited for.
WAIT_S = 15.0
#: Says where the memory is; one of OFF: nowhere.
VARIABLE, OFF = "DYNAMICCL_MEMORY", ("", "off", "none")
#: What tells clusters apart: GPUs or the emulated cluster, nodes x ranks, NCCL's version.
FACTS = ("hardware", "layout", "nccl")


def default_url() -> str | None:
    """Where the memory is unless told otherwise: DYNAMICCL_MEMORY, else below the user's data folder; None: off."""
    told = os.environ.get(VARIABLE)
    if told is not None:
        return None if told.strip().lower() in OFF else told
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(base) / "dynamiccl" / "clusters")


def key_of(facts: dict[str, Any]) -> str:
    """What a cluster is called in the store: the same for the same FACTS on every machine and in every release."""
    known = {name: str(facts.get(name) or "unknown") for name in FACTS}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


@dataclass
class Known:
    """The records of one cluster, the newest first, and what could not be read of it."""

    key: str
    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, str]:
        """What it is."""
        return {name: str(self.records[0]["cluster"].get(name)) if self.records else "unknown" for name in FACTS}

    @property
    def in_use(self) -> list[dict[str, Any]]:
        """One record a run, the newest, and none from before a run that found the cluster changed."""
        seen: set[str] = set()
        out = []
        for record in self.records:
            if record["run"] not in seen:
                seen.add(record["run"])
                out.append(record)
                if record.get("contradicts"):
                    break
        return out

    def memory(self, now: datetime | None = None) -> Memory | None:
        """What a search begins from; None without a usable record."""
        now = now or datetime.now(UTC)
        found = [evidence_of(record, (now - when(record)).total_seconds() / 86400) for record in self.in_use]
        known = [evidence for evidence in found if evidence is not None]
        return Memory(known) if known else None


class Store:
    """A place for records. Raises ValueError for a URL that nothing installed here can open."""

    def __init__(self, url: str) -> None:
        self.url = url if "://" in url else str(Path(url).expanduser().absolute())
        try:
            self.files, self.root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"the memory {url} cannot be opened: {error}") from None

    def keys(self) -> list[str]:
        """Clusters that have a record. Raises OSError."""
        if not self.files.exists(self.root):
            return []
        inside = self.files.ls(self.root, detail=True)
        return sorted(str(e["name"]).rstrip("/").rpartition("/")[2] for e in inside if e["type"] == "directory")

    def read(self, key: str, most: int = MOST_RECORDS) -> Known:
        """The newest records of a cluster. What is damaged, or of a newer format, is left out and named."""
        known, folder = Known(key), f"{self.root}/{key}"
        if not self.files.exists(folder):
            return known
        names = sorted((str(n) for n in self.files.ls(folder, detail=False) if str(n).endswith(".json")), reverse=True)
        for name in names[:most]:
            try:
                record = json.loads(self.files.cat_file(name))
                if int(record["format"]) > FORMAT:
                    raise ValueError(f"format {record['format']}: a newer dynamiccl wrote it")
                when(record), record["run"], record["slots"], record["cluster"][FACTS[0]]
                known.records.append(record)
            except (OSError, ValueError, KeyError, TypeError) as error:
                known.damaged.append(f"{name}: {error}")
        known.records.sort(key=when, reverse=True)
        return known

    def add(self, record: dict[str, Any]) -> str:
        """Write a record under a name that nobody else has; the name. Raises OSError."""
        folder = f"{self.root}/{key_of(record['cluster'])}"
        name = f"{folder}/{when(record):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:12]}.json"
        self.files.makedirs(folder, exist_ok=True)
        with self.files.transaction, self.files.open(name, "wb") as file:  # readers see all of it or nothing
            file.write(json.dumps(plain(record), separators=(",", ":")).encode())
        return name

    def forget(self, key: str, days: float = 0.0) -> int:
        """Remove a cluster's records that are at least so many days old; how many. Raises OSError."""
        folder, now, n = f"{self.root}/{key}", datetime.now(UTC), 0
        for name in [str(n) for n in self.files.ls(folder, detail=False)] if self.files.exists(folder) else []:
            stem = name.rpartition("/")[2].partition("-")[0]
            try:
                age = (now - datetime.strptime(stem, "%Y%m%dT%H%M%S").replace(tzinfo=UTC)).total_seconds() / 86400
            except ValueError:  # not one of ours
                continue
            if age >= days:
                self.files.rm_file(name)
                n += 1
        if n and not self.files.ls(folder, detail=False):
            self.files.rmdir(folder)
        return n


def in_time(work: Callable[[], Found], seconds: float = WAIT_S) -> Found:
    """What ``work`` returns or raises. Raises TimeoutError where it takes too long, and leaves it to itself."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append((work(), None))
        except BaseException as error:
            out.append((None, error))

    thread = threading.Thread(target=run, name="dynamiccl-memory", daemon=True)
    thread.start()
    thread.join(seconds)
    if not out:
        raise TimeoutError(f"no answer for {seconds:.0f} s")
    found, error = out[0]
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def when(record: dict[str, Any]) -> datetime:
    """When a record was written."""
    at = datetime.fromisoformat(str(record["written"]))
    return at if at.tzinfo else at.replace(tzinfo=UTC)


# -- records ---------------------------------------------------------------------------------------------------------


def record_of(
    facts: dict[str, Any], run: str, profiles: Sequence[SlotProfile], evidence: Evidence, **more: Any
) -> dict[str, Any]:
    """A record of what a run measured on a cluster; ``more`` is kept beside it (job, gain, contradicts)."""
    slots = []
    for i, profile in enumerate(profiles):
        seen = np.flatnonzero(evidence.counts[i] > 0)
        slots.append(
            {
                **vars(profile.slot),
                "fingerprint": _told(profile.fingerprint),
                "share": float(evidence.share[i]),
                "call_us": float(evidence.call_us[i]),
                "may": [_text(c) for c in np.flatnonzero(evidence.mask[i])],
                "durations": {_text(c): [float(evidence.logs[i, c]), int(evidence.counts[i, c])] for c in seen},
                "confirmed": _text(evidence.confirmed[i]),
            }
        )
    tables = [
        {"decisions": [_text(c) for c in table], "saving": float(saving), "deviation": float(deviation)}
        for table, saving, deviation in zip(evidence.tables, evidence.savings, evidence.deviations, strict=True)
    ]
    head = {"format": FORMAT, "written": datetime.now(UTC).isoformat(timespec="seconds"), "run": run}
    return {**head, "cluster": {name: str(facts.get(name) or "unknown") for name in FACTS}, **more} | {
        "slots": slots,
        "tables": tables,
    }


def evidence_of(record: dict[str, Any], age_days: float) -> Evidence | None:
    """Inverse of :func:`record_of`; None for a record without a slot, or of which nothing can be understood."""
    slots = record["slots"]
    n = len(slots)
    mask = np.zeros((n, N_CONFIGS), bool)
    logs, counts = np.full((n, N_CONFIGS), np.nan), np.zeros((n, N_CONFIGS))
    try:
        for i, slot in enumerate(slots):
            mask[i, [c for c in map(_config, slot["may"]) if c is not None]] = True
            for text, (log, windows) in slot["durations"].items():
                config = _config(text)
                if config:
                    logs[i, config], counts[i, config] = log, windows
        tables = [([_config(text) for text in t["decisions"]], t["saving"], t["deviation"]) for t in record["tables"]]
        whole = [t for t in tables if len(t[0]) == n and None not in t[0] and t[1] is not None and t[2]]
        confirmed = [_config(slot["confirmed"]) for slot in slots]
        return Evidence(
            features=np.concatenate([_fingerprint(slot["fingerprint"]).vector() for slot in slots]),
            mask=mask,
            share=np.array([float(slot["share"]) for slot in slots]),
            call_us=np.array([np.nan if slot["call_us"] is None else float(slot["call_us"]) for slot in slots]),
            logs=logs,
            counts=counts,
            tables=np.array([t[0] for t in whole], np.int64).reshape(len(whole), n),
            savings=np.array([float(t[1]) for t in whole]),
            deviations=np.array([float(t[2]) for t in whole]),
            confirmed=np.array([0 if None in confirmed else c for c in confirmed], np.int64),
            age_days=max(age_days, 0.0),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _text(config: Any) -> str:
    return str(decision_of(actions_of(np.array([config]))[0]))


def _config(text: str) -> int | None:
    """The config of a decision's text; None where this release has none such."""
    try:
        decision = decision_from(text)
        return 0 if decision == AUTO else int(config_index(action_of(decision)[None])[0])
    except ValueError:
        return None


def _told(fingerprint: Fingerprint) -> dict[str, Any]:
    """A fingerprint of one slot by names, pairs by their text."""
    out = {name: float(value[0]) for name, value in vars(fingerprint).items() if np.ndim(value) == 1}
    prices = {str(Decision(*pair)): float(us) for pair, us in zip(PAIRS, fingerprint.cost_us[0], strict=True)}
    return out | {"cost_us": prices, "own_pair": str(Decision(*PAIRS[int(fingerprint.own_pair[0])]))}


def _fingerprint(told: dict[str, Any]) -> Fingerprint:
    names = [str(Decision(*pair)) for pair in PAIRS]
    values = {
        name: np.array([np.nan if value is None else float(value)])
        for name, value in told.items()
        if name not in ("cost_us", "own_pair")
    }
    cost = np.array([[float(told["cost_us"].get(name, -1.0)) for name in names]])
    return Fingerprint(**values, cost_us=cost, own_pair=np.array([names.index(told["own_pair"])]))
