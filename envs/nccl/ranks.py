"""One process a rank on this machine, also where several ranks must share one GPU.

``python -m dynamiccl.envs.nccl.ranks --ranks 2 --placement hosts -- python train.py`` starts ``train.py`` twice, joined
by environment variables as torchrun's are. NCCL refuses two ranks on one GPU unless it is told otherwise, in one of two
ways:

* ``hosts``: each rank claims to be a host of its own (NCCL_HOSTID), and the ranks talk through sockets. Every release.
* ``shared``: NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30.3 and newer; the ranks talk through the GPU's memory.

Ranks that share a GPU take turns on it (without MPS), so their times say little of a cluster. Both placements raise the
number of channels to 16, since NCCL would make one or two and leave nothing to choose.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_CHANNELS = {"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "16"}
#: Environment of all ranks, by placement.
PLACEMENTS: dict[str, dict[str, str]] = {
    "apart": {},  # a GPU each, or no GPU at all
    "hosts": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", **_CHANNELS},
    "shared": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", **_CHANNELS},
}


def placements(n_gpus: int, nccl: tuple[int, ...]) -> tuple[str, ...]:
    """The ways in which two or more ranks can run here, the one nearest to a cluster first."""
    if n_gpus != 1:
        return ("apart",)
    return ("shared", "hosts") if nccl >= (2, 30, 3) else ("hosts",)


def rank_env(rank: int, n_ranks: int, port: int, placement: str) -> dict[str, str]:
    """What one rank has in its environment beside the launcher's own."""
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **PLACEMENTS[placement]}
    env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return env | ({"NCCL_HOSTID": f"dynamiccl-{rank}"} if placement == "hosts" else {})


def run(command: Sequence[str], n_ranks: int, placement: str = "apart") -> int:
    """Run ``command`` once a rank; 0 when all end well, else the status of the first that did not.

    The others are then ended, as they are when this process is told to stop by SIGTERM or SIGINT (128 + signal).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asked: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    ranks = [
        subprocess.Popen(list(command), env={**os.environ, **rank_env(rank, n_ranks, port, placement)})
        for rank in range(n_ranks)
    ]
    try:
        while not asked and any(rank.poll() is None for rank in ranks):
            failed = [rank.returncode for rank in ranks if rank.poll()]
            if failed:
                return failed[0] if failed[0] > 0 else 128 - failed[0]
            time.sleep(0.05)
        return 128 + asked[0] if asked else max(rank.wait() for rank in ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.terminate()
        end = time.monotonic() + 5
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()  # a rank that waits in a collective for a dead one does not hear SIGTERM
            rank.wait()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--placement", choices=tuple(PLACEMENTS), default="apart")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    return run(args.command, args.ranks, args.placement)


if __name__ == "__main__":
    sys.exit(main())
