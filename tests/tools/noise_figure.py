"""Draws the noise of simulated steps beside that of real nodes: ``python tests/tools/noise_figure.py [OUT.svg]``.

On the left how long noise lasts: the correlation of a step with one some steps later, of runs that are short, and of
the few that are long. On the right how far steps are from the median of their run, in robust deviations. A band
holds 80 % of the runs, a line is their median. Real: the runs of A100 and H100 nodes in ``tests/data/node_steps.npz``.
Simulated: jobs of the family that is fitted to them, with as many steps each; the correlation of a short run is too low
by the same amount in both. ``tests/envs/sim/test_noise.py`` asserts what the figure shows.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import matplotlib
from dynamiccl.envs.sim.noise import NODE, Noise
from step_series import LONG, ROBUST, all_series

matplotlib.use("svg")
from matplotlib import pyplot as plt

NODES = ("a100", "h100")
LAGS = np.arange(1, 13)
LONG_LAGS = np.unique(np.geomspace(1, 100, 16).astype(int))
QUANTILES = np.array([5, 10, 25, 50, 75, 90, 95])
OUT = Path(__file__).resolve().parents[2] / "docs" / "_static" / "node_noise.svg"
COLORS = {"real": "#1b6ca8", "simulated": "#d1495b"}


def settled_logs(steps):
    """Logs of a run's steps without the first ones, less their median, in robust standard deviations; (n,)."""
    log = np.log(steps)
    off = log - np.median(log)
    return off / (ROBUST * np.median(np.abs(off)))


def correlations(off, lags):
    """Of what is clipped at four deviations."""
    body = np.clip(off, -4, 4)
    body = body - body.mean()
    power = (body**2).mean()
    return [(body[lag:] * body[:-lag]).mean() / power for lag in lags]


def simulated(lengths, seed=0):
    """Steps of as many jobs, one run each: arrays of the given lengths."""
    rng, n = np.random.default_rng(seed), len(lengths)
    lengths = np.asarray(lengths)
    noise = Noise.draw(NODE, rng, n)
    steps = noise.steps(np.ones(n), lengths, rng, (np.zeros(n), np.zeros(n)))
    return [row[:length] for row, length in zip(steps, lengths, strict=True)]


def band(axis, x, runs, name):
    """The middle 80 % of ``runs``, (n, x), and their median."""
    low, middle, high = np.nanpercentile(np.array(runs), [10, 50, 90], axis=0)
    axis.fill_between(x, low, high, color=COLORS[name], alpha=0.25, linewidth=0)
    axis.plot(x, middle, color=COLORS[name], label=name)


def draw(out=OUT):
    """Write the figure."""
    real = [one.settled for one in all_series() if one.gpu in NODES]
    long = [one.settled for one in all_series() if len(one.seconds) >= LONG]
    short = [steps for steps in real if len(steps) < LONG]
    plt.rcParams["svg.hashsalt"] = "node noise"  # the same picture from the same data
    figure, (lasts, lasts_long, wide) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for name, runs in (("real", short), ("simulated", simulated([len(steps) for steps in short]))):
        logs = [settled_logs(steps) for steps in runs]
        band(lasts, LAGS, [correlations(off, LAGS) for off in logs], name)
        band(wide, QUANTILES, [np.percentile(off, QUANTILES) for off in logs], name)
    made = [settled_logs(steps) for steps in simulated([2000] * 300)]
    band(lasts_long, LONG_LAGS, [correlations(off, LONG_LAGS) for off in made], "simulated")
    for steps in long:
        found = correlations(settled_logs(steps), LONG_LAGS)
        lasts_long.plot(LONG_LAGS, found, color=COLORS["real"], label="real, one run")
    lasts.set(xlabel="steps later", ylabel="correlation", title=f"{len(short)} short runs")
    lasts_long.set(xscale="log", xlabel="steps later", title=f"{len(long)} long runs")
    wide.set(xlabel="quantile, %", ylabel="robust standard deviations", title=f"{len(short)} short runs")
    for axis in (lasts, lasts_long, wide):
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None})
    print(f"{out}: {len(short)} short runs, {len(long)} long ones")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:2]))
