"""The shipped suites of simulated jobs, and what is on record of them. No job is drawn for it.

Strata of a suite are the worlds of its jobs, ``sim.family.WORLDS``.
"""

from __future__ import annotations

import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

#: Shipped suites; a changed suite gets a new number.
SUITES = {
    "standard": "jobs_standard_5.json",
    "held-out": "jobs_held_out_5.json",
    "unseen": "jobs_unseen_1.json",
    "mpi-headroom": "jobs_mpi_headroom_1.json",
}


def filed(suite: str, envs: Traversable | None = None) -> dict[str, Any]:
    """What is on record of a suite below ``envs`` (the package's): the day, and the submissions. Raises ValueError when
    nothing is."""
    folder = (envs or resources.files("dynamiccl.envs")).joinpath("results")
    try:
        found: dict[str, Any] = json.loads(
            folder.joinpath(f"board_{suite.replace('-', '_')}.json").read_text()
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"no results of suite {suite} are on record ({error}): make bench") from error
    return found


def steps_to_verdict(entrant: str) -> list[int]:
    """Steps to the verdict of a policy on each job of the standard board as filed, in order of size; [] where it has
    not played them."""
    found = [s["scores"]["verdict"] for s in filed("standard")["submissions"] if s["entrant"] == entrant]
    return sorted(int(steps) for verdicts in found for steps in verdicts if steps is not None)
