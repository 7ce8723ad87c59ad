"""``dynamiccl lab train``: train the weights of the LSTM policy."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from .. import JSON, PATH, command, fail, one_thread, option, refusing


@command
@option(
    "--turns",
    type=click.IntRange(1),
    default=92_160,
    help="Turns to learn from, over all jobs; whole updates are made.",
)
@option(
    "--runs",
    type=PATH,
    multiple=True,
    help="Continue from the shipped weights on recorded runs (folders of a trace).",
)
@option("--seed", type=click.IntRange(0), default=0, help="Seed of the first weights and of the jobs.")
@option(
    "--out",
    type=PATH,
    default=Path("runs/train/policy.npz"),
    help="Weights file to write; a .json record goes into the same folder.",
)
@option(
    "--split",
    is_flag=True,
    help="Play each of 24 jobs in a process of its own: for many cores. The weights are the same.",
)
@option("--resume", is_flag=True, help="Continue from the last checkpoint in the folder of --out.")
@JSON
def train(
    turns: int, runs: Sequence[Path], seed: int, out: Path, split: bool, resume: bool, json: bool
) -> None:
    """Train the LSTM policy by RecurrentPPO on whole simulated jobs. The reward is measured step time. The shipped
    weights took 33 minutes of a shared core.

    It starts as the rule. An episode's reward is the gain over the rule on the same job. With --runs it learns from
    recorded jobs; every fifth only judges: the last line gives its gain with standard error.
    """
    one_thread()
    from ....traces.outside import TraceError
    from ...policies.lstm import LstmPolicy
    from ...report.terminal import terminal
    from ...train.training import Settings, Training, export, gained

    if out.suffix != ".npz":
        fail(f"--out is a .npz file, not {out}")
    learned, judges = [r for i, r in enumerate(runs or ()) if i % 5 < 4], list(runs or ())[4::5]
    console = terminal(stderr=True, quiet=json, highlight=False)
    with refusing(OSError, ValueError, TraceError):
        _check(runs or ())
        out.parent.mkdir(parents=True, exist_ok=True)
        training = Training(
            Settings(seed=seed, turns=turns), out.with_suffix(".training"), tuple(learned), split
        )
        if resume:
            training.resume()
        elif runs:
            training.begin_with(LstmPolicy.load())

    def show(done: int, total: int, row: dict[str, Any]) -> None:
        said = (
            ""
            if row["saved"] is None
            else f"{_beyond(row['saved'], row['error'])}, the last {row['jobs']} jobs"
        )
        console.print(f"{done / total:4.0%} of {total} turns  {said}")

    training.run(show)
    record = export(training, out)
    told = gained(LstmPolicy.load(out), judges) if judges else None
    if json:
        print(record.read_text())
        return
    console.print(f"{out}: trained in {training.seconds:.0f} s; judge it by: dynamiccl bench --policy {out}")
    console.print(f"record and learning curve: {record}")
    if told is not None:
        console.print(f"{_beyond(*told)} on {len(judges)} runs that it has not seen")


def _beyond(saved: float, error: float | None) -> str:
    """Default steps a job beyond the rule's, with the standard error; whether that is told apart from nothing."""
    if error is None or math.isnan(error):
        return f"{saved:+.1f} default steps a job beyond the rule's (one job: error not known)"
    noise = "" if abs(saved) > 2 * error else ", not told apart from the rule"
    return f"{saved:+.1f} (standard error {error:.1f}) default steps a job beyond the rule's{noise}"


def _check(runs: Iterable[Path]) -> None:
    """Begins an episode of each run: what cannot be played is told at once. Raises TraceError, ValueError."""
    from ....envs.replay_env import ReplayEnv

    for run in runs:
        ReplayEnv(run).reset(seed=0)
