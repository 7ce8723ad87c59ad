"""How a command says its arguments and options, from which ``agent/cli.py`` makes a parser and the help.

``n: Annotated[int, Option(help="How many.")] = 3`` is ``--n 3`` on the command line; a ``bool`` is a flag. A parameter
of type :class:`Call` is told what was said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple


class Argument(NamedTuple):
    """What is said without a name before it; one without a default must be said."""

    help: str
    metavar: str | None = None


class Option:
    """What is said by name. ``names``: where they are not the parameter's; ``min``, ``max``: what its number may be."""

    def __init__(
        self,
        *names: str,
        help: str,
        min: float | None = None,
        max: float | None = None,
        metavar: str | None = None,
        group: str = "Options",
    ) -> None:
        self.names, self.help, self.min, self.max, self.metavar, self.group = names, help, min, max, metavar, group


class Call(NamedTuple):
    """All values of a command's parameters, and the names of those that the command line gave."""

    values: dict[str, Any]
    given: frozenset[str]


#: Groups of options in the help, in which they stand after the others.
EMULATION, SEARCH, OUTPUT = "Without GPUs", "The search", "What it leaves"

Headroom = Annotated[
    int | None,
    Option(
        min=1,
        max=64,
        help="Make communicators with at least so many channels (NCCL_MIN_CTAS), or a tuner can only use fewer than "
        "NCCL would. Costs GPU memory for the buffers of each, and NCCL's own choice may use them too.",
    ),
]
Recording = Annotated[
    list[Path],
    Argument(
        metavar="RECORDING...", help="A trace folder of ours, or another tool's files (one a rank), or their folder."
    ),
]
ClusterName = Annotated[
    str | None,
    Option(
        "--cluster",
        help="Where it was recorded, which other tools do not say: a preset of `dynamiccl model`, or a .toml file.",
    ),
]
Nccl = Annotated[str | None, Option(help="NCCL's release, e.g. 2.28.9. Default: the recording's, else the cluster's.")]
Format = Annotated[str | None, Option("--format", help="The format; else the files tell.")]
RanksPerNode = Annotated[int | None, Option(help="Ranks on a node. Default: the recording's, else the cluster's.")]

# An emulated cluster for a job without GPUs; see :func:`emulation`.
EmulatedCluster = Annotated[
    str | None, Option("--cluster", group=EMULATION, help="Emulate this cluster: a preset's name, or a .toml file.")
]
BytesScale = Annotated[
    float | None, Option(group=EMULATION, help="Emulated bytes for each byte of the job. Default: our own job's.")
]
ComputeScale = Annotated[
    float | None, Option(group=EMULATION, help="Emulated operations for each of the job's. Default: our own job's.")
]
WeatherText = Annotated[
    str,
    Option(
        "--weather",
        group=EMULATION,
        help="How the emulated network changes, e.g. drift=0.2,burst=1,neighbour=0.5. Default: it does not.",
    ),
]

Force = Annotated[bool, Option(help="Go on although `dynamiccl doctor` finds something that must be changed.")]
Json = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
