"""``dynamiccl lab train``: make the policy's weights anew."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from . import Json, Option, fail, one_thread, refusing


def train(
    part: Annotated[float, Option(min=0.0, max=4.0, help="Of the shipped weights' training; 1: all of it.")] = 1.0,
    ppo: Annotated[int, Option(min=0, help="Chunks of RecurrentPPO after imitation.")] = 0,
    seed: Annotated[int, Option(min=0, help="The same seed on the same machine gives the same weights.")] = 0,
    out: Annotated[Path, Option(help="Weights file to write; a .json record goes beside it.")] = Path(
        "runs/train/policy.npz"
    ),
    without: Annotated[list[str] | None, Option(help="Without memory, siblings, durations or belief.")] = None,
    resume: Annotated[bool, Option(help="Go on from the last checkpoint beside --out.")] = False,
    as_json: Json = False,
) -> None:
    """Train the LSTM policy on whole jobs, across random clusters in the simulator (about 35 minutes on two cores)."""
    one_thread()
    from ..policies.lstm import PARTS
    from ..report.terminal import terminal
    from ..train.training import Settings, Training, export

    if out.suffix != ".npz":
        fail(f"--out is a .npz file, not {out}")
    unknown = sorted(set(without or ()) - set(PARTS))
    if unknown:
        fail(f"--without takes {', '.join(PARTS)}, not {', '.join(unknown)}")
    stages = tuple(replace(stage, chunks=round(part * stage.chunks)) for stage in Settings.stages)
    settings = Settings(seed=seed, stages=stages, ppo=ppo, without=tuple(without or ()))
    with refusing(OSError, ValueError):
        out.parent.mkdir(parents=True, exist_ok=True)
        training = Training(settings, out.with_suffix(".training"))
        if resume:
            training.resume()
    console = terminal(stderr=True, quiet=as_json, highlight=False)

    def show(done: int, total: int, row: dict[str, Any]) -> None:
        if done % 20 == 0 or done == total:
            said = f"loss {row['loss']:.2f}" if "loss" in row else f"steps lost {row['lost']}"
            console.print(f"{row['phase']:>9} {done / total:4.0%}  {said}")

    training.run(show)
    record = export(training, out)
    if as_json:
        print(record.read_text())
        return
    console.print(f"{out}: trained in {training.seconds:.0f} s; judge it by: dynamiccl bench --policy {out}")
    console.print(f"record and learning curve: {record}")
