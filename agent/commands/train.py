"""``dynamiccl lab train``: make the policy's weights anew."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from . import fail


def train(
    steps: Annotated[int, typer.Option(min=0, help="Windows to simulate in all; 0: as for the shipped weights.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed on the same machine gives the same weights.")] = 0,
    out: Annotated[Path, typer.Option(help="Weights file to write; a .json record goes beside it.")] = Path(
        "runs/train/policy.npz"
    ),
    without: Annotated[
        list[str] | None, typer.Option(help="Ablation: train without memory, statistics, belief, costs or masks.")
    ] = None,
    one_cluster: Annotated[
        bool, typer.Option("--one-cluster", help="Ablation: all tasks on one kind of cluster.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint beside --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Train the LSTM policy across random clusters in the simulator (minutes on two cores)."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: with more, small matrices take many times longer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from ..policy import PARTS
    from ..train import Settings, Training, compare, examine, export, held_out, simulator

    if out.suffix != ".npz":
        fail(f"--out is a .npz file, not {out}")
    unknown = sorted(set(without or ()) - set(PARTS))
    if unknown:
        fail(f"--without takes {', '.join(PARTS)}, not {', '.join(unknown)}")
    settings = Settings(seed=seed, steps=steps or Settings.steps, without=tuple(without or ()), one_cluster=one_cluster)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        suite = held_out()
        training = Training(
            settings, simulator(settings), lambda policy: examine(policy, suite), out.with_suffix(".checkpoint")
        )
        if resume:
            training.resume()
    except (OSError, ValueError) as error:
        fail(str(error))
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[phase]:>9}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=as_json) as bar:
        task = bar.add_task("", total=settings.prior + settings.steps, completed=training.done, phase="start", said="")

        def show(done: int, total: int, row: dict[str, Any]) -> None:
            said = f"loss {row['loss']:.2f}" if "loss" in row else ""
            if "share_of_gain" in row:
                said = f"gain after 4 trials {row['share_of_gain']['4']:.1%}, regret {row['regret']:.2f}"
            bar.update(task, completed=done, phase=row["phase"], said=said)

        training.run(show)
    figures = compare(training.light(), suite)
    record = export(training, out, figures)
    if as_json:
        print(record.read_text())
        return
    console.print(f"{out}: trained in {training.seconds:.0f} s; on {len(suite)} tasks of unseen seeds:")
    for name, f in figures.items():
        shares = "  ".join(f"{k}: {f['share_of_gain'][k]:.0%}" for k in ("1", "2", "4", "8", "16"))
        console.print(
            f"  {name:<20} gain by trial  {shares}   trials to 2 % {f['trials_until_near'][1]:.0f}   "
            f"regret {f['regret']:.2f}",
            highlight=False,
        )
    console.print(f"record and learning curve: {record}")
