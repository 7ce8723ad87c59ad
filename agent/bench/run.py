"""Runs entrants of the benchmark, some jobs at a time in a process of their own, and keeps what they decided.

docs/environments.md says how a policy is asked: (1, N_OBSERVATION) float32 in, (1,) int64 out. A submission is one JSON
file: who, which suite, every decision (packed), and what came of it. The judge (``envs.bench.submissions``) believes
only the decisions.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import signal
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config

from ...envs.bench.job_suites import JobSuite
from ...envs.bench.submissions import AGAIN, PlayedPart, play_part, rows_of, seed_of, submission
from ...traces.here import pip_install
from ..policies.choosing import CLASSICAL, LSTM, RAISED, RULE, make_chooser

#: Entrants that read the truth and search nothing.
READERS = ("oracle", "static-best")
#: On the board without a rank: the rule under other noise, and those that read the truth.
UNRANKED = (AGAIN, *READERS)
#: Jobs that an entrant plays at a time.
PART_JOBS = 20
#: Where jobs are played: on this machine, or on a Ray cluster. The names that joblib has for them; each part has a
#: process of its own, so here a thread is enough to wait for it.
LOCAL, RAY = "local", "ray"
_BACKENDS = {LOCAL: "threading", RAY: "ray"}
#: The board's entrants that play.
ENTRANTS = (LSTM, AGAIN, RULE, *CLASSICAL)


def enter_one(name: str, suite: str | JobSuite, jobs: int | None = None) -> dict[str, Any]:
    """Play ``jobs`` jobs (all) of a suite (a shipped one, a file, or the jobs themselves) and return the submission.

    What the policy raises, or is refused for, passes through; ValueError where there is no such policy or suite.
    """
    suite = JobSuite.load(suite) if isinstance(suite, str) else suite
    parts = [_played(name, suite, rows) for rows in parts_of(suite, jobs)]
    return _signed(name, suite, parts)


def parts_of(suite: JobSuite, jobs: int | None) -> list[list[int]]:
    """The jobs of a run in parts of PART_JOBS. They are the same for any number of workers, so that results are."""
    rows = rows_of(suite, jobs).tolist()
    return [rows[i : i + PART_JOBS] for i in range(0, len(rows), PART_JOBS)]


def _played(name: str, suite: JobSuite, rows: Sequence[int]) -> PlayedPart:
    seed = seed_of(name)
    # A policy that draws numbers draws others in each part: jobs are independent.
    policy = make_chooser(RULE if name == AGAIN else name, seed + int(rows[0]))
    return play_part(policy, suite, rows, seed)


def _signed(name: str, suite: JobSuite, parts: Sequence[PlayedPart]) -> dict[str, Any]:
    """The submission, with who played."""
    head = {"entrant": name, "version": importlib.metadata.version("dynamiccl")}
    head["command"] = f"dynamiccl bench --policy {name} --suite {suite.name}"
    return head | submission(parts, suite, seed_of(name))


def run(
    names: Sequence[str],
    suite: str,
    jobs: int | None,
    folder: Path,
    processes: int = 2,
    limit_s: float = 1800.0,
    on_part: Callable[[int, int], object] = lambda done, total: None,
    backend: str = LOCAL,
) -> Iterator[dict[str, Any]]:
    """Yield the submission of each entrant as they come, or ``{"entrant", "failed"}``; they are left in ``folder``.

    Jobs are played by processes of this machine (``local``) or a Ray cluster (``ray``). An entrant that fails, or
    exceeds ``limit_s`` for a part, stops no other. ``on_part`` gets the parts done and in all. Raises ValueError if Ray
    is not installed.
    """
    loaded = JobSuite.load(suite)
    rows = parts_of(loaded, jobs)
    total = len(names) * len(rows)
    parts = {name: list[PlayedPart]() for name in names}
    failed = set[str]()
    tasks = (
        delayed(_play_apart)(name, suite, some, limit_s)
        for name in names
        for some in rows
        if name not in failed
    )
    done = 0
    with parallel_config(_known(backend), n_jobs=processes):
        # Ray's backend hands all results over at its end.
        form = "list" if backend == RAY else "generator_unordered"
        for name, result in Parallel(return_as=form)(tasks):
            done += 1
            on_part(done, total)
            if name in failed:
                continue
            if isinstance(result, str):
                failed.add(name)
                yield {"entrant": name, "failed": result}
                continue
            parts[name].append(result)
            if len(parts[name]) == len(rows):
                yield _left_in(folder, _signed(name, loaded, parts[name]))


def _known(backend: str) -> str:
    """joblib's name of a backend, of which it knows now. Raises ValueError."""
    if backend not in _BACKENDS:
        raise ValueError(f"no backend {backend!r}: known are {', '.join(_BACKENDS)}")
    if backend == RAY:
        try:
            from ray.util.joblib import register_ray
        except ImportError as error:
            raise ValueError(f"--backend ray needs Ray: {pip_install('ray')}") from error
        register_ray()
    return _BACKENDS[backend]


def _left_in(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write a submission to the folder, and return it."""
    if "failed" not in result:
        name = urllib.parse.quote(result["entrant"], safe="")
        (folder / f"{name}.json").write_text(json.dumps(result) + "\n")
    return result


def _play_apart(name: str, *entry: Any) -> tuple[str, PlayedPart | str]:
    """An entrant, and what :func:`_attempt` returns, in a process of its own, which may die."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            return name, alone.submit(_attempt, name, *entry).result()
    except BrokenProcessPool:
        return name, "its process died"


def _attempt(name: str, suite: str, rows: Sequence[int], limit_s: float) -> PlayedPart | str:
    """Some jobs of an entrant, or why it failed: a guest's policy may raise anything, leave Python, or never end."""

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutError(f"gave no result in {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return _played(name, JobSuite.load(suite), rows)
    except ValueError as error:  # says all by itself
        return str(error)
    except RAISED as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return f"{type(error).__name__}: {error} ({where})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)  # None: C code had set it
