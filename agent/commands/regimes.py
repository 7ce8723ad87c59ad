"""``dynamiccl lab regimes``: what the LSTM's state knows of the job it rides beside."""

from pathlib import Path
from typing import Annotated

import typer

from . import refusing


def regimes(
    jobs: Annotated[
        int,
        typer.Option(
            min=64, help="Jobs of each family to fit the probe on; half as many fresh ones judge (some four minutes)."
        ),
    ] = 5120,
    weights: Annotated[Path | None, typer.Option(help="A weights file; without it the shipped one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jobs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Name the kind of training (ZeRO stage, FSDP2) from the LSTM's state by a linear probe, on fresh simulated jobs.

    The policy was never told what the kinds are. Beside it stand the same probe on an LSTM with random weights and on
    the slots' fingerprints: what the state adds is what it has more than these.
    """
    import json

    from ..policy import LstmPolicy
    from ..regime_probe import probe

    with refusing(ValueError):
        policy = LstmPolicy.load(weights)
    found = probe(policy, jobs, seed)
    if as_json:
        print(json.dumps(found))
        return
    for family, ways in [*found["right"].items(), ("held-out, by the standard family's probe", found["elsewhere"])]:
        for way, right in ways.items():
            print(f"{family:9} {way:17} {right:6.1%}")
    for family, mistaken in found["mistaken"].items():
        print(f"{family:9} taken by the state for another: {mistaken or 'none'}")
