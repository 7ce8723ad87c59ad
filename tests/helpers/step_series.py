"""Series of real training steps (``data/node_steps.npz``), and the figures by which series are compared."""

from dataclasses import dataclass

import numpy as np
from dynamiccl.envs.sim.noise import Noise
from paths import DATA

#: Steps of a short series that are left out, at the least: a job's first ones are slow. Of a long one.
FIRST, FIRST_OF_LONG = 10, 100
LONG = 500
#: Of a normal distribution, in its median absolute deviation.
ROBUST = 1.4826
LAGS = (1, 10, 100)


@dataclass(frozen=True)
class Series:
    """One run: the GPU of its nodes, and the seconds of its steps."""

    gpu: str
    seconds: np.ndarray

    @property
    def settled(self):
        """Its steps without the first ones."""
        n = len(self.seconds)
        return self.seconds[FIRST_OF_LONG if n >= LONG else max(FIRST, n // 4) :]


def all_series():
    """Every series on file."""
    with np.load(DATA / "node_steps.npz", allow_pickle=False) as file:
        parts = np.split(file["step_10us"] / 1e5, np.cumsum(file["n_steps"])[:-1])
        return [Series(str(gpu), part) for gpu, part in zip(file["gpu"], parts, strict=True)]


def simulated(family, n_steps, n=600, seed=0):
    """Series of ``n`` jobs whose step takes one second but for the noise; ``n_steps`` are as many or one number."""
    rng = np.random.default_rng(seed)
    noise = Noise.draw(family, rng, n)
    lengths = np.broadcast_to(n_steps, n)
    steps = noise.steps(np.ones(n), lengths, rng, (np.zeros(n), np.zeros(n)))
    return [Series("", row[:length]) for row, length in zip(steps, lengths, strict=True)]


def deviations(steps):
    """Logs of steps less their median (n,), and their robust standard deviation."""
    log = np.log(steps)
    off = log - np.median(log)
    return off, ROBUST * np.median(np.abs(off))


def correlations(off, sd, lags):
    """Of deviations with ones so many steps later, clipped at four robust standard deviations; NaN where too short."""
    body = np.clip(off, -4 * sd, 4 * sd)
    body = body - body.mean()
    power = (body**2).mean()
    found = []
    for lag in lags:
        known = lag < len(body) - 10
        found.append((body[lag:] * body[:-lag]).mean() / power if known else np.nan)
    return found


def figures(steps):
    """What a series of steps is like.

    The robust standard deviation of the log step (per cent), correlations at LAGS of what is clipped at four of these
    (NaN where the series is too short), the share of steps 1.1 times as long as the median and more, and quantiles at
    5, 25, 75 and 95 % in robust standard deviations.
    """
    off, sd = deviations(steps)
    found = {"sd": 100 * sd}
    for lag, value in zip(LAGS, correlations(off, sd, LAGS), strict=True):
        found[f"lag {lag}"] = value
    found["long"] = (off > np.log(1.1)).mean()
    for q in (5, 25, 75, 95):
        found[f"q{q}"] = np.percentile(off, q) / sd
    return found


def spread(many, name):
    """p10, median and p90 of one figure over ``many`` series' figures."""
    return np.nanpercentile([one[name] for one in many], [10, 50, 90])


def most_of(n, level, sure=0.95):
    """So many of ``n`` at a ``level`` each are not exceeded in ``sure`` of all cases (binomial)."""
    below, k = (1 - level) ** n, 0
    total = below
    while total < sure:
        k += 1
        below *= (n - k + 1) / k * level / (1 - level)
        total += below
    return k
