"""``dynamiccl bench``: play policies on a suite of tasks and print the board."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import ClusterName, Nccl, fail

if TYPE_CHECKING:
    from ...envs.arena import Suite
    from ..spread import Executor

#: Runs of each task: the slots of one trace are few.
REPEATS, REPLAY_REPEATS = 4, 32


def bench(
    context: typer.Context,
    policy: Annotated[
        list[str] | None, typer.Option(help="Entrant: a known policy or MODULE:NAME; repeat for more. Default: all.")
    ] = None,
    suite: Annotated[
        str, typer.Option(help="standard, held-out, replay (the slots of --trace), or a suite file.")
    ] = "standard",
    trace: Annotated[
        Path | None,
        typer.Option(help="Recording of --suite replay: a trace of ours, or another's with --cluster."),
    ] = None,
    cluster: ClusterName = None,
    nccl: Nccl = None,
    out: Annotated[Path, typer.Option(help="Folder for submissions and the board.")] = Path("runs/bench"),
    repeats: Annotated[int, typer.Option(min=0, help="Runs of each task, under different noise; 0: as usual.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Entrants played at the same time.")] = 2,
    ray: Annotated[bool, typer.Option("--ray", help="Spread entrants over a Ray cluster (RAY_ADDRESS).")] = False,
    again: Annotated[bool, typer.Option("--again", help="Play entrants anew that have a result already.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Find the baselines' best settings instead.")] = False,
    filed: Annotated[
        bool, typer.Option("--filed", help="Play nothing: judge the results on record by replaying their decisions.")
    ] = False,
    file: Annotated[
        bool, typer.Option("--file", help="Put the results on record, and into envs/README.md (in a checkout).")
    ] = False,
    submission: Annotated[
        list[Path] | None, typer.Option(help="Judge this submission file too; repeat for more.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the board as JSON.")] = False,
) -> None:
    """Judge policies on a suite: every entrant meets the same tasks, masks and noise; its decisions are replayed.

    A policy is any object with predict(observation, state, episode_start, deterministic) -> (actions, state):
    observations are (n, N_OBSERVATION) rows, one a slot, actions (n, 2) int64 [pair, channels]. The module
    dynamiccl.envs.spaces says what is in a row; spaces.seen(observation) gives it as plain arrays.

    \b
    dynamiccl bench --policy my_module:MyPolicy --policy lstm --suite held-out
    dynamiccl bench --suite replay --trace runs/tune/trace
    dynamiccl bench --filed --suite standard
    """
    if context.invoked_subcommand:  # `dynamiccl bench plugin` and the like have files of their own
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the matrices are small, threads only fight
    from rich.console import Console

    from ..bench import Entry, entrants, run
    from ..board import Board, filed_results, put_on_record
    from ..spread import OnRay, Processes

    console = Console(stderr=True, highlight=False)
    try:
        executor: Executor = OnRay() if ray else Processes(processes)
        if fit:
            _fit(out, executor, console.print)
            return
        tasks = _tasks(suite, trace, cluster, nccl)
        given = [json_module.loads(path.read_text()) for path in submission or ()]
        if filed:
            given += filed_results(tasks.name)
    except (OSError, ValueError) as error:
        fail(str(error))
    names = list(policy or (() if filed or given else entrants()))
    runs = repeats or (REPLAY_REPEATS if suite == "replay" else REPEATS)
    entries = [Entry(name, tasks if trace else suite, runs) for name in names]
    folder, board, accepted = out / tasks.name, Board(tasks), []
    folder.mkdir(parents=True, exist_ok=True)
    for result in (*given, *run(entries, folder, executor, again)):
        reason = board.judge(result)
        if not reason:
            accepted.append(result)
        console.print(f"{result.get('entrant')}: {f'refused: {reason}' if reason else result['figures']['regret']}")
    (folder / "board.html").write_text(board.page())
    (folder / "board.json").write_text(json_module.dumps(board.rows(), indent=1) + "\n")
    (folder / "board.md").write_text(board.markdown())
    print(json_module.dumps(board.rows()) if json else board.markdown(), end="\n" if json else "")
    console.print(f"board: {folder / 'board.html'}")
    if not accepted:
        fail("no entrant finished: " + "; ".join(f"{n}: {why}" for n, why in board.refused.items()))
    if file:
        for path in put_on_record(tasks.name, accepted):
            console.print(f"on record: {path}")


def _tasks(suite: str, trace: Path | None, cluster: str | None, nccl: str | None) -> Suite:
    from ...envs.arena import Suite

    if (suite == "replay") != (trace is not None):
        raise ValueError(
            "--suite replay and --trace go together: dynamiccl bench --suite replay --trace runs/tune/trace"
        )
    if trace is None:
        return Suite.load(suite)
    from ...envs.replay import load, suite_of
    from ...traces.files import TraceError
    from ..recordings import read

    try:
        return suite_of(load(read([trace], cluster, nccl)))
    except TraceError as error:
        raise ValueError(str(error)) from error


def _fit(out: Path, executor: Executor, tell: object) -> None:
    from ..bench import fit
    from ..train import held_out

    assert callable(tell)
    out.mkdir(parents=True, exist_ok=True)
    found = fit(held_out(512), executor, tell)
    (out / "baselines.json").write_text(json_module.dumps(found, indent=1) + "\n")
    tell(f"settings: {out / 'baselines.json'}; they are used once they are in agent/")
