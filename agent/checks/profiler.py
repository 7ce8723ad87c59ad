"""What our profiler needs from the machine, and who else wants its place: facts that doctor.py says."""

from __future__ import annotations

#: What NCCL takes of shared memory for kernel times, a rank and communicator; see envs/nccl/plugin/room.c.
POOL_MIB = 34
WITHOUT_CRASH = (2, 32)  # the first release that goes on where it is short
#: Part of a library's name -> whose it is, and who names it.
_KNOWN = {
    "inspector": "NVIDIA's Inspector, which operators name for every job in a Slurm TaskProlog or SPANK plugin",
    "dynamiccl": "",
}


def no_room_for_kernel_times(shm_free: int | None, ranks: int) -> tuple[int, int, int] | None:
    """(MiB of shared memory that are free, ranks of the node, MiB that NCCL takes); None where there is room.

    ``shm_free``: bytes, None where it is not known.
    """
    if shm_free is None or shm_free >= ranks * POOL_MIB * 2**20:
        return None
    return shm_free // 2**20, ranks, ranks * POOL_MIB


def whose_profiler(value: str) -> str:
    """Who has the place of NCCL's profiler by the value of NCCL_PROFILER_PLUGIN; empty where nobody has, or we."""
    if value in ("", "none"):
        return ""
    return next((whose for part, whose in _KNOWN.items() if part in value.lower()), "another profiler")
