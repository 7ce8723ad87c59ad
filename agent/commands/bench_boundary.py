"""``dynamiccl bench boundary``: what happens between two steps of a job, and what a new table adds to it."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import refusing

if TYPE_CHECKING:
    from ..boundary import Boundary


def bench_boundary(
    ranks: Annotated[list[int] | None, typer.Option(help="Processes; may be given several times.")] = None,
    steps: Annotated[int, typer.Option(min=200, help="Steps, half of them with the probe.")] = 3000,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the probe's hook at the end of a step, with a new table and without, in processes on gloo (2 and 4).

    Tables of the largest size are published all the time. Caches are cold, as after a step. The agreement itself runs
    in the background; the last lines show what all of it adds to a step, and that all ranks were under the same table.
    """
    from ...envs.nccl.build import PluginBuildError
    from ..boundary import time_boundary

    found = {}
    for n in ranks or [2, 4]:
        with refusing(PluginBuildError, RuntimeError, OSError):
            found[n] = _figures(time_boundary(n, steps))
        if not json:
            _print(n, found[n])
    if json:
        print(json_module.dumps(found))


def _figures(b: Boundary) -> dict[str, Any]:
    import numpy as np

    from ..boundary import BLOCK
    from ..compare import compare

    def percentiles(values: Any) -> dict[str, float]:
        return dict(zip(("p50", "p90", "p99"), map(float, np.percentile(values, [50, 90, 99])), strict=True))

    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(b.extra_us, (2000, len(b.extra_us))), axis=1)
    n = min(len(b.with_ms), len(b.without_ms)) // BLOCK  # blocks of steps, in turn
    on, off = (np.median(x[: n * BLOCK].reshape(n, BLOCK), axis=1) for x in (b.with_ms, b.without_ms))
    step = compare(on, off)
    return {
        "boundary_us": {
            "hook absent": percentiles(b.clock_us),
            "the table stays": percentiles(b.same_us),
            "a new table": percentiles(b.swap_us),
        },
        "n_swaps": len(b.swap_us),
        "extra_us": float(np.median(b.extra_us)),
        "extra_us_ci95": [float(x) for x in np.percentile(medians, [2.5, 97.5])],
        "step_ratio": step.speedup,
        "step_ratio_ci95": [step.low, step.high],
        "steps_to_swap": int(np.median(b.steps_to_swap)),
        "agreed": b.agreed,
    }


def _print(n: int, f: dict[str, Any]) -> None:
    print(f"{f'{n} processes, microseconds':34} {'median':>8} {'p90':>8} {'p99':>8}")
    for name, p in f["boundary_us"].items():
        print(f"{name:34} {p['p50']:8.1f} {p['p90']:8.1f} {p['p99']:8.1f}")
    low, high = f["extra_us_ci95"]
    print(f"a new table adds {f['extra_us']:+.1f} us [{low:+.1f}, {high:+.1f}], {f['n_swaps']} swaps")
    low, high = f["step_ratio_ci95"]
    print(f"a step with the probe takes {f['step_ratio']:.3f} [{low:.3f}, {high:.3f}] of one without")
    agreed = "at every step all ranks had the same table" if f["agreed"] else "RANKS DIFFERED"
    print(f"a table is in force {f['steps_to_swap']} steps after the one in which it was published; {agreed}\n")
