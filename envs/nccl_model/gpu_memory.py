"""GPU memory that NCCL takes when a communicator runs an algorithm for the first time.

From 2.22 on NCCL connects an algorithm at its first call (``NCCL_RUNTIME_CONNECT``) and allocates its buffers then. If
the GPU has too little memory left, the call fails, and the job with it. The protocols of an algorithm share its
connections, so another protocol takes nothing more.

The bounds are read from NCCL 2.30's source; no GPU has confirmed them.
"""

from __future__ import annotations

import math

from ...traces.fingerprint import Fingerprint

#: Bytes of one connection to one peer on one channel: the buffers of LL, LL128 and Simple (src/init.cc).
CONNECTION = 8 * 512 * 8 * 16 + 120 * 640 * 8 * 8 + (4 << 20)
#: Bytes of NVLS for each channel, head and direction: 8 steps of 128 KiB (src/transport/nvls.cc).
NVLS_BUFFER = 8 * 128 * 1024
#: The most channels that NCCL has given NVLS.
NVLS_CHANNELS = 32


def of_first_use(algo: str, slot: Fingerprint) -> int:
    """The most bytes on each GPU that the first call of ``algo`` takes on a communicator of this slot (arrays (1,)).

    ``algo``: a name in ``traces.records.PAIRS``.
    """
    n_ranks, n_nodes = int(slot.n_ranks[0]), int(slot.n_nodes[0])
    channels = int(slot.comm_channels[0])
    per_node = math.ceil(n_ranks / n_nodes)
    both_ways = 2 * channels * CONNECTION
    if algo == "ring":
        return both_ways
    if algo == "pat":  # two binomial trees, one for each function (src/transport/generic.cc)
        return both_ways * 2 * math.ceil(math.log2(n_ranks))
    over_nodes = both_ways if n_nodes > 1 else 0
    if algo == "nvls":
        return 2 * NVLS_CHANNELS * per_node * NVLS_BUFFER + over_nodes
    return both_ways * per_node + over_nodes  # CollNet: each rank reaches the others of its node
