"""GPU memory that NCCL takes when a communicator runs an algorithm for the first time.

From 2.22 on NCCL connects an algorithm at its first call (``NCCL_RUNTIME_CONNECT``) and allocates its buffers; if
memory is short, the job fails. An algorithm's protocols share its connections. Source: NCCL 2.30; no GPU has confirmed
the bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ...traces.fingerprint import Fingerprint

#: Bytes of the buffers of one connection to one peer on one channel, by the variable that sets them (src/init.cc).
BUFFERS = {
    "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8,
    "NCCL_BUFFSIZE": 4 << 20,
}
#: NCCL connects all channels that a communicator has. A profile only shows those that its messages used.
CHANNELS = 32
#: Bytes of one chunk of NVLS on one node, and at most over nodes; each buffer has 8 (src/transport/nvls.cc).
NVLS_CHUNK, NVLS_CHUNK_OVER_NODES = 128 << 10, 256 << 10
#: Allocations are rounded up to so many bytes.
PAGE = 2 << 20
#: A number as strtoll reads it: hexadecimal after 0x, octal after 0 (src/misc/param.cc).
_NUMBER = re.compile(r"\s*\+?(0x[0-9a-f]+|0[0-7]*|[1-9][0-9]*)\s*", re.IGNORECASE)


def of_first_use(algo: str, slot: Fingerprint, settings: Mapping[str, str]) -> int | float:
    """The most bytes on each GPU that the first call of ``algo`` takes on a communicator of this slot (arrays (1,)).

    ``algo``: a name in ``traces.records.PAIRS``. ``settings``: NCCL's, which may set the size of buffers. Returns inf
    if they set one that cannot be read.
    """
    n_ranks, n_nodes = int(slot.n_ranks[0]), int(slot.n_nodes[0])
    channels = max(CHANNELS, int(slot.comm_channels[0]))
    per_node = math.ceil(n_ranks / n_nodes)
    both_ways = 2 * channels * connection(settings)
    if algo == "ring":
        return both_ways
    if algo == "pat":  # two binomial trees, one for each function (src/transport/generic.cc)
        return both_ways * 2 * math.ceil(math.log2(n_ranks))
    over_nodes = both_ways if n_nodes > 1 else 0
    if algo == "nvls":
        chunk = NVLS_CHUNK_OVER_NODES if n_nodes > 1 else NVLS_CHUNK
        return 2 * channels * per_node * 8 * chunk + over_nodes
    return both_ways * per_node + over_nodes  # CollNet: each rank reaches the others of its node


def connection(settings: Mapping[str, str]) -> int | float:
    """Bytes of one connection to one peer on one channel; inf if a setting cannot be read."""
    total = 0
    for name, usual in BUFFERS.items():
        text = settings.get(name, "")
        size = _bytes(text) if text else usual
        if size is None:
            return math.inf
        total += size
    return math.ceil(total / PAGE) * PAGE


def _bytes(text: str) -> int | None:
    """The number of bytes that NCCL reads in a setting; None if that is in doubt."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    digits = found[1]
    is_octal = digits.startswith("0") and digits.isdigit()
    return int(digits, 8 if is_octal else 0)
