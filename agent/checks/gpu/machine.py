"""Where the check's jobs run: the GPUs here, or an emulated cluster; how ranks are placed; what is noted about it.

Two ranks on one GPU, which NCCL refuses:

* ``shared``: NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30.3 and newer, through the GPU's memory.
* ``hosts``: each rank claims a host of its own (NCCL_HOSTID), through sockets.

No placement sets a number of channels.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....envs.nccl.plugin.build import build_of
from ....envs.nccl.steps.nvml import Gpu, clocks, driver, visible_gpus
from ....envs.sim.emulated.settings import Emulated
from ....traces.here import configured, program, version_of
from ..sweep.manifest import NOTED, commit, network

#: What the check itself sets for its jobs, by the placement of their ranks.
PLACEMENTS: dict[str, dict[str, str]] = {
    "apart": {},  # a GPU each, or no GPU at all
    "hosts": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"},
    "shared": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC"},
}


def placement(n_gpus: int, nccl: tuple[int, ...]) -> str:
    """How two or more ranks can run here; of several ways the one nearest to a cluster."""
    if n_gpus != 1:
        return "apart"
    return "shared" if nccl >= (2, 30, 3) else "hosts"


@dataclass(frozen=True)
class Machine:
    """What the check's jobs run on. ``emulated`` is the cluster where there is no GPU, or none is wanted."""

    device: str
    n_ranks: int
    placement: str
    nccl: str  # as the library that is loaded says; "" of an emulated one
    emulated: Emulated | None = None
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def here(cls, cluster: str | None = None) -> Machine:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves, or an emulated cluster: ``cluster``, or the default where there is
        no GPU. Raises ValueError, OSError."""
        found = tuple(visible_gpus())
        if cluster or not found:
            emulated = Emulated(cluster) if cluster else Emulated()
            return cls(f"emulated {emulated.cluster}", 2, "apart", "", emulated)
        from ..sweep.rank import nccl_version  # PyTorch loads NCCL: names of files and packages say less

        nccl = nccl_version()
        if not nccl:
            raise ValueError(f"{len(found)} GPUs, but this PyTorch has no NCCL: install one with CUDA")
        where = placement(len(found), tuple(int(part) for part in nccl.split(".")))
        return cls(found[0].name, max(len(found), 2), where, nccl, gpus=found)

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks run on one GPU."""
        return self.placement != "apart"

    def env(self) -> dict[str, str]:
        """Environment of every job here; nothing in it changes what NCCL chooses."""
        emulated = self.emulated.env() if self.emulated else {}
        return {"OMP_NUM_THREADS": "1", **PLACEMENTS[self.placement], **emulated}

    def ranks(self, command: Sequence[str]) -> list[str]:
        """The words that run ``command`` once a rank."""
        words = [*program("torch.distributed.run"), "--standalone", "--local-addr", "127.0.0.1"]
        words += ["--nproc-per-node", str(self.n_ranks), "--no-python", "--"]
        if self.placement == "hosts":
            words += ["sh", "-c", 'NCCL_HOSTID=rank-$RANK exec "$0" "$@"']
        return [*words, *command]

    def facts(self) -> dict[str, Any]:
        """What run.json says about this machine: nothing that names it, its people or its folders."""
        versions = {name: version_of(name) or "unknown" for name in ("dynamiccl", "torch")}
        return {
            "device": self.device,
            "gpus": len(self.gpus),
            "ranks": self.n_ranks,
            "placement": self.placement,
            "network": network(),
            "emulated": self.emulated.cluster if self.emulated else None,
            "nccl": self.nccl,
            "driver": driver() if self.gpus else "",
            "versions": {**versions, "python": platform.python_version()},
            "commit": commit(),
            "plugin": build_of(),
            "cores": os.cpu_count(),
            "environment": {name: value for name, value in configured().items() if name in NOTED},
        }

    def clocks(self) -> dict[str, int]:
        """Clocks, temperature and throttling of the first GPU; empty without one."""
        return clocks(self.gpus[0].index) if self.gpus else {}
