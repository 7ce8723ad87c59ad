"""The shipped suites of simulated jobs, what is on record of them, and where a job stands among theirs. No job is drawn
for it.

Strata of a suite are the worlds of its jobs, ``sim.family.WORLDS``.
"""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np

#: Shipped suites; a changed suite gets a new number.
SUITES = {"standard": "jobs_standard_4.json", "held-out": "jobs_held_out_4.json", "unseen": "jobs_unseen_1.json"}


def filed(suite: str, envs: Traversable | None = None) -> dict[str, Any]:
    """What is on record of a suite below ``envs`` (the package's): the day, and the submissions. Raises ValueError when
    nothing is."""
    folder = (envs or resources.files("dynamiccl.envs")).joinpath("results")
    try:
        found: dict[str, Any] = json.loads(folder.joinpath(f"board_{suite.replace('-', '_')}.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"no results of suite {suite} are on record ({error}): make bench") from error
    return found


def percentile_of_gain(saved: float, name: str = "standard") -> dict[str, float]:
    """Where a job with that much to save, a part of its default step, stands among the jobs of a suite.

    ``less``: the share of them that have less to gain; ``median``: what half of them have at least.
    """
    told = json.loads(resources.files(__package__).joinpath(SUITES[name]).read_text())
    gain = np.sort(told["gain"])
    below = int(np.searchsorted(gain, saved))
    return {"less": round(below / len(gain), 3), "median": round(float(np.median(gain)), 4)}


def steps_to_verdict(entrant: str) -> list[int]:
    """Steps to the verdict of a policy on each job of the standard board as filed, in order of size; [] where it has
    not played them."""
    found = [s["scores"]["verdict"] for s in filed("standard")["submissions"] if s["entrant"] == entrant]
    return sorted(int(steps) for verdicts in found for steps in verdicts if steps is not None)
