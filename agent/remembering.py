"""A run's way to the memory between jobs: what it begins from, and what it leaves. Nothing here may stop the tuning."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..envs.live_windows import LiveWindows
from ..envs.memory import Memory
from ..envs.search import Search
from ..envs.sim.clusters import cluster
from ..envs.sim.emulated import Emulated
from ..traces.header import masked
from .clusters import Store, in_time, key_of, record_of

#: In the run folder: the version of NCCL in the job, as rank 0's probe found it.
NCCL = "nccl"


class Remembering:
    """The memory at ``url`` as one run uses it; ``say`` hears what comes of it. Of a store that fails or hangs the run
    goes on without."""

    def __init__(self, url: str, run: str, job: str, say: Callable[[str], None]) -> None:
        self.url, self.run, self.job, self._say = url, run, masked(job), say
        self.facts: dict[str, str] = {}
        self.n_records = 0
        self.written = ""  # the newest record of this run
        self._left: dict[str, Any] = {}

    def recall(self, facts: dict[str, str]) -> Memory | None:
        """What is known of the cluster that the job turned out to run on."""
        self.facts = facts
        try:
            known = in_time(lambda: Store(self.url).read(key_of(self.facts)))
            memory = known.memory()
        except Exception as error:  # whatever a file system or an object store can raise
            self._say(f"the memory {self.url} cannot be read ({error}): beginning from nothing")
            return None
        self.n_records = len(known.in_use)
        if known.damaged:
            self._say(f"{len(known.damaged)} records of the memory cannot be read: {known.damaged[0]}")
        return memory

    def leave(self, windows: LiveWindows, search: Search) -> None:
        """Write down what the search has measured by now, unless that is written already or nothing was."""
        evidence, recalled = search.evidence, search.memory.recalled
        if not (evidence.counts.any() or len(evidence.tables)) or not self.facts:
            return
        gain = dict(zip(("mean", "low", "high"), search.gain, strict=True)) if search.races else None
        more = {"job": self.job, "gain": gain, "steps": search.steps}
        more |= {"contradicts": recalled is not None and recalled.is_contradicted}
        # What a job is in after a change is another regime: its record stands beside the one before.
        run = f"{self.run}+{search.marks.reopened}" if search.marks.reopened else self.run
        record = record_of(self.facts, run, windows.profiles, evidence, **more)
        new = {"slots": record["slots"], "gain": gain}
        if new == self._left:
            return
        try:
            self.written = in_time(lambda: Store(self.url).add(record))
            self._left = new
        except Exception as error:
            self._say(f"what was learned could not be left in {self.url}: {error}")

    def told(self, search: Search | None) -> dict[str, Any]:
        """For the summary."""
        recalled = search.memory.recalled if search else None
        return {
            "url": self.url,
            "cluster": key_of(self.facts) if self.facts else None,
            "jobs": self.n_records,
            "used": bool(recalled and recalled.is_used),
            "text": recalled.text if recalled else "nothing is known of this cluster yet",
            "record": self.written or None,
        }


def facts_of(windows: LiveWindows, emulated: Emulated | None) -> dict[str, str]:
    """What tells the cluster of a running job from others: ``clusters.FACTS``."""
    comms = windows.job.assembler.comms.values()
    layout = max(((c.n_ranks, c.n_nodes) for c in comms), default=(0, 0))
    facts = {"layout": layout_of(*layout) if layout[1] else "unknown"}
    if emulated is not None:
        return facts | hardware_of(emulated)
    try:
        nccl = (windows.job.run.path / NCCL).read_text().strip()
    except OSError:
        nccl = ""
    return facts | {"hardware": _gpus(), "nccl": nccl or "unknown"}


def layout_of(n_ranks: int, n_nodes: int) -> str:
    """``2 x 8 ranks``: of the largest communicator."""
    return f"{n_nodes} x {n_ranks // n_nodes} ranks"


def hardware_of(emulated: Emulated) -> dict[str, str]:
    """What an emulated cluster is; its seed and its weather are what may change from one job to the next."""
    scales = f"bytes x {emulated.bytes_scale:g}, time x {emulated.time_scale:g}"
    facts = {"hardware": f"emulated {emulated.cluster}, {scales}"}
    with contextlib.suppress(ValueError, OSError):  # the file of a cluster may be gone
        facts["nccl"] = str(cluster(emulated.cluster).nccl)
    return facts


def _gpus() -> str:
    """The GPUs of this node, by NVML: ``8 x NVIDIA H100 80GB HBM3``."""
    try:
        import pynvml

        pynvml.nvmlInit()
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
    except Exception:  # no library, no driver, no permission
        return "unknown GPUs"
    texts = [name.decode() if isinstance(name, bytes) else str(name) for name in names]
    return ", ".join(f"{texts.count(name)} x {name}" for name in sorted(set(texts))) or "no GPU"
