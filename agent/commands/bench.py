"""``dynamiccl bench``: run policies on a suite of jobs and print the leaderboard."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...traces.outside import read_json, shown
from . import JSON, PATH, Number, command, fail, one_thread, option, refusing, tell_whose_code

if TYPE_CHECKING:
    from ..bench.board import Board

#: Seconds of a core for one job, on the average of a suite: on a quiet core, and on one that other programs use too.
PLAY_S = (0.3, 1.2)


@command
@option(
    "--policy",
    multiple=True,
    help="A known policy, MODULE:NAME, FILE.npz of lab train, FILE.zip of stable-baselines3, or a folder. "
    "Repeat it for more. Default: all known.",
)
@option("--suite", default="standard", help="standard, held-out, unseen, or the JSON file of a suite.")
@option("--world", multiple=True, help="Only the suite's jobs of this world. Repeat it for more.")
@option(
    "--jobs",
    type=click.IntRange(0),
    default=0,
    help="Number of jobs, spread over the suite; 0: as --filed or --submission, else all.",
)
@option("--out", type=PATH, default=Path("runs/bench"), help="Folder for submissions and the leaderboard.")
@option(
    "--processes", type=click.IntRange(1), default=2, help="Processes that play; the results are the same."
)
@option("--backend", default="local", help="local (this machine) or ray (a Ray cluster).")
@option("--limit", type=Number(1), default=1800.0, help="Maximum seconds of wall time for 20 jobs.")
@option("--filed", is_flag=True, help="Add the results on file (envs/results).")
@option(
    "--check", type=click.IntRange(0), default=0, help="Jobs of --filed or --submission to repeat; 0: all."
)
@option("--submission", type=PATH, multiple=True, help="Add this submission file. Repeat it for more.")
@JSON
def bench(
    policy: Sequence[str],
    suite: str,
    world: Sequence[str],
    jobs: int,
    out: Path,
    processes: int,
    backend: str,
    limit: float,
    filed: bool,
    check: int,
    submission: Sequence[Path],
    json: bool,
) -> None:
    """Compare policies on a suite of whole simulated jobs. Each job is tuned as by `dynamiccl tune --policy X`.

    A job takes 0.3 to 1.2 s of a core. Without options all nine known policies play all 1,000 jobs: 1 to 3 hours.

    \b
    dynamiccl bench --policy my_module:MyPolicy --jobs 40
    dynamiccl bench --policy model.zip --jobs 40    # of stable-baselines3
    dynamiccl bench --filed --check 8
    """
    suite = ":".join([suite, *([",".join(world)] if world else [])])
    if filed:
        _check_filed(suite)
    _check_are_there(policy, submission)
    print(f"loading suite {shown(suite)} ...", file=sys.stderr, flush=True)
    one_thread()
    from ...envs.bench.job_suites import JobSuite
    from ..bench.board import Board
    from ..bench.run import ENTRANTS, PART_JOBS, run
    from ..report.terminal import terminal
    from ..report.verdict import seconds

    console = terminal(stderr=True, highlight=False, markup=False)
    with refusing(OSError, ValueError):
        given = _given(submission, suite, filed)
        most = jobs or _jobs_played(given) or None
        board = Board(JobSuite.load(suite), most)
    names = list(dict.fromkeys(policy or (() if given else ENTRANTS)))
    for name in names:
        tell_whose_code(name)
    folder = out / _folder_name(suite)
    folder.mkdir(parents=True, exist_ok=True)
    total = len(given) + len(names)
    console.print(f"{board.title}: {_to_play(names, board.n_jobs, processes)}")
    for k, result in enumerate(given, 1):
        _tell(console.print, k, total, result, board.judge(result, check or None))

    begun = time.monotonic()

    def played(done: int, parts: int) -> None:
        passed = time.monotonic() - begun
        left = seconds(passed / done * (parts - done))
        console.print(f"{seconds(passed)}: {done} of {parts} parts of {PART_JOBS} jobs, about {left} left")

    with refusing(ValueError):
        for k, result in enumerate(
            run(names, suite, most, folder, processes, limit, played, backend), len(given) + 1
        ):
            _tell(console.print, k, total, result, board.judge(result))
    _show(board, folder, json)
    console.print(f"written: {folder / 'board.md'}", soft_wrap=True)


def _check_filed(suite: str) -> None:
    """Refuse --filed for jobs of which nothing is on file."""
    from ...envs.bench.strata import SUITES

    if suite not in SUITES:
        known = ", ".join(SUITES)
        fail(
            f"the boards on file are of whole suites ({known}): give one of them without --world, or leave out --filed"
        )


def _check_are_there(policies: Sequence[str], submissions: Sequence[Path]) -> None:
    """Refuse files of policies and of submissions that are not there, before the suite is loaded."""
    from ..policies.choosing import check_is_there

    with refusing(ValueError):
        for name in policies:
            check_is_there(name)
    for path in submissions:
        if not path.is_file():
            fail(f"there is no submission {path}")


def _folder_name(suite: str) -> str:
    """The name of a suite, without the folder and the ending of a file, and its worlds: ``standard``, ``mine-many``."""
    whole = suite if Path(suite).exists() else suite.partition(":")[0]
    worlds = suite.removeprefix(whole)
    return f"{Path(whole).stem}{worlds}".replace(":", "-")


def _to_play(names: list[str], n_jobs: int, processes: int) -> str:
    """Which policies play so many jobs each, and how long that takes, for people."""
    from ..report.verdict import seconds

    if not names:
        return "no policy to play"
    plays = len(names) * n_jobs
    quick, slow = (s * plays / min(processes, plays) for s in PLAY_S)
    return f"{', '.join(names)} to play: about {seconds(quick)} to {seconds(slow)}"


def _given(files: Sequence[Path], suite: str, filed: bool) -> list[Any]:
    """The results that join without playing: submission files, then those on file. Raises OSError, ValueError."""
    from ...envs.bench.strata import filed as on_record

    given = list[Any]()
    for path in files:
        try:
            one = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} is no submission, which is JSON ({error})") from None
        if not isinstance(one, dict) or not one.get("entrant"):
            raise ValueError(f"{path} is no submission: it is no JSON object that names its entrant")
        given.append(one)
    if filed:
        given += on_record(suite)["submissions"]
    return given


def _jobs_played(given: list[Any]) -> int:
    """The most jobs of a given result; 0 if none tells its jobs."""
    played = [one["jobs"] for one in given if isinstance(one, dict) and isinstance(one.get("jobs"), int)]
    return max(played, default=0)


def _show(board: Board, folder: Path, json: bool) -> None:
    """Print the leaderboard and write it to the folder. Fails if all policies were refused."""
    from ..bench.board import BRIEF, meanings
    from ..bench.run import READERS
    from ..report.terminal import grid, wide_terminal

    if board.scores.keys() <= {*READERS}:
        fail("no entrant finished: " + "; ".join(f"{n}: {why}" for n, why in board.refused.items()))
    rows = board.rows()
    (folder / "board.json").write_text(json_module.dumps(rows, indent=1) + "\n")
    (folder / "board.md").write_text(f"{board.title}, simulated:\n\n{board.markdown()}")
    if json:
        print(json_module.dumps(rows))
    else:
        wide_terminal().print(grid(*board.brief(), title=board.title))
        print(*meanings(BRIEF), sep="\n")


def _tell(say: Callable[[str], object], k: int, total: int, result: Any, reason: str) -> None:
    """One line of progress."""
    name = result["entrant"]
    if reason:
        say(f"{k} of {total}  {name}: refused: {reason}")
        return
    f = result["figures"]
    lost, gain = f["lost"], f["gain_delivered"]
    say(f"{k} of {total}  {name}: {lost:,.0f} steps lost in 20,000, {gain:.0%} of the gain, {f['jobs']} jobs")
