"""dynamiccl from Python: start, join, query and stop runs. ``import dynamiccl`` offers all names of this module.

Imports nothing large: torch and pandas come in only when a function needs them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..traces.here import absolute

if TYPE_CHECKING:
    from ..traces.records import Table
    from .report.summary import RunSummary

__all__ = ["Run", "advise", "apply", "attach", "tune"]


class Run:
    """One run of the tuner, known by the folder of its results, ``out``.

    Args:
        out: the folder of its results, or the run folder that ``dynamiccl env`` made.
        process: the launcher or tuner that this Python process has started, if any.
    """

    def __init__(self, out: str | Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.out = absolute(out)
        self.process = process
        self._led_to: Path | None = None  # by a run folder, which is gone once the job has ended

    def __repr__(self) -> str:
        return f"Run({str(self.out)!r})"

    def _results(self) -> Path:
        """The folder of the results, of a run folder too. Raises ValueError if it is not known."""
        from ..envs.nccl.run_folder import TABLE
        from .daemon.request import Request

        if (self.out / TABLE).is_file():
            self._led_to = Request.read(self.out, {}).out
            if self._led_to is None:
                raise ValueError(
                    f"{self.out} is a run folder that names no results: give the folder of the results"
                )
        return self._led_to or self.out

    def status(self) -> dict[str, Any]:
        """How the run stands now, with the keys of ``dynamiccl top --json``. Unknown values are None.

        Raises:
            ValueError: for a run folder whose tuner does not tell where its results are.
        """
        from .report.runs import state

        return state(self._results())

    def summary(self) -> RunSummary:
        """What the run came to, as in ``summary.json``; falsy as long as the run has left none."""
        from .report.summary import RunSummary

        return RunSummary.read(self._results())

    @property
    def table(self) -> Table | None:
        """The table that the run keeps, or None if it keeps NCCL's default.

        Raises:
            ValueError: if ``table.json`` is damaged, or as :meth:`status`.
        """
        from ..envs.nccl.tables import load_table

        file = self._results() / "table.json"
        return load_table(file) if file.exists() else None

    def stop(self, wait_s: float = 30, bad: bool = False) -> bool:
        """End tuning and restore NCCL's default on all ranks. The job goes on.

        The table stays in the results, as ``dropped-table.json``.

        Args:
            wait_s: seconds to wait until all ranks report the default.
            bad: the table did harm: no later run begins with it.

        Returns:
            True once the job runs under the default, or has ended; False if neither was seen in time.

        Raises:
            ValueError: if there is no such run, or it had ended.
            OSError: with ``bad``, if the memory between jobs cannot be changed.
        """
        from .commands import run_folder
        from .daemon.stopping import end_tuning

        return end_tuning(run_folder(str(self.out)), wait_s, bad).is_over

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the process that this run was started with has ended.

        Returns:
            Its exit status: the job's own, 128 + n after signal n.

        Raises:
            ValueError: if this Python process has not started the run.
            subprocess.TimeoutExpired: if it runs longer than ``timeout_s``.
        """
        if self.process is None:
            raise ValueError(f"{self.out} was not started here: ask status() whether it has ended")
        return self.process.wait(timeout_s)


def tune(command: Sequence[str] = (), *, out: str | Path | None = None, **options: Any) -> Run:
    """Start a job with a tuner beside it, as ``dynamiccl tune`` does, and return at once.

    Args:
        command: the job's, e.g. ``["torchrun", "--nproc-per-node", "8", "train.py"]``. Without one, our own ZeRO job is
            trained and tuned.
        out: folder of the results; default: a new one below ``runs/tune``. Each task of a Slurm step has a folder in
            it.
        options: of ``dynamiccl tune`` with underscores: ``cluster="dgx-h100-2x8"``, ``once=True``, ``budget=0.02``.

    Returns:
        The run; ``run.wait()`` returns the job's exit status.

    Raises:
        TypeError: for an option that ``dynamiccl tune`` does not have, and for a command that is one text.
    """
    from ..traces.here import program
    from .report.outputs import given_folder, new_folder

    words = _words("tune", options)
    job = ["--", *_job(command)] if command else []
    folder = given_folder(absolute(out)) if out is not None else new_folder()
    return Run(folder, subprocess.Popen([*program(), "tune", *words, "--out", str(folder), *job]))


def attach(run: str | Path, *, out: str | Path | None = None, **options: Any) -> Run:
    """Start a tuner for a job that runs already, as ``dynamiccl tune --attach`` does.

    Args:
        run: the folder that ``dynamiccl env`` made, or the results of a run without a tuner.
        out: folder of the results. Default: ``run`` itself if it has results; else the job's ``out``; else a new one.
        options: of ``dynamiccl tune`` with underscores.

    Raises:
        TypeError: for an option that ``dynamiccl tune`` does not have.
        ValueError: if there is no such run.
    """
    from ..traces.here import program
    from .report.outputs import task_folder

    words = _words("tune", {**options, "attach": str(run)})
    folder = absolute(task_folder(Path(out) if out is not None else _results_of(run)))
    return Run(folder, subprocess.Popen([*program(), "tune", *words, "--out", str(folder)]))


def _results_of(run: str | Path) -> Path:
    """The folder in which a tuner that joins ``run`` leaves its results. Raises ValueError if there is no run."""
    from .commands import results, run_folder
    from .daemon.request import Request
    from .report.outputs import new_folder, run_of

    folder = run_folder(str(run))
    given = results(run)
    if run_of(given) is not None:
        return given
    return Request.read(folder, {}).out or new_folder()


def apply(table: str | Path, command: Sequence[str], **options: Any) -> int:
    """Run a job under a fixed table, without a tuner, and wait until it ends.

    Args:
        table: a table's file, or the folder of a run that left one.
        command: the job's command.
        options: the options of ``dynamiccl apply`` with underscores.

    Returns:
        The job's exit status.

    Raises:
        TypeError: for an option that ``dynamiccl apply`` does not have, and for a command that is one text.
    """
    from ..traces.here import program

    words = _words("apply", options)
    started = [*program(), "apply", str(table), *words, "--", *_job(command)]
    return subprocess.run(started, check=False).returncode


def advise(*recordings: str | Path, **options: Any) -> dict[str, Any]:
    """Predict what tuning would gain for a recorded job, as ``dynamiccl advise --json`` does.

    Args:
        recordings: a run's folder, or files of other tools, one a rank.
        options: the options of ``dynamiccl advise`` with underscores: ``cluster="dgx-h100-2x8"``.

    Returns:
        The keys of ``dynamiccl advise --json``.

    Raises:
        TypeError: for an option that ``dynamiccl advise`` does not have.
        ValueError: for a recording that cannot be read, with the cause and the cure.
    """
    from ..traces.here import program

    words = _words("advise", options)
    command = [*program(), "advise", *map(str, recordings), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2 or not done.stdout:
        raise ValueError(done.stderr.strip().removeprefix("error: "))
    if done.returncode:  # no table was written, and the file of another one is there
        print(done.stderr, end="", file=sys.stderr)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _job(command: Sequence[str]) -> Sequence[str]:
    """A job's command. Raises TypeError for one in a single text, whose letters would be its words."""
    if isinstance(command, str):
        raise TypeError(f"a command is a list of words: give shlex.split({command!r})")
    return command


def _words(command: str, options: Mapping[str, Any]) -> list[str]:
    """Options as a command line has them. None stands for an option that is not given, and so does False, but for a
    flag that is on by default."""
    from .cli import COMMANDS

    found = {name: param for param in COMMANDS.named(command).params for name in param.opts}
    words = list[str]()
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if flag not in found:
            raise TypeError(f"{command}() has no option {name!r}: dynamiccl {command} --help lists them")
        if value is True:
            words.append(flag)
        elif value is False:
            words += found[flag].secondary_opts
        elif value is not None:
            words += [flag, str(value)]
    return words
