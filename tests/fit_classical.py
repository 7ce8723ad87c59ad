"""Finds the classical entrants' best settings: ``python tests/fit_classical.py > agent/policies/classical.json``.

On jobs of both families that no suite holds; what was tried goes with them, progress to stderr. Some hours.
"""

import json
import sys

import numpy as np
from dynamiccl.agent.bench.run import entrants
from dynamiccl.agent.bench.spread import spread
from dynamiccl.agent.policies.classical import make_classical
from dynamiccl.envs.bench.job_arena import play
from dynamiccl.envs.bench.scores import HORIZONS
from dynamiccl.envs.search.belief import Prior
from dynamiccl.envs.search.watch import SearchConfig
from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from make_job_suites import draw_suite

#: What :func:`fit` tries for each entrant, first the settings themselves, then when it ends.
GRID = {
    "random": [{"horizon": h} for h in (2, 4, 8, 16)],
    "sweep": [{"hysteresis": h} for h in (0.0, 0.02, 0.05)],
    "coordinate-descent": [{"horizon": h} for h in (4, 8, 16, 30)],
    "tpe": [{"startup": s, "horizon": h} for s in (3, 6) for h in (12, 24)],
}
ENDS = [{"patience": p} for p in (1, 2)]
#: Jobs that settings are fitted on, of each family; the seed is none of a suite's.
FIT_JOBS, FIT_SEED = 12, 2_900_000_000


def fit(processes=2, progress=lambda line: None, jobs=FIT_JOBS):
    """Try the grid of each entrant on jobs that no suite holds, of both families; of each the settings that lose the
    least time over 20,000 steps, and all that were tried. Raises ValueError when one fails."""
    found = {}
    names = [name for name in reversed(GRID) if name != "tpe" or "tpe" in entrants()]  # the slow ones first
    items = [(name, jobs) for name in names]
    for (name, _), result in spread(fit_one, items, processes, lambda item: 3600.0):
        if "failed" in result:
            raise ValueError(f"{name}: {result['failed']}")
        best, worst = result["tried"][0], result["tried"][-1]
        found[name] = result
        of = f"worst of {len(result['tried'])}: {worst['lost']}"
        progress(f"{name}: {best['settings']} loses {best['lost']} steps in {HORIZONS[0]:,} ({of})")
    record = {"jobs": 2 * jobs, "seed": FIT_SEED, "objective": f"default steps lost in {HORIZONS[0]}"}
    return record | {"entrants": {name: found[name] for name in GRID if name in found}}


def fit_one(item):
    """The best settings of one entrant, and all that were tried, best first."""
    name, jobs = item
    suites = [draw_suite("fit", family, FIT_SEED, jobs) for family in (STANDARD, HELD_OUT)]
    tried = []

    def try_all(candidates):
        for settings in candidates:
            if any(row["settings"] == settings for row in tried):
                continue
            lost = []
            for suite in suites:
                policy = make_classical(name, 0, settings)
                opened = suite.open(np.arange(len(suite)), 0, Prior.load(), SearchConfig())
                lost.append(play(policy, *opened, after=0).scores.lost[:, 0].mean())
            tried.append({"settings": settings, "lost": round(float(np.mean(lost)), 1)})
        tried.sort(key=lambda row: float(row["lost"]))
        return dict(tried[0]["settings"])

    best = try_all(GRID[name])
    try_all([best | end for end in ENDS])
    return {"settings": tried[0]["settings"], "lost": tried[0]["lost"], "tried": tried}


if __name__ == "__main__":
    print(json.dumps(fit(progress=lambda line: print(line, file=sys.stderr)), indent=1))
