"""``dynamiccl bench``: play policies on a suite of tasks and print the board."""

from pathlib import Path
from typing import Annotated

import typer

from . import fail


def bench(
    context: typer.Context,
    policy: Annotated[
        list[str] | None, typer.Option(help="Entrant: a known policy or MODULE:NAME; repeat for more. Default: all.")
    ] = None,
    suite: Annotated[str, typer.Option(help="standard, held-out, or a suite file.")] = "standard",
    out: Annotated[Path, typer.Option(help="Folder for submissions and the board.")] = Path("runs/bench"),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each task, under different noise.")] = 4,
    processes: Annotated[int, typer.Option(min=1, help="Entrants played at the same time.")] = 2,
    again: Annotated[bool, typer.Option("--again", help="Play entrants anew that have a result already.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Find the baselines' best settings instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the board as JSON.")] = False,
) -> None:
    """Judge policies on a suite: every entrant meets the same tasks, masks and noise; its decisions are replayed."""
    if context.invoked_subcommand:  # `dynamiccl bench plugin` and the like have files of their own
        return
    import json as json_module

    from rich.console import Console

    from ...envs.arena import Suite
    from ...envs.leaderboard import replay
    from ..bench import ENTRANTS, Entry, entrant, run
    from ..bench import fit as fit_baselines
    from ..board import Board

    console = Console(stderr=True, highlight=False)
    if fit:
        from ..train import held_out

        out.mkdir(parents=True, exist_ok=True)
        found = fit_baselines(held_out(128), console.print)
        (out / "baselines.json").write_text(json_module.dumps(found, indent=1) + "\n")
        console.print(f"settings: {out / 'baselines.json'}")
        return
    names = list(policy or ENTRANTS)
    try:
        tasks = Suite.load(suite)
        for name in names:
            entrant(name)
    except ValueError as error:
        fail(str(error))
    folder = out / tasks.name
    board = Board(tasks)
    entries = [Entry(name, suite, repeats) for name in names]
    for submission in run(entries, folder, processes, again):
        name = submission["entrant"]
        try:
            if "failed" in submission:
                raise ValueError(submission["failed"])
            board.add(submission, replay(submission, tasks))
            console.print(f"{name}: regret {submission['figures']['regret']}")
        except ValueError as error:
            board.refuse(name, str(error))
            console.print(f"{name}: refused: {error}")
    (folder / "board.html").write_text(board.page())
    (folder / "board.json").write_text(json_module.dumps(board.rows(), indent=1) + "\n")
    (folder / "board.md").write_text(board.markdown())
    print(json_module.dumps(board.rows()) if json else board.markdown(), end="\n" if json else "")
    console.print(f"board: {folder / 'board.html'}")
    if set(names) <= set(board.refused):
        fail("no entrant finished: " + "; ".join(f"{n}: {why}" for n, why in board.refused.items()))
