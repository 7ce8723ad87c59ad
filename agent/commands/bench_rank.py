"""``dynamiccl bench rank``: does the replay of a trace rank policies as their live runs did?"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import refusing


def bench_rank(
    trace: Annotated[Path, typer.Argument(help="Trace to replay: best of a sweep of the same job.")],
    live: Annotated[list[Path], typer.Argument(help="Run folders of `dynamiccl tune --policy ...`, one or more each.")],
    seeds: Annotated[int, typer.Option(min=2, help="Replays of each policy.")] = 8,
    windows: Annotated[int, typer.Option(min=1, help="As the live runs had it.")] = 30,
    verify: Annotated[int, typer.Option(min=6, help="As the live runs had it.")] = 12,
    window_steps: Annotated[int | None, typer.Option(min=1, help="As the live runs had it; as the noise asks.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="As the live runs had it.")] = 1000,
    budget: Annotated[float, typer.Option(min=0, help="As the live runs had it.")] = 0.05,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay every policy that was run live, and compare the two rankings (Spearman's rank correlation).

    \b
    dynamiccl tune --policy sweep --windows 400 --budget 10 --steps 3000 --out runs/sweep
    for p in expected-improvement ladder coordinate-descent gp thompson ucb default; do
      dynamiccl tune --policy $p --out runs/rank/$p; done
    dynamiccl bench rank runs/sweep runs/rank/*
    """
    from ...traces.files import Trace, TraceError
    from ..rank import FIGURES, live_run, rank
    from ..terminal import terminal
    from ..tuner import Settings

    console = terminal(stderr=True, highlight=False)
    with refusing(ValueError, TraceError):
        runs = [live_run(folder, windows) for folder in live]
        settings = Settings(windows, verify, window_steps, steps, budget)
        found = rank(Trace.read(trace), runs, settings, seeds, console.print)
    if json:
        print(json_module.dumps(found))
        return
    measured, all_configs = found["measured_configs"]
    print(f"{measured} of {all_configs} configs are as measured, the rest as predicted; {seeds} replays each")
    print(f"{'policy':22}{'speed-up: live':>16}{'replay':>9}{'saved in search: live':>24}{'replay':>9}")
    for row in sorted(found["policies"], key=lambda row: -float(row["live_saved"])):
        print(
            f"{row['policy']:22}{row['live_speedup']:16.3f}{row['replay_speedup']:9.3f}"
            f"{row['live_saved']:24.1%}{row['replay_saved']:9.1%}"
        )
    for figure, words in zip(FIGURES, ("speed-up at the end", "saved in the search"), strict=True):
        low, high = found[figure]["ci95"]
        print(f"Spearman, {words}: {found[figure]['spearman']:.2f} [{low:.2f}, {high:.2f}]")
