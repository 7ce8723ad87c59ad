"""Known faults of NCCL releases that a tuner must know of, each with its source: the one table of them.

The plugin masks some of them (``hazards`` in ``envs/nccl/plugin/tuner.c``, ``room.c`` there); the rest is for people.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...envs.nccl.variables import CELLS, Cell
from .facts import Facts
from .profiler import MORE_MEMORY, little_room_for_kernel_times

Release = tuple[int, ...]
_NEWEST = (99,)


@dataclass(frozen=True)
class Fault:
    """One fault of the releases from ``first`` on and below ``below``, on ``machine``, '' for every one.

    ``must_change``: the job is at risk, or loses time. ``unless``: variable and value that avoid it. ``cells``: that
    have it; one must be offered. ``where``: what brings it on; unknown releases then count. Gaps of ``what`` and
    ``cure``: ``{nccl}``, ``{newer}``, ``{found}``.
    """

    name: str
    first: Release
    below: Release
    what: str
    cure: str
    source: str
    must_change: bool = False
    machine: str = ""
    unless: tuple[str, str] = ("", "")
    cells: frozenset[Cell] = CELLS
    where: Callable[[Facts], Any] | None = None


FAULTS = (
    Fault(
        "old NCCL",
        (0,),
        (2, 22),
        "NCCL {nccl} has no tuner interface that we serve",
        "{newer}",
        "plugins/tuner of NCCL's releases",
        must_change=True,
    ),
    Fault(
        "no profiler",
        (2, 22),
        (2, 28, 3),
        "NCCL {nccl} does not report calls where they are made (2.28.3 is the first that does), so the ranks share no "
        "count at which they could switch tables",
        "{newer}; or dynamiccl apply --no-gate, whose table holds from the first call",
        "plugins/profiler of NCCL's releases: interface 5",
        must_change=True,
    ),
    Fault(
        "profiler fault",
        (2, 30, 3),
        (2, 30, 4),
        "NCCL {nccl} can crash in a multi-node all-to-all while a profiler is loaded",
        "use NCCL 2.30.4 or newer",
        "NVIDIA/nccl#2112",
        must_change=True,
    ),
    Fault(
        "profiler overhead",
        (2, 31),
        (2, 32),
        "NCCL {nccl}: kernel times cost small collectives 4 to 13 %",
        "set DYNAMICCL_SAMPLE_EVERY=0, or use NCCL 2.30.4 or a newer 2.30",
        "NVIDIA/nccl#2355",
        must_change=True,
        unless=("DYNAMICCL_SAMPLE_EVERY", "0"),
    ),
    Fault(
        "proxy slots",
        (0,),
        (2, 29, 3),
        "NCCL {nccl} on aarch64 loses slots of its proxy until all ranks hang without a word (NVIDIA/nccl#2353)",
        "use NCCL 2.29.3 or newer",
        "NVIDIA/nccl#2353",
        must_change=True,
        machine="aarch64",
    ),
    Fault(
        "LL128 on Grace",
        (2, 27),
        _NEWEST,
        "NCCL {nccl} can corrupt data over nodes with LL128 where Grace's C2C link joins network and GPU, as on GH200 "
        "(NVIDIA/nccl#2001, #2053); no table replaces another protocol by LL128 over nodes here, but NCCL itself may "
        "choose it",
        "set NCCL_LL128_C2C=0, or NCCL_PROTO=^LL128: tuning goes on with the other protocols",
        "NVIDIA/nccl#2001 (data corruption on GH200 from 2.27.3 on), #2053 (cause; closed, in no release that we know)",
        machine="aarch64",
        unless=("NCCL_LL128_C2C", "0"),
        cells=frozenset(cell for cell in CELLS if cell[2] == "ll128"),
    ),
    Fault(
        "registered buffers",
        (2, 24),
        (2, 33),
        "NCCL {nccl} can hang over nodes for good where buffers are registered with the network and LL is followed by "
        "Simple (NVIDIA/nccl#2389); no table replaces another protocol by LL over nodes here",
        "nothing, unless ranks hang at 100 %: register no buffers then (NCCL_LOCAL_REGISTER=0, "
        "NCCL_GRAPH_REGISTER=0), or use a release that has the fix",
        "NVIDIA/nccl#2389",
    ),
    Fault(
        "kernel times",
        (2, 27),
        (2, 32),
        "shared memory has {found[0]} MiB free. NCCL takes {found[2]} MiB for the kernel times of {found[1]} ranks, "
        "for each communicator, so beside our rings there is room for {found[3]}. Where it is short a rank would crash "
        "(NVIDIA/nccl#2326), so a job with more communicators a rank has step times alone",
        f"give the container more ({MORE_MEMORY}), or use NCCL 2.32",
        "NVIDIA/nccl#2326; read in 2.27.7, 2.28.9, 2.29.7 and 2.30.7, see envs/nccl/plugin/room.c",
        where=little_room_for_kernel_times,
    ),
)
