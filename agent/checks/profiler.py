"""What our profiler needs from the machine, and who else wants its place: facts that doctor.py says."""

from __future__ import annotations

from ...envs.nccl.plugin.build import named, names_none
from .facts import Facts

#: What NCCL takes of shared memory for kernel times, a rank and communicator; see envs/nccl/plugin/room.c.
POOL_MIB = 34
WITHOUT_CRASH = (2, 32)  # the first releases that go on where it is short


def no_room_for_kernel_times(facts: Facts) -> tuple[int, int, int] | None:
    """(MiB of shared memory that are free, ranks, MiB that NCCL takes); None where there is room, or nothing known."""
    ranks = facts.ranks_per_node or facts.n_gpus or 1
    if facts.shm_free is None or facts.release(WITHOUT_CRASH) or facts.shm_free >= ranks * POOL_MIB * 2**20:
        return None
    return facts.shm_free // 2**20, ranks, ranks * POOL_MIB


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
