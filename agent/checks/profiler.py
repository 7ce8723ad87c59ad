"""What our profiler needs from the machine, and who else wants its place: facts that doctor.py and faults.py say."""

from __future__ import annotations

from ...envs.nccl.plugin.build import named, names_none
from .facts import Facts

#: What NCCL takes of shared memory for kernel times, a rank and communicator; see envs/nccl/plugin/room.c.
POOL_MIB = 34
#: So many communicators a rank are nothing unusual: of all ranks, of the shards of a model, of their copies.
_USUAL = 3
#: Bytes of a whole ring: its records, and those that are told once, 128 each. And the share of the free space that the
#: rings of a node take at most, an eighth; each rank looks anew. See envs/nccl/plugin/ring.c.
RING_BYTES, RINGS_PART = 128 + (65_536 + 1_024) * 128, 8
#: How a container gets the memory for rings and kernel times of three communicators a rank.
MORE_MEMORY = "docker run --shm-size=2g for up to 8 ranks, 4g for 16"


def _ranks(facts: Facts) -> int:
    return facts.ranks_per_node or facts.n_gpus or 1


def little_room_for_kernel_times(facts: Facts) -> tuple[int, int, int, int] | None:
    """(MiB of shared memory that are free, ranks, MiB that NCCL takes for a communicator of theirs, for how many there
    is room beside our rings); None where there is room for a usual job, or nothing is known."""
    ranks = _ranks(facts)
    if facts.shm_free is None:
        return None
    free_mib, needed_mib = facts.shm_free // 2**20, ranks * POOL_MIB
    # They lie there before the first kernel time.
    rings = min(ranks * RING_BYTES, facts.shm_free // RINGS_PART)
    n_comms = (facts.shm_free - rings) // 2 // (needed_mib * 2**20)  # half stays the job's, see room.c
    return (free_mib, ranks, needed_mib, n_comms) if n_comms < _USUAL else None


def little_room_for_rings(facts: Facts) -> tuple[int, int, int] | None:
    """(MiB of shared memory that are free, ranks, MiB that whole rings need); None where they have it, or not known."""
    ranks = _ranks(facts)
    # The last rank finds the rings of the others there.
    needed = (ranks * RINGS_PART + ranks - 1) * RING_BYTES
    if facts.shm_free is None or facts.shm_free >= needed:
        return None
    return facts.shm_free // 2**20, ranks, -(-needed // 2**20)


#: Part of a library's name -> whose it is, and who names it.
_KNOWN = {
    "inspector": "NVIDIA's Inspector, which operators name for every job in a Slurm TaskProlog or SPANK plugin"
}


def whose_profiler(facts: Facts) -> str:
    """Who has the place of NCCL's profiler; empty where nobody has, or we."""
    value = facts.env.get("NCCL_PROFILER_PLUGIN", "")
    if not value or names_none(value) or named(value):
        return ""
    return next((whose for part, whose in _KNOWN.items() if part in value.lower()), "another profiler")
