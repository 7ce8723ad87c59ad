"""How good predicted gains are, on simulated jobs with known truth: ``python tests/check_advice.py [JOBS] [SEED]``.

For each family, with and without exposure known: how often the 80 % interval holds the true gain of the advised table,
how often following it makes a job slower by over 1 %, and what part of the possible gain it takes.
"""

import sys

import numpy as np
from dynamiccl.agent.gain import Recorded, predict
from dynamiccl.envs.sim import family
from dynamiccl.envs.sim.jobs import HELD_OUT, SLOTS, STANDARD, draw_jobs, oracle
from dynamiccl.traces.fingerprint import Fingerprint


def figures(kind, n, seed, exposed=True, best=False):
    """(one row a job: true gain, median, low, high of the prediction, advised or not)."""
    fleet = family.draw_fleet(kind.clusters, np.random.default_rng(seed), n)  # draw_jobs' own first draw
    rng = np.random.default_rng(seed)
    jobs = draw_jobs(kind, rng, n)
    assert np.array_equal(jobs.fingerprint.n_ranks[::SLOTS], fleet.n_ranks)
    none = np.zeros((n, SLOTS), int)
    _, call_us = jobs.step_us(none)
    call_us = call_us * np.exp(rng.normal(0, 0.02, call_us.shape))
    chosen, rows = none.copy(), []
    for j in range(n):
        k = int(jobs.n_slots[j])
        at = j * SLOTS + np.arange(k)
        print_ = Fingerprint(**{name: np.asarray(v)[at] for name, v in vars(jobs.fingerprint).items()})
        seen = jobs.exposed[j, :k] if exposed else np.full(k, np.nan)
        blank = np.full(k, np.nan)
        gains = predict(Recorded(print_, fleet.take(np.full(k, j)), call_us[j, :k], seen, blank, blank), seed=j)
        chosen[j, :k] = gains.best()
        rows.append((*gains.interval(chosen[j, :k]), bool(chosen[j].any()), *gains.possible()[1:]))
    default, tuned = jobs.step_us(none)[0], jobs.step_us(chosen)[0]
    true = 1 - tuned / default
    most = 1 - oracle(jobs)[1] / default if best else np.full(n, np.nan)
    return np.column_stack([true, np.array(rows, float), most])


def told(name, rows):
    true, middle, low, high, advised, least, possible, most = rows.T
    on = advised > 0
    held = (low <= true) & (true <= high)
    print(
        f"{name:28} jobs {len(rows)}, advised {on.sum()}: interval holds {held[on].mean():.0%}, slower by over 1 %: "
        f"{(true < -0.01).mean():.1%}, gain {true[on].mean():.2%} (predicted {middle[on].mean():.2%}, "
        f"width {(high - low)[on].mean():.2%}), of the best {np.nansum(true) / max(np.nansum(most), 1e-9):.0%}; "
        f"the best possible within its interval {((least <= most) & (most <= possible)).mean():.0%}"
    )


if __name__ == "__main__":
    n, seed = (int(x) for x in [*sys.argv[1:], "200", "7"][:2]) if len(sys.argv) > 1 else (200, 7)
    for kind in (STANDARD, HELD_OUT):
        for exposed in (True, False):
            told(f"{kind.name}, exposure {'known' if exposed else 'unknown'}", figures(kind, n, seed, exposed, True))
