"""Where a run leaves its results, a folder that no other run can have at the same time; and what a job itself logs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...envs.live.locks import Busy, is_locked, lock
from ...traces.here import absolute, user_folder
from ...traces.outside import parse_json, text_of

#: Below this a run that was given no folder makes one of its own; ``latest`` leads to the newest.
ROOT = Path("runs/tune")
#: Says where the memory is; one of OFF: nowhere.
VARIABLE, OFF = "DYNAMICCL_MEMORY", ("", "off", "none")
#: Files of a run that the next run in the same folder removes, as its trace.
RESULTS = (
    *("job.log", "job.jsonl", "tuner.log", "tuner.log.1"),
    *("summary.json", "table.json", "dropped-table.json", "report.html", "steps.json"),
)
#: Who runs in a folder holds it. It stays, and names the Slurm step.
LOCK = "lock"
#: First words of a file that stands in for a link, and the most bytes that such a file has.
_LEADS_TO, _LONGEST = "dynamiccl leads to ", 8192


def claim(out: Path | None) -> tuple[Path, int]:
    """(folder, its lock): ``out``, or a new one below ROOT, named after the scheduler's job or the time.

    Where a scheduler starts this command several times in one job (``srun`` with a task a node) each has a folder of
    its own in it. Raises Busy, OSError.
    """
    if out is not None:
        return _take(task_folder(out))
    for number in range(1, 100):
        folder = task_folder(_numbered(ROOT / _job_id(), number))
        if number < 99 and _is_used(folder):
            continue  # by an earlier start under the same name, of a job that was queued again
        try:
            claimed = _take(folder)
        except Busy:
            continue
        _point(ROOT / "latest", os.path.relpath(folder, ROOT))
        return claimed
    raise Busy(f"{ROOT / _job_id()} and 98 more are in use: give --out")


def _take(folder: Path) -> tuple[Path, int]:
    """A folder and its lock. Raises Busy, OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder, lock(folder / LOCK, f"{folder} belongs to a run that is not over: give another --out")


def _is_used(folder: Path) -> bool:
    """Whether a run has begun in a folder: it leaves its lock, however early it is killed."""
    return (folder / LOCK).exists() or _has_results(folder)


def _has_results(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*RESULTS, "trace"))


def task_folder(folder: Path) -> Path:
    """The folder of this task of a scheduler's job: one within ``folder`` if the job has several tasks.

    ``folder`` itself if it is that one already: the launcher's, which its tuner claims again.
    """
    n_tasks = int(os.environ.get("SLURM_NTASKS", "1") or 1)
    if n_tasks <= 1 or "SLURM_PROCID" not in os.environ:
        return folder
    task = f"task-{os.environ['SLURM_PROCID']}"
    return folder if folder.name == task else folder / task


def begin(out: Path | None, say: Callable[[str], object]) -> tuple[Path, int]:
    """Claim a folder for a new run, and remove an earlier run's results from it. Returns and raises as :func:`claim`.

    Raises ValueError for a folder with such files in which no run has been. Results of another step of the same Slurm
    job stay: the next free folder is taken, ``out-2``, and ``say`` gets a line.
    """
    for number in range(1, 100):
        if out is not None and number == 1:
            refuse_others(task_folder(out))
        try:
            folder, fd = claim(_numbered(out, number) if out is not None else None)
        except Busy:
            if number == 1:
                raise
            continue
        if out is None or not _is_anothers(folder, fd, is_given=number == 1):
            if number > 1:
                say(
                    f"{out} holds the results of another step of this Slurm job: those of this step go to {folder}"
                )
            _clear(folder, fd)
            return folder, fd
        os.close(fd)
    raise Busy(f"{out} and 98 more hold results of other runs: give another --out")


def refuse_others(folder: Path) -> None:
    """Raise ValueError where results would replace files that no run of ours has left."""
    is_ours = (folder / LOCK).exists() or (folder / "trace" / "header.json").exists()
    names = [name for name in RESULTS if (folder / name).exists()]
    if names and not is_ours:
        raise ValueError(
            f"{folder} has files of its own ({', '.join(names)}), not a run's: give another --out"
        )


def new_folder() -> Path:
    """A folder below ``runs/tune`` that no other run has; ``latest`` leads to it.

    It is made here: the child takes a while to make it, and a second call must not get the same one.
    """
    root = absolute(ROOT)
    name = root / _job_id()
    for number in range(1, 1000):
        folder = task_folder(_numbered(name, number))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # the child says why, or starts the job untuned
            break
        _point(root / "latest", os.path.relpath(folder, root))
        break
    return folder


def given_folder(out: Path) -> Path:
    """The folder that the child takes where it is given ``out``, by the rule of :func:`begin`; nothing is made."""
    for number in range(1, 100):
        folder = task_folder(_numbered(out, number))
        if number > 1 and is_locked(folder / LOCK):
            continue
        try:
            fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no run has been here, or the child says what is wrong
            return folder
        try:
            if not _is_anothers(folder, fd, is_given=number == 1):
                return folder
        finally:
            os.close(fd)
    return out


def _numbered(out: Path, number: int) -> Path:
    """``out``, ``out-2``, ``out-3``, ..."""
    if number == 1:
        return out
    named = out if out.name not in ("", "..") else Path(os.path.abspath(out))
    return named.parent / f"{named.name}-{number}"


def _is_anothers(out: Path, fd: int, is_given: bool) -> bool:
    """Whether this run must leave the results in ``out`` alone. ``fd``: its lock, which names the Slurm step.

    In the folder that was given these are the results of other steps of this Slurm job, in any other folder also those
    of other jobs.
    """
    if not _has_results(out):
        return False
    job, step = _slurm_step()
    earlier_job, _, earlier = os.pread(fd, 64, 0).decode(errors="replace").strip().partition(".")
    if not is_given:
        return (job, step) != (earlier_job, earlier)
    return job == earlier_job and "" not in (step, earlier) and step != earlier


def _clear(out: Path, fd: int) -> None:
    """Remove an earlier run's results, and leave the Slurm step of this run in the lock. Raises OSError.

    The trace too: until the new tuner writes one, if it ever does, it would tell of the earlier job as of this one.
    """
    for name in RESULTS:
        (out / name).unlink(missing_ok=True)
    trace = out / "trace"
    if trace.is_dir():
        from ...traces.header import (
            files_of_trace,
        )  # numpy: the job's start waits for it only where there is a trace

        for path in files_of_trace(trace):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # files of others are in it
            trace.rmdir()
    with contextlib.suppress(OSError):  # a full disk does not keep a job from starting
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{'.'.join(_slurm_step())}\n".encode(), 0)


def _slurm_step() -> tuple[str, str]:
    """The Slurm job of this process and its step, '' where there is none."""
    return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")


def default_url() -> str | None:
    """Where the memory is unless told otherwise: DYNAMICCL_MEMORY, else below the user's data folder.

    None: the memory is off, or no folder of the user is known.
    """
    told = os.environ.get(VARIABLE)
    if told is not None:
        return None if told.strip().lower() in OFF else told
    base = user_folder("XDG_DATA_HOME", ".local/share")
    return str(base / "dynamiccl" / "clusters") if base else None


def full_url(memory: str) -> str:
    """The place of a memory, the same from every folder; what is no URL is a local folder."""
    return memory if "://" in memory else str(absolute(memory))


def _job_id() -> str:
    env = os.environ
    if job := env.get("SLURM_JOB_ID"):
        return ".".join(filter(None, [job, env.get("SLURM_STEP_ID")]))
    return time.strftime("%Y%m%d-%H%M%S")


def link(out: Path, run: Path) -> None:
    """Let ``out/run`` lead to the run folder: `stop` and `--attach` take either."""
    _point(out / "run", str(run))


def _point(path: Path, target: str) -> None:
    """Make ``path`` lead to ``target``, as :func:`followed` reads it: a link, or a file where links cannot be made."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    for make in (draft.symlink_to, lambda text: draft.write_bytes(os.fsencode(_LEADS_TO + text + "\n"))):
        try:
            draft.unlink(missing_ok=True)
            make(target)
            os.replace(draft, path)
            return
        except OSError:
            continue


def followed(path: Path) -> Path:
    """Where ``path`` leads, by a link or by a file in place of a link; ``path`` itself where it is neither."""
    try:
        if path.is_symlink():
            return path.parent / os.readlink(path)
        if path.is_file() and path.stat().st_size <= _LONGEST:
            text = text_of(path.read_bytes())
            if text.startswith(_LEADS_TO):
                return path.parent / text.removeprefix(_LEADS_TO).strip()
    except (OSError, ValueError):
        pass
    return path


def is_pointer(path: Path) -> bool:
    """Whether ``path`` leads to another place."""
    return followed(path) != path


def run_of(out: Path) -> Path | None:
    """The run folder that a folder of results names, which may be gone; None where it names none."""
    pointer = out / "run"
    return followed(pointer) if is_pointer(pointer) else None


def logged(path: Path | None, name: str) -> list[tuple[int, float]]:
    """Pairs (step, value) of field ``name`` in a job's own log; lines without it are left out."""
    return values(log_lines(path), name)


def log_lines(path: Path | None) -> list[dict[str, Any]]:
    """The lines of a job's own log, which are JSON objects; damaged lines are left out."""
    if path is None or not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(parse_json(text))
    return [line for line in lines if isinstance(line, dict)]


def values(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Pairs (step, value) of field ``name`` in lines of a job's own log."""
    pairs = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            pairs.append((int(line["step"]), float(line[name])))
    return pairs
