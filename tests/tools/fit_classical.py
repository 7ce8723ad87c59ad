"""Finds the classical entrants' best settings, which stand in ``agent/policies/classical.py``: ``python
tests/tools/fit_classical.py``.

On jobs of both families that no suite holds; prints what was tried as JSON. Some minutes.
"""

import json

import numpy as np
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.bench.job_arena import play
from dynamiccl.envs.bench.scores import HORIZON
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from make_job_suites import draw_suite

#: What is tried for each entrant, first the settings themselves, then what is risked, then when it ends.
GRID = {
    "random": [{"horizon": h} for h in (2, 4, 8, 16)],
    "sweep": [{}],
    "coordinate-descent": [{"horizon": h} for h in (4, 8, 16, 30)],
    # NVIDIA's own values, by model and GPU.
    "nvidia-price": [{"price": p, "horizon": h} for p in (0.01, 0.02, 0.025) for h in (12, 24)],
}
ENDS = [{"patience": p} for p in (1, 2)]
CARES = [{"care": c} for c in (0.05, 0.1, 0.2, 0.5)]
#: Jobs that settings are fitted on, of each family; the seed is none of a suite's.
FIT_JOBS, FIT_SEED = 25, 2_900_000_000


def fit_one(name, jobs=FIT_JOBS):
    """The settings of one entrant that lose the least time over HORIZON steps, and all that were tried, best first."""
    suites = [draw_suite("fit", family, FIT_SEED, jobs) for family in (STANDARD, HELD_OUT)]
    tried = []

    def try_all(candidates):
        for settings in candidates:
            if any(row["settings"] == settings for row in tried):
                continue
            lost = []
            for suite in suites:
                policy = make_chooser(name)
                vars(policy).update(settings)
                opened = suite.open(np.arange(len(suite)), 0)
                lost.append(play(policy, *opened, after=0).scores.lost.mean())
            tried.append({"settings": settings, "lost": round(float(np.mean(lost)), 1)})
        tried.sort(key=lambda row: float(row["lost"]))
        return dict(tried[0]["settings"])

    best = try_all(GRID[name])
    best = try_all([best | care for care in CARES])
    try_all([best | end for end in ENDS])
    return {"settings": tried[0]["settings"], "lost": tried[0]["lost"], "tried": tried}


if __name__ == "__main__":
    found = {name: fit_one(name) for name in GRID}
    record = {"jobs": 2 * FIT_JOBS, "seed": FIT_SEED, "objective": f"default steps lost in {HORIZON}"}
    print(json.dumps(record | {"entrants": found}, indent=1))
