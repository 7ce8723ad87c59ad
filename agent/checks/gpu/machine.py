"""Where the check's jobs run: the GPUs here, or an emulated cluster; how ranks are placed; what is noted about it.

NCCL refuses two ranks on one GPU unless it is told otherwise, in one of two ways:

* ``shared``: NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30.3 and newer; the ranks talk through the GPU's memory.
* ``hosts``: each rank claims to be a host of its own (NCCL_HOSTID), and the ranks talk through sockets. Every release.

No placement sets a number of channels: NCCL untouched is the baseline of every comparison.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....envs.nccl.plugin.build import build_of, nccl_release
from ....envs.nccl.steps.nvml import Gpu, clocks, driver, visible_gpus
from ....envs.sim.emulated.settings import Emulated
from ....traces.here import configured, program, version_of
from ..results.judge import PLACEMENTS
from ..sweep.manifest import NOTED, commit, network

#: Channels of a raised communicator. Where ranks share a GPU all channels of all ranks must fit on its SMs at once.
RAISED = {"apart": 32, "hosts": 16, "shared": 16}
#: A GPU's id goes through this before it is written: the same GPU is found again, its id is not.
_SALT = b"dynamiccl gpu-check "


def placement(n_gpus: int, n_nodes: int, nccl: tuple[int, ...]) -> str:
    """How two or more ranks can run here; of several ways the one nearest to a cluster."""
    if n_gpus != 1 or n_nodes > 1:
        return "apart"
    return "shared" if nccl >= (2, 30, 3) else "hosts"


@dataclass(frozen=True)
class Nodes:
    """This node among those that run the check together, as torchrun's (or a scheduler's) variables say."""

    number: int = 0  # of this node
    count: int = 1
    address: str = "127.0.0.1"  # of node 0
    port: int = 0  # of torchrun's own store; the check's sessions take those after it. 0: any free one

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Nodes:
        """Read GROUP_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one node without them.

        Raises ValueError where they do not fit together.
        """
        if "WORLD_SIZE" not in env:
            return cls()
        try:
            local = int(env.get("LOCAL_WORLD_SIZE", "1"))
            count = int(env["WORLD_SIZE"]) // local
            number = int(env.get("GROUP_RANK", int(env.get("RANK", "0")) // local))
            return cls(number, count, env.get("MASTER_ADDR", "127.0.0.1"), int(env["MASTER_PORT"]))
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise ValueError(
                f"the environment names ranks but not where they meet ({error}): start it with"
                " torchrun --nnodes N --nproc-per-node 1 --no-python dynamiccl lab gpu-check"
            ) from None


@dataclass(frozen=True)
class Machine:
    """What the check's jobs run on. ``emulated`` is the cluster where there is no GPU, or none is wanted."""

    device: str
    n_ranks: int  # on this node
    placement: str
    versions: dict[str, str]
    emulated: Emulated | None = None
    gpus: tuple[Gpu, ...] = ()
    nodes: Nodes = field(default_factory=Nodes)

    @classmethod
    def here(cls, cluster: str | None = None) -> Machine:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves, or an emulated cluster: ``cluster``, or the default where there is
        no GPU. Raises ValueError, OSError."""
        versions = {name: version_of(name) or "unknown" for name in ("dynamiccl", "torch")}
        versions["python"] = platform.python_version()
        nodes, found = Nodes.of(os.environ), tuple(visible_gpus())
        if cluster or not found:
            emulated = Emulated(cluster) if cluster else Emulated()
            ranks = 2 if nodes.count == 1 else 1
            return cls(f"emulated {emulated.cluster}", ranks, "apart", versions, emulated, nodes=nodes)
        if not torch.distributed.is_nccl_available():
            raise ValueError(
                f"{len(found)} GPUs, but this PyTorch ({torch.__version__}) has no NCCL: install one with CUDA"
            )
        nccl = nccl_release() or torch.cuda.nccl.version()  # PyTorch names the one it was built with
        versions |= {"nccl": ".".join(map(str, nccl)), "driver": driver(), "cuda": str(torch.version.cuda)}
        ranks = len(found) if nodes.count > 1 else max(len(found), 2)
        where = placement(len(found), nodes.count, nccl)
        return cls(found[0].name, ranks, where, versions, gpus=found, nodes=nodes)

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "emulated" if self.emulated else "nccl"

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks run on one GPU."""
        return self.placement != "apart"

    @property
    def raised(self) -> int:
        """Channels of a raised communicator."""
        return RAISED[self.placement]

    def env(self) -> dict[str, str]:
        """Environment of every job here; nothing in it changes what NCCL chooses."""
        emulated = self.emulated.env() if self.emulated else {}
        return {"OMP_NUM_THREADS": "1", **PLACEMENTS[self.placement], **emulated}

    def ranks(self, command: Sequence[str]) -> list[str]:
        """The words that run ``command`` once a rank, on this node alone."""
        words = [*program("torch.distributed.run"), "--standalone", "--local-addr", "127.0.0.1"]
        words += ["--nproc-per-node", str(self.n_ranks), "--no-python", "--"]
        if self.placement == "hosts":
            words += ["sh", "-c", 'NCCL_HOSTID=rank-$RANK exec "$0" "$@"']
        return [*words, *command]

    def facts(self) -> dict[str, Any]:
        """What run.json says about this machine: nothing that names it, its people or its folders."""
        return {
            "device": self.device,
            "gpus_per_node": len(self.gpus),
            "nodes": self.nodes.count,
            "ranks": self.n_ranks * self.nodes.count,
            "placement": self.placement,
            "network": network(),
            "raised_channels": self.raised,
            "emulated": self.emulated.cluster if self.emulated else None,
            "versions": self.versions,
            "commit": commit(),
            "plugin": build_of(),
            "gpu_id": hashlib.sha256(_SALT + self.gpus[0].uuid.encode()).hexdigest()[:12]
            if self.gpus
            else "",
            "cores": os.cpu_count(),
            "environment": {name: value for name, value in configured().items() if name in NOTED},
        }

    def clocks(self) -> dict[str, int]:
        """Clocks, temperature and throttling of the first GPU; empty without one."""
        return clocks(self.gpus[0].index) if self.gpus else {}
