"""How good advice is, on simulated jobs with known truth: ``python tests/tools/check_advice.py [JOBS]
[SEED]``, or ``fit``.

For each family, and for recordings that show no compute and those that show what is exposed: how often the 80 %
interval holds the true gain of the advised table, what comes of following the advice (to measure the table, and to keep
it only where it is faster, as a tuning run does; unseen where the advice says that it may be), and what part of the
possible gain that takes. ``fit`` prints what exposure tells of what the belief holds: ``agent/gain.EXPOSED``.
"""

import sys
from pathlib import Path

import numpy as np
from dynamiccl.agent.advice.advise import EXPOSED, UNSEEN, Gains, tell
from dynamiccl.agent.train.job_prior import figures_of, truths
from dynamiccl.envs.search.belief.belief import Belief
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import SequentialTest
from dynamiccl.envs.search.config import ALPHA
from dynamiccl.envs.search.step_times import trimmed_mean, window_noise
from dynamiccl.envs.sim.jobs import HELD_OUT, STANDARD, draw_jobs

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from oracle import oracle

#: What a recording shows beside the collectives.
SHOWN = ("no compute", "exposure")
PRIOR = Prior.load()


def figures(kind, n, seed, shown="no compute", best=False):
    """A row a job: true gain, middle, low, high of the prediction, advised or not, true gain of who follows it, the
    bounds of the best possible gain, and that (NaN unless asked for)."""
    rng = np.random.default_rng(seed)
    jobs = draw_jobs(kind, rng, n)
    none = np.zeros((n, jobs.width), int)
    chosen, rows, unseen = none.copy(), [], np.zeros(n, bool)
    for j in range(n):
        belief = belief_of(jobs, j, shown)
        gains, k = Gains(belief), int(jobs.n_slots[j])
        chosen[j, :k] = gains.best()
        unseen[j] = gains.risk(chosen[j, :k]) <= UNSEEN
        rows.append((*gains.interval(chosen[j, :k]), bool(chosen[j].any()), *gains.possible()[1:]))
    default, tuned = jobs.step_us(none)[0], jobs.step_us(chosen)[0]
    true = 1 - tuned / default
    most = 1 - oracle(jobs)[1] / default if best else np.full(n, np.nan)
    keeps = unseen | faster(jobs, chosen, rng)
    middle_, low, high, advised, least, possible = np.array(rows, float).T
    return np.column_stack(
        [true, middle_, low, high, advised, np.where(keeps, true, 0.0), least, possible, most]
    )


def belief_of(jobs, j, shown):
    """What is believed of job ``j`` from a recording of its default steps."""
    k, f = int(jobs.n_slots[j]), jobs.fingerprint
    features, share = f.vector().reshape(len(jobs), jobs.width, -1), f.share.reshape(-1, jobs.width)
    belief = Belief(PRIOR, features[j, :k], jobs.mask[j, :k], share[j, :k])
    if shown == SHOWN[1]:
        tell(belief, jobs.exposed[j, :k])
    return belief


def faster(jobs, configs, rng, steps=8, pairs=12):
    """(n,) bool: the table won its comparison with the default, window by window, as in
    ``envs/search/comparison.py``."""
    none = np.zeros_like(configs)
    first, _ = jobs.window(none, 20, rng)
    noises = [window_noise(np.log(x / np.median(x)), steps) * np.sqrt(2) for x in first]
    tests = [SequentialTest(noise, ALPHA) for noise in noises]
    won, over = np.zeros(len(jobs), bool), ~configs.any(axis=1)
    for _ in range(pairs):
        default, tuned = (jobs.window(c, np.where(over, 0, steps), rng)[0] for c in (none, configs))
        for j in np.flatnonzero(~over):
            tests[j].logs.append(np.log(trimmed_mean(default[j]) / trimmed_mean(tuned[j])))
            low, high = tests[j].interval
            won[j] = tests[j].n > 1 and low > 0
            over[j] = won[j] or high < 0
    return won


def fit(n=150, seed=11):
    """Print the constant of ``agent/advice/advise.py`` as these jobs give it."""
    for kind in (STANDARD.only("plain"), HELD_OUT.only("plain")):
        jobs = draw_jobs(kind, np.random.default_rng(seed), n)
        logs, savings = truths(jobs)
        used = np.arange(jobs.width)[None] < jobs.n_slots[:, None]
        found, known = figures_of(logs, savings, jobs.mask & used[..., None])
        matters = jobs.fingerprint.share.reshape(-1, jobs.width) > 0.02
        some = known[..., -1] & used & matters
        told(f"{kind.name}: exposure", EXPOSED, jobs.exposed[some], found[..., -1][some])


def told(name, used, x, y):
    slope, offset = np.polyfit(x, y, 1)
    rest = (y - slope * x - offset).std()
    print(f"{name:28} {offset:+.2f} + {slope:.2f} x, give or take {rest:.3f} of {y.std():.3f}; in use {used}")


def say(name, rows):
    true, expected, low, high, advised, followed, least, possible, most = rows.T
    on = advised > 0
    held = (low <= true) & (true <= high)
    print(
        f"{name:32} jobs {len(rows)}, advised {on.sum()}: interval holds {held[on].mean():.0%}; table's gain "
        f"{true[on].mean():.2%} (predicted {expected[on].mean():.2%}, width {(high - low)[on].mean():.2%}), slower by "
        f"over 1 % {(true < -0.01).mean():.1%}; who follows: {followed.mean():.2%}, slower by over 1 % "
        f"{(followed < -0.01).mean():.1%}, of the best {np.nansum(followed) / max(np.nansum(most), 1e-9):.0%}; "
        f"the best possible within its interval {((least <= most) & (most <= possible)).mean():.0%}"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        fit()
        raise SystemExit
    n, seed = (int(x) for x in [*sys.argv[1:], *("200", "7")[len(sys.argv) - 1 :]])
    parts = {}
    for kind in (STANDARD.only("plain"), HELD_OUT.only("plain")):
        for shown in SHOWN:
            parts[kind.name, shown] = figures(kind, n, seed, shown, True)
            say(f"{kind.name}, {shown}", parts[kind.name, shown])
    say("pooled", np.concatenate(list(parts.values())))
