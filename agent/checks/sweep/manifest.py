"""What a sweep was measured on: nothing in it names a host, a user, a path or an address."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....envs.nccl.plugin.build import build_of
from ....envs.nccl.steps.nvml import driver, visible_gpus
from ....traces.header import git
from ....traces.here import configured, version_of
from ....traces.outside import write_whole
from .room import MANIFEST

if TYPE_CHECKING:
    from .rank import Cell, Plan

FORMAT = 1
#: Variables, also of nccl.conf, that are noted in run.json as they are; all others may name people, hosts or paths.
NOTED = (
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_MIN_CTAS",
        "NCCL_MAX_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
    ),
    *("NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_PAT_ENABLE", "NCCL_P2P_DISABLE"),
    *("NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MNNVL_ENABLE"),
    *("NCCL_CROSS_NIC", "NCCL_CTA_POLICY", "NCCL_RUNTIME_CONNECT", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "OMP_NUM_THREADS"),
)


def write_manifest(
    folder: Path,
    plan: Plan,
    cluster: str | None,
    nccl: str,
    own: dict[Cell, str] | None,
    found: dict[str, Any],
) -> None:
    """Write manifest.json: at the start without what is ``found``, then again. ``nccl``: the release, as the library
    says. Raises TraceError."""
    versions = {name: version_of(name) or "unknown" for name in ("dynamiccl", "torch", "numpy")}
    told = {
        "dynamiccl_sweep": FORMAT,
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "emulated": cluster and Path(cluster).name,
        **_hardware(plan.backend),
        "cores": os.cpu_count(),
        "network": network(),
        "nccl": nccl,
        "versions": {**versions, "python": platform.python_version()},
        "commit": commit(),
        "plugin": build_of(),
        "backend": plan.backend,
        "environment": {name: value for name, value in configured().items() if name in NOTED},
        "headroom": plan.headroom,
        "own": None if own is None else [[list(cell), ran] for cell, ran in own.items()],
        "rounds": plan.rounds,
        "world": int(os.environ["WORLD_SIZE"]),
        **found,
    }
    write_whole(folder / MANIFEST, json.dumps(told, indent=1) + "\n")


def _hardware(backend: str) -> dict[str, str]:
    gpus = [gpu.name for gpu in visible_gpus()] if backend == "nccl" else []
    if not gpus:
        return {"hardware": "no GPU", "driver": ""}
    return {"hardware": f"{len(gpus)} x {gpus[0]} a node", "driver": driver()}


def commit() -> str:
    """The commit of this checkout, with ``+`` where files differ from it; outside of one, DYNAMICCL_COMMIT."""
    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return os.environ.get("DYNAMICCL_COMMIT", "")
    return head + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))


def network(interfaces: Path = Path("/sys/class/infiniband")) -> str:
    """Class of the fastest network here: infiniband, roce, or ethernet where there is no such adapter."""
    layers = [path.read_text().strip() for path in interfaces.glob("*/ports/*/link_layer")]
    if "InfiniBand" in layers:
        return "infiniband"
    return "roce" if layers else "ethernet"
