"""Strata of simulated jobs, by what there is to gain, and where a job stands among them. No job is drawn for it."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Shipped suites; a changed suite gets a new number.
SUITES = {"standard": "jobs_standard_3.json", "held-out": "jobs_held_out_3.json"}
#: Strata by what there is to gain, as a part of the default step: upper ends.
STRATA = {"none": 0.005, "little": 0.02, "some": 0.05, "much": 1.0}


def stratum(gain: Array) -> Array:
    """Index into STRATA of each gain."""
    return np.searchsorted(list(STRATA.values()), gain, side="right").clip(0, len(STRATA) - 1)


def percentile_of_gain(saved: float, name: str = "standard") -> dict[str, float]:
    """Where a job with that much to save, a part of its default step, stands among random jobs of a suite's family.

    ``less``: the share of them that have less to gain; ``median``: what half of them have at least.
    """
    told = json.loads(resources.files(__package__).joinpath(SUITES[name]).read_text())
    gain = np.sort(told["gain"])
    kind = stratum(gain)
    weight = np.array([told["weights"][k] for k in STRATA])[kind] / np.bincount(kind, minlength=len(STRATA))[kind]
    share = np.cumsum(weight) / weight.sum()
    below = int(np.searchsorted(gain, saved))
    return {
        "less": round(float(share[below - 1]), 3) if below else 0.0,
        "median": round(float(gain[np.searchsorted(share, 0.5)]), 4),
    }
