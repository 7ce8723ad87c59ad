"""Runs entrants of the benchmark, each in a process of its own, and keeps what they decided.

To enter, write a policy: any object with ``predict(observation, state, episode_start, deterministic)`` that returns
``(actions, state)``, as in stable-baselines3. It is asked as it is beside a job, one turn at a time: (1, N_OBSERVATION)
float32 in, (1,) int64 out: an action of the environments. ``envs.search.observation.decode`` gives an observation as
plain arrays; ``envs.search.interfaces.actions_of`` turns config indices, and what comes next, into actions. Then, where
``my_module.py`` lies::

    dynamiccl bench --policy my_module:MyPolicy --policy random --suite held-out

A submission is one JSON file: who, which suite, every decision (packed), and what came of it, job by job. The judge
(``envs.bench.submissions``) believes only the decisions: it plays them again and refuses what does not come out.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import signal
import time
import traceback
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from ...envs.bench.job_suites import JobSuite
from ...envs.bench.submissions import enter
from ..policies.choosing import CLASSICAL, DEFAULT, make_chooser

#: Entrants that read the truth and search nothing.
READERS = ("oracle", "static-best")
#: On the board without a rank: ``aa`` is the default policy under other noise (what lies between it and that policy is
#: luck), and those that read the truth.
UNRANKED = ("aa", *READERS)
#: Seconds between two signs of life while entrants play.
WAIT_S = 10.0
#: The board's entrants that play.
ENTRANTS = ("lstm", "aa", DEFAULT, *CLASSICAL)


def enter_one(name: str, suite: str | JobSuite, jobs: int | None = None) -> dict[str, Any]:
    """Play ``jobs`` jobs (all) of a suite (a shipped one, a file, or the jobs themselves) and return the submission.

    What the policy raises, or is refused for, passes through; ValueError where there is no such policy or suite.
    """
    seed = 1 if name == "aa" else 0  # of the noise that it meets: all the same, but for ``aa``
    policy = make_chooser(DEFAULT if name == "aa" else name, seed)
    suite = JobSuite.load(suite) if isinstance(suite, str) else suite
    head = {"entrant": name, "version": importlib.metadata.version("dynamiccl")}
    head["command"] = f"dynamiccl bench --policy {name} --suite {suite.name}"
    return head | enter(policy, suite, seed, jobs)


def run(
    names: Sequence[str],
    suite: str,
    jobs: int | None,
    folder: Path,
    processes: int = 2,
    limit_s: float = 1800.0,
    on_wait: Callable[[float, int], object] = lambda seconds, remaining: None,
) -> Iterator[dict[str, Any]]:
    """Yield the submission of each entrant as they come, or ``{"entrant", "failed"}``; they are left in ``folder``.

    One that fails, or takes longer than ``limit_s``, does not stop the others. ``on_wait`` is called every WAIT_S
    seconds with the seconds so far and the number of entrants that still play.
    """
    pool, begun = ThreadPoolExecutor(processes), time.monotonic()
    playing = {pool.submit(_play_apart, name, suite, jobs, limit_s) for name in names}
    try:
        while playing:
            done, playing = wait(playing, WAIT_S, FIRST_COMPLETED)
            for one in done:
                yield _left_in(folder, one.result())
            if not done:
                on_wait(time.monotonic() - begun, len(playing))
    finally:
        pool.shutdown(cancel_futures=True)


def _left_in(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Write a submission to the folder, and return it."""
    if "failed" not in result:
        name = urllib.parse.quote(result["entrant"], safe="")
        (folder / f"{name}.json").write_text(json.dumps(result) + "\n")
    return result


def _play_apart(*entry: Any) -> dict[str, Any]:
    """:func:`_attempt` in a process of its own, which may die."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            return alone.submit(_attempt, *entry).result()
    except BrokenProcessPool:
        return {"entrant": entry[0], "failed": "its process died"}


def _attempt(name: str, suite: str, jobs: int | None, limit_s: float) -> dict[str, Any]:
    """What :func:`enter_one` returns, or why it failed: a guest's policy may raise anything, or never end."""

    def give_up(_number: int, _frame: object) -> None:
        raise TimeoutError(f"gave no result in {limit_s:.0f} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return enter_one(name, suite, jobs)
    except ValueError as error:  # says all by itself
        return {"entrant": name, "failed": str(error)}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        return {"entrant": name, "failed": f"{type(error).__name__}: {error} ({where})"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
