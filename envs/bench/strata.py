"""The shipped suites of simulated jobs, and where a job stands among their jobs. No job is drawn for it.

Strata of a suite are the worlds of its jobs, ``sim.family.WORLDS``.
"""

from __future__ import annotations

import json
from importlib import resources

import numpy as np

#: Shipped suites; a changed suite gets a new number.
SUITES = {"standard": "jobs_standard_4.json", "held-out": "jobs_held_out_4.json", "unseen": "jobs_unseen_1.json"}


def percentile_of_gain(saved: float, name: str = "standard") -> dict[str, float]:
    """Where a job with that much to save, a part of its default step, stands among the jobs of a suite.

    ``less``: the share of them that have less to gain; ``median``: what half of them have at least.
    """
    told = json.loads(resources.files(__package__).joinpath(SUITES[name]).read_text())
    gain = np.sort(told["gain"])
    below = int(np.searchsorted(gain, saved))
    return {"less": round(below / len(gain), 3), "median": round(float(np.median(gain)), 4)}


def steps_to_verdict(entrant: str) -> list[int]:
    """Steps to the verdict of a policy on each job of the standard board as filed, in order of size; [] without one."""
    file = resources.files("dynamiccl.envs").joinpath("results", "board_standard.json")
    filed = json.loads(file.read_text())["submissions"] if file.is_file() else []
    scores: dict[str, list[float | None]] = next((s["scores"] for s in filed if s["entrant"] == entrant), {})
    return sorted(int(steps) for steps in scores.get("verdict", ()) if steps is not None)
