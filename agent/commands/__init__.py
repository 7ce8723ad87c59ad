"""One file per command of ``dynamiccl``: its options and help text; the work lies in the package that owns it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from ...envs.sim.emulated.settings import Emulated
    from ...traces.records import Table

Headroom = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Make communicators with at least so many channels (NCCL_MIN_CTAS), or a tuner can only use fewer than "
        "NCCL would. Costs GPU memory for the buffers of each, and NCCL's own choice may use them too.",
        show_default=False,
    ),
]
Recording = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORDING...",
        help="A trace folder of ours, or another tool's files (one a rank), or their folder; `dynamiccl advise --help` "
        "lists the formats.",
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Where it was recorded, which other tools do not say: a preset of `dynamiccl model`, or a .toml file.",
        show_default=False,
    ),
]
Nccl = Annotated[
    str | None,
    typer.Option(help="NCCL's release, e.g. 2.28.9. Default: the recording's, else the cluster's.", show_default=False),
]
Format = Annotated[str | None, typer.Option("--format", help="The format; else the files tell.", show_default=False)]
RanksPerNode = Annotated[
    int | None, typer.Option(help="Ranks on a node. Default: the recording's, else the cluster's.", show_default=False)
]

# An emulated cluster for a job without GPUs; see :func:`emulation`.
EmulatedCluster = Annotated[
    str | None,
    typer.Option("--cluster", help="Emulate this cluster (a preset's name or a TOML file); no GPU is needed."),
]
BytesScale = Annotated[
    float | None, typer.Option("--bytes-scale", help="Emulated bytes for each byte of the job. Default: our own job's.")
]
ComputeScale = Annotated[
    float | None,
    typer.Option("--compute-scale", help="Emulated operations for each of the job's. Default: our own job's."),
]
WeatherText = Annotated[
    str,
    typer.Option(
        "--weather", help="How the emulated network changes: drift=0.2,burst=1,neighbour=0.5; empty: it does not."
    ),
]

Force = Annotated[
    bool, typer.Option("--force", help="Go on although `dynamiccl doctor` finds something that must be changed.")
]


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong and how to cure it, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Within it, an error of these kinds ends the command as :func:`fail` does."""
    try:
        yield
    except kinds as error:
        fail(str(error))


def emulation(
    cluster: str, bytes_scale: float | None, compute_scale: float | None, seed: int, weather: str
) -> Emulated:
    """The emulated cluster that these options mean; one that there is none of is refused."""
    from ...envs.sim.emulated.settings import Emulated

    usual = Emulated()
    by = usual.bytes_scale if bytes_scale is None else bytes_scale
    compute = usual.compute_scale if compute_scale is None else compute_scale
    emulated = Emulated(cluster, by, compute, seed, weather)
    with refusing(ValueError, OSError):
        emulated.check()
    return emulated


def refuse_traps(
    command: list[str] | None,
    force: bool,
    emulated: bool = False,
    table: Table | None = None,
    but: tuple[str, ...] = (),
) -> None:
    """What ``dynamiccl doctor`` says must be changed stops here, before anything is started, unless forced.

    ``but``: traps that do not bear on what is asked for.
    """
    from ..checks.doctor import WITHOUT_NCCL, examine, gather

    found = [trap for trap in examine(gather(command, table)) if trap.must_change and trap.name not in but]
    if emulated:  # NCCL has no part in it
        found = [trap for trap in found if trap.name in WITHOUT_NCCL]
    if found and not force:
        what = "; ".join(f"{trap.what}: {trap.cure}" for trap in found)
        fail(f"{what} (`dynamiccl doctor` tells more, --force goes on all the same)")
    for trap in found:
        print(f"warning: {trap.what}: {trap.cure}", file=sys.stderr)


def run_folder(where: str) -> Path:
    """A run folder by its path, or by the folder that holds a run's results. Raises ValueError."""
    path = Path(where)
    if not (path / "run").is_symlink():
        return path
    if not (path / "run").exists():
        raise ValueError(f"{where}: this run has ended; what it left is in that folder")
    return (path / "run").resolve()


def one_thread() -> None:
    """Before numpy is imported: the matrices here are small, and more threads only fight."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
