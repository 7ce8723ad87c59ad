"""One file per command of ``dynamiccl``: its options and help text; the work lies in the package that owns it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ...envs.sim.emulated.settings import Emulated
    from ...traces.records import Table


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

    scales = {"bytes_scale": bytes_scale, "compute_scale": compute_scale}
    given = {name: value for name, value in scales.items() if value is not None}
    emulated = Emulated(cluster, seed=seed, weather=weather, **given)
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
