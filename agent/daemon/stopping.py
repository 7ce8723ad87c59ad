"""End tuning from outside, for ``dynamiccl stop`` and :meth:`dynamiccl.Run.stop`; and by signals, in the tuner."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ...envs.live.locks import holder, is_locked
from ...envs.nccl.run_folder import NCCL, PLANS, RUN_ID, STATUS, STOP, TUNER, shared_roots
from ...traces.reasons import NotTuning, RunEnds, Why

if TYPE_CHECKING:  # a tuner that starts hears signals before it imports anything large
    from ...envs.live.job import Job
    from ...envs.nccl.shm import RunFolder

#: Seconds between two looks at the job.
_EVERY_S = 0.05
#: Seconds after which a tuner has seen that it is to end.
SEEN_S = 0.5
#: Signals that a key of a terminal sends.
_BY_A_KEY = (signal.SIGINT, signal.SIGQUIT)


class Stopped(NamedTuple):
    """What came of it."""

    had_tuner: bool
    job_runs: bool
    in_force: bool  # all living communicators report the default, or no table has changed anything yet
    has_begun: bool = True  # a table may have changed something
    has_rank_0: bool = True  # False: no process of rank 0 was seen here, and its node's tuner decides
    tuner_left: int | None = (
        None  # the process of a tuner that does not answer; 0: there is one, not known which
    )
    why: str = ""  # why not all communicators report the default
    table: Path | None = None  # where the table lies now that the run used
    #: no later run begins with what the memory holds of this one; None: not asked
    forgotten: bool | None = None

    @property
    def is_over(self) -> bool:
        """Nothing is tuned any more for sure: the job runs under the default, or it has ended."""
        return self.in_force or not self.job_runs


def end_tuning(run: Path, wait_s: float, is_bad: bool = False) -> Stopped:
    """End the tuner of a run folder, and restore NCCL's default on all ranks. The job goes on.

    Args:
        run: the run folder.
        wait_s: seconds, at most half for the tuner's end, the rest for the ranks' reports.
        is_bad: the table did harm: no later run begins with it.

    Raises:
        OSError, ValueError: no run, or the memory cannot be changed.
    """
    out = _results_of(run)  # the run folder goes with the job
    found = _end(run, wait_s)
    if out is None:
        return found._replace(forgotten=False if is_bad else None)
    if found.job_runs and found.has_rank_0:
        found = found._replace(table=_set_aside(out))
    return found._replace(forgotten=_forget(out) if is_bad else None)


def living_runs() -> list[Path]:
    """Run folders of this user on this machine in which a rank, a launcher or a tuner lives; the oldest first."""
    found: dict[Path, float] = {}
    for root in shared_roots():
        for run in root.iterdir():
            with contextlib.suppress(OSError):  # it goes just now
                is_run = (run / RUN_ID).is_file() and not run.is_symlink()
                if is_run and any(map(is_locked, run.iterdir())):
                    found[run] = run.stat().st_mtime
    return sorted(found, key=lambda run: found[run])


def call_off(runs: list[Path]) -> None:
    """Tell the tuners of all these runs to end, so that :func:`end_tuning` need not wait for one after the other."""
    for run in runs:
        with contextlib.suppress(OSError):
            (run / STOP).touch()


def _results_of(run: Path) -> Path | None:
    """The folder of the results of a run, as its tuner tells it: from its first summary on, or as it was asked."""
    from ..report.summary import RunSummary
    from .request import Request

    if trace := RunSummary.read(run).trace:
        return Path(trace).parent
    with contextlib.suppress(ValueError):  # damaged: the run ends all the same
        return Request.read(run, {}).out
    return None


def _set_aside(out: Path) -> Path | None:
    """Set aside the table of results whose tuner has not done that, and say so in their summary. Where the table lies
    now; None if none was in use. Raises OSError."""
    from ...envs.nccl.tables import DROPPED, TABLE, set_aside, why_dropped
    from ...traces.outside import TraceError
    from ..report.summary import DEFAULT
    from .events import tell_after

    why, path = RunEnds.STOPPED(), out / DROPPED
    with contextlib.suppress(TraceError):  # a full disk: the ranks run the default all the same
        if (out / TABLE).exists():
            set_aside(out, why)
            stand = {"kept": False, "in_force": DEFAULT, "dropped": why}
            with contextlib.suppress(OSError):  # the same, or the log is gone
                tell_after(out, stand=stand, end={"ended": why}).write(out)
    return path if why_dropped(path) == why else None


def _forget(out: Path) -> bool:
    """Let no later run begin with the table of this one. Whether the memory held it. Raises OSError, ValueError."""
    from ..report.summary import RunSummary
    from .memory import mark_failed

    told = RunSummary.read(out).memory or {}
    return bool(told.get("file") and told.get("cluster")) and mark_failed(told)


def _end(run: Path, wait_s: float) -> Stopped:
    """End the tuner and withdraw its table. Raises OSError, ValueError."""
    from ...envs.nccl.shm import RunFolder

    folder = RunFolder(run)
    had_table = folder.table.generation() > 0
    (run / STOP).touch()
    had_tuner = is_locked(run / TUNER)
    if not (run / STATUS).exists() and not _has_rank_0(folder):
        return Stopped(had_tuner, job_runs=True, in_force=False, has_rank_0=False)
    if not (run / STATUS).exists() and _nothing_to_undo(folder, had_table):
        return Stopped(had_tuner, job_runs=True, in_force=True, has_begun=False)
    from ...envs.live.job import Job  # imports pandas, which takes seconds

    job, began = Job(folder), time.monotonic()
    _await_tuner(run, until=began + max(wait_s / 2, SEEN_S))
    try:
        return _withdrawn(job, folder, had_tuner, began + wait_s)
    except FileNotFoundError:
        if run.exists():
            raise
        # Its tuner removes the folder once the job is over and summed up.
        return Stopped(had_tuner, job_runs=False, in_force=False)


def _withdrawn(job: Job, folder: RunFolder, had_tuner: bool, end: float) -> Stopped:
    """Withdraw the table of a job whose tuner has had its time; what came of it until ``end`` (monotonic seconds)."""
    run = folder.path
    is_stuck = False
    if not _has_withdrawn(folder):
        # After the job's end a tuner keeps its table, and sums up.
        is_stuck = is_locked(run / TUNER) and job.is_alive()
        _withdraw(job, folder)
    in_force, why = _await_reports(job, folder, end)
    left = (holder(run / TUNER) or 0) if is_stuck and is_locked(run / TUNER) else None
    return Stopped(had_tuner, job.is_alive(), in_force, tuner_left=left, why=str(why or ""))


def _await_tuner(run: Path, until: float) -> None:
    """The tuner's end, at most ``until`` then (monotonic seconds): it publishes the empty table before."""
    while is_locked(run / TUNER) and time.monotonic() < until:
        time.sleep(_EVERY_S)


def _has_withdrawn(folder: RunFolder) -> bool:
    """Whether a tuner has left everything to NCCL, also for processes of the job that start later."""
    from ...envs.live.job import read_confirmed

    return _is_empty(folder.table.read()) and not read_confirmed(folder.path)


def _withdraw(job: Job, folder: RunFolder) -> None:
    """Publish the empty table, also beside a tuner that may wake up: it sees then that it is to end, and does the same.

    All ranks take what rank 0 reads, so two writers make no two ways.
    """
    job.generation = folder.table.generation()  # of a table that the tuner has published meanwhile
    job.confirm({})


def _has_rank_0(folder: RunFolder) -> bool:
    """Whether rank 0 was seen on this node, or no rank yet. Its probe leaves NCCL's release at its first step."""
    rings = folder.rings()
    return (
        not rings or (folder.path / NCCL).exists() or any(ring.name.startswith("ring-0-") for ring in rings)
    )


def _nothing_to_undo(folder: RunFolder, had_table: bool) -> bool:
    """Whether the job runs NCCL untouched already; ``had_table``: one was published before the tuner was to end."""
    if folder.untouched:  # with --headroom only a table makes it so
        return False
    if not _has_begun(folder):
        return True
    return not had_table and not _tries_a_table(folder)


def _has_begun(folder: RunFolder) -> bool:
    """Whether a process here has asked for a setting, or would find a table if it asked now."""
    return _has_rows(folder) or any(ring.calls()[0] for ring in folder.rings())


def _has_rows(folder: RunFolder) -> bool:
    """Whether there is a table that leaves not everything to NCCL for good, or none that can be read."""
    return folder.table.generation() > 0 and not _is_empty(folder.table.read())


def _is_empty(found: tuple[int, bytes] | None) -> bool:
    """Whether a table, as it was read, leaves everything to NCCL, and for good: after a trial an earlier one holds."""
    if found is None:
        return False
    from ...envs.nccl.shm import decode_table

    table = decode_table(found[1])
    return not table.deciding and not table.trial_steps


def _tries_a_table(folder: RunFolder) -> bool:
    """Whether a tuner publishes a table with rows before it sees, within SEEN_S, that it is to end."""
    end = time.monotonic() + SEEN_S
    while is_locked(folder.path / TUNER) and time.monotonic() < end:
        if _has_rows(folder):
            return True
        time.sleep(_EVERY_S)
    return False


def _await_reports(job: Job, folder: RunFolder, end: float) -> tuple[bool, Why | None]:
    """Whether all living communicators report the default before ``end`` (monotonic seconds), and why not.

    Rank 0 compares what the ranks report, and leaves its finding in the run folder. A table that a tuner publishes once
    more, as it wakes up or ends, is withdrawn too.
    """
    while True:
        job.poll()
        found = folder.table.read()
        if not _is_empty(found):
            _withdraw(job, folder)
            found = folder.table.read()
        is_default, why = _reported(job, folder.path, found[0] if found else 0)
        if is_default or time.monotonic() > end or not job.is_alive():
            return is_default, why
        time.sleep(_EVERY_S)


def _reported(job: Job, run: Path, generation: int) -> tuple[bool, Why | None]:
    """What rank 0 has found since it saw the table of ``generation``, which is empty and to stay, and why not.

    Without a word of it the ranks have not begun to agree, and it would see that table first.
    """
    from ...traces.outside import read_json

    try:
        word = read_json(run / PLANS)
        seen, told, is_last = int(word["generation"]), word["why"], bool(word["is_last"])
        why = None if told is None else Why.of(told)
    except FileNotFoundError:
        return not (job.heard.has_switched or job.untouched), job.no_switch()
    except (OSError, ValueError, KeyError, TypeError):  # damaged
        return False, job.no_switch()
    if seen < generation and not is_last:
        return False, job.no_switch() or NotTuning.NOT_LOOKED()
    return not why, why


class Signals:
    """Signals to end come as a KeyboardInterrupt that says which kind it was, once the tuner can end by one.

    One that comes before :meth:`begin` waits for it. The others, while signals are not heard, do nothing.
    """

    def __init__(self) -> None:
        self.are_heard = False
        self._early: int | None = None

    def handle(self, number: int, _frame: object) -> None:
        """Raises KeyboardInterrupt."""
        if self.are_heard:
            self._interrupt(number)
        elif self._early is None:
            self._early = number

    def begin(self) -> None:
        """Signals are heard from here on. Raises KeyboardInterrupt for one that came before."""
        self.are_heard = True
        if self._early is not None:
            self._interrupt(self._early)

    def _interrupt(self, number: int) -> NoReturn:
        self.are_heard = False
        raise KeyboardInterrupt((RunEnds.INTERRUPTED if number in _BY_A_KEY else RunEnds.TERMINATED)())


@contextlib.contextmanager
def ended_politely() -> Iterator[Signals]:
    """Signals come as :class:`Signals` lets them. One that was ignored before, but for SIGTERM, still is."""
    signals = Signals()
    numbers = [signal.SIGTERM]
    for number in (*_BY_A_KEY, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            numbers.append(number)
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    # Ignored, the kernel tells of no child's end: a report that could not be drawn would pass for one that was.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: C code had set it
