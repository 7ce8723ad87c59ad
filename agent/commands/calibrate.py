"""``dynamiccl lab calibrate``: how well measured collectives are predicted from each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import fail, refusing


def calibrate(
    points: Annotated[
        Path | None, typer.Option(help="CSV of your own: source, func, curve, n_bytes, us[, n_channels].")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Leave out each public measurement in turn, predict it from the rest of its curve, and print the errors."""
    import numpy as np

    from ...envs.sim import measured

    with refusing(ValueError):
        found = measured.public_points() if points is None else measured.public_points(points)
    errors = measured.leave_one_out(found)
    if not errors:
        fail("no curve has three points: there is nothing to leave out")
    every = [e for values in errors.values() for e in values]
    rows = [
        {
            "source": source,
            "points": len(values),
            "median_error": round(float(np.median(values)), 4),
            "p90_error": round(float(np.quantile(values, 0.9)), 4),
        }
        for source, values in [*sorted(errors.items()), ("all", every)]
    ]
    if json_:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'source':12} {'points':>7} {'median error':>13} {'90th percentile':>16}")
    for row in rows:
        print(f"{row['source']:12} {row['points']:7} {row['median_error']:13.1%} {row['p90_error']:16.1%}")
