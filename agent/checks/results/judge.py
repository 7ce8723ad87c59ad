"""Judges the results of ``lab gpu-check``: gains of alternating steps, noise, interference, and what may be claimed.

A gain is the trimmed mean of the log differences of neighbouring steps, one under each arm (A B B A): what lasts
longer than two steps falls out of it. The test is the product's own
(:class:`dynamiccl.envs.search.comparison.SequentialTest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ....envs.search.comparison import SequentialTest
from ....envs.search.config import ALPHA
from .files import Results

Array = np.ndarray[Any, Any]

#: Part of the differences that is left out at each end.
TRIM = 0.1
#: Alternating steps that a claimed gain needs.
LEAST_STEPS = 200
#: Times that a long step takes, of the median.
LONG = 1.1
#: Standard deviation that a test is told where it is not measured: never below this.
LEAST_NOISE = 5e-4


@dataclass(frozen=True)
class Gain:
    """What a race came to. ``gain``: part of the untouched step that the candidate saves, ``low`` to ``high`` by the
    test; ``steps``: alternating steps of both arms."""

    race: str
    gain: float
    low: float
    high: float
    steps: int
    noise: float  # standard deviation of one pair's log difference
    table: str = ""
    baseline: str = ""  # why the baseline is not NCCL untouched; empty where it is

    @property
    def is_sure(self) -> bool:
        """Whether the test excludes "no gain", either way."""
        return self.low > 0 or self.high < 0


def paired(us: Array) -> Array:
    """Log differences first arm - second arm of steps in the order A B B A, shape (n,) -> (n // 2,).

    An incomplete block at the end is left out.
    """
    blocks = np.log(us[: len(us) // 4 * 4]).reshape(-1, 4)
    differences = np.stack([blocks[:, 0] - blocks[:, 1], blocks[:, 3] - blocks[:, 2]], axis=1)
    return differences.reshape(-1)


def trimmed_mean(x: Array) -> float:
    """Mean without the TRIM smallest and largest parts; 0 for none."""
    ordered = np.sort(x)
    cut = int(TRIM * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return float(kept.mean()) if len(kept) else 0.0


def robust_sd(x: Array) -> float:
    """1.4826 times the median absolute deviation; 0 for none."""
    if not len(x):
        return 0.0
    return float(1.4826 * np.median(np.abs(x - np.median(x))))


def judged(race: str, us: Array, alpha: float = ALPHA, **about: str) -> Gain:
    """The gain of alternating steps, microseconds in the order A B B A, and its interval at level ``alpha``."""
    logs = paired(us)
    noise = max(robust_sd(logs), LEAST_NOISE)
    test = SequentialTest(noise, alpha)
    test.logs = logs.tolist()
    low, high = test.interval if len(logs) else (-math.inf, math.inf)
    gain, low, high = (1 - math.exp(-x) for x in (trimmed_mean(logs), low, high))
    return Gain(race, gain, low, high, 2 * len(logs), noise, **about)


def races(results: Results) -> list[Gain]:
    """The races of the truth part, each with its gain over its baseline, in the order in which they ran."""
    steps, arms = results.tables["steps"], results.tables["truth"]
    found = []
    for race in dict.fromkeys(arms["race"]):
        sides = arms[arms["race"] == race]
        first, second = sides.iloc[0], sides.iloc[-1]
        mine = steps[steps["race"] == race].sort_values("at")
        us = mine["us"].to_numpy(float)
        table = f"{second['comm']}: {_text(second['table']) or 'untouched'}"
        found.append(judged(race, us, table=table, baseline=_touched(results, race, first)))
    return found


def _touched(results: Results, race: str, arm: pd.Series[Any]) -> str:
    """Why a baseline is not NCCL untouched, empty where it is."""
    if arm["comm"] != "nccl":
        return "its communicator has more channels than NCCL makes"
    if _text(arm["table"]):
        return "it runs under a table"
    forced = _forced(results.run)
    if forced:
        return f"{', '.join(forced)} was set"
    told = results.run.get("parts", {}).get("truth", {}).get("races", {}).get(race, {})
    asked, answered = told.get("asked_answered", {}).get(str(arm["arm"]), (0, 0))
    if answered:
        return f"the tuner answered {answered} of {asked} questions"
    return ""


#: What the check itself sets for its jobs, by the placement of their ranks.
PLACEMENTS: dict[str, dict[str, str]] = {
    "apart": {},  # a GPU each, or no GPU at all
    "hosts": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"},
    "shared": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC"},
}


def _forced(run: Mapping[str, Any]) -> list[str]:
    """NCCL's settings that were noted, but for those that the placement needs."""
    needed = PLACEMENTS.get(str(run.get("placement")), {})
    noted = run.get("environment", {})
    found = []
    for name, value in noted.items():
        if name.startswith("NCCL_") and needed.get(name) != value:
            found.append(name)
    return found


def _text(value: Any) -> str:
    """A cell of a table that may be empty."""
    return value if isinstance(value, str) else ""


def claims(results: Results, others: Sequence[Results] = ()) -> list[tuple[Gain, str]]:
    """The races of a run, each with why its gain must not be claimed: empty where it may be. ``others``: further runs
    that may agree."""
    found = []
    for gain in races(results):
        same, unlike = [], []
        for other in others:
            its = [one for one in races(other) if one.race == gain.race]
            if its and (why := _unlike(results.run, other.run)):
                unlike.append(f"{other.folder} {why}")
            else:
                same += its
        why = "emulated" if results.run.get("emulated") else refusal(gain, same, unlike)
        why = why or _unsound(results.tables["sweep"], gain)
        found.append((gain, why))
    return found


def flags(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column of True and False, which a file holds as text."""
    return column.astype(str) == "True"


def is_sound(sweep: pd.DataFrame) -> pd.Series[Any]:
    """Rows of calls whose result was right, that ran as asked for, on all ranks alike."""
    right = flags(sweep["right"])
    obeyed = flags(sweep["obeyed"])
    agreed = flags(sweep["agreed"])
    return right & obeyed & agreed


def _unsound(sweep: pd.DataFrame, gain: Gain) -> str:
    """A row of the gain's table that the sweep has found wrong, in words; empty where there is none."""
    comm, _, table = gain.table.partition(": ")
    mine = sweep[sweep["comm"] == comm]
    wrong = mine[~is_sound(mine)]
    sizes = wrong["n_bytes"].astype(int)
    rows = wrong["func"] + ":" + sizes.astype(str) + ":" + wrong["asked"]
    used = table.split(";")
    bad = sorted({*rows} & {*used})
    return f"in the sweep {bad[0]} was wrong, not obeyed or not alike on all ranks" if bad else ""


#: What two runs have in common if one confirms the gain of the other.
_ALIKE = ("device", "ranks", "nodes", "placement", "network", "environment")


def _unlike(run: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why the other run says nothing about this run's gains, empty where it does."""
    if other.get("began") == run.get("began"):
        return "is the same run"
    if other.get("emulated"):
        return "is emulated"
    pairs = {name: (run.get(name), other.get(name)) for name in _ALIKE}
    pairs["nccl"] = run.get("versions", {}).get("nccl"), other.get("versions", {}).get("nccl")
    apart = [f"{name} {its}, not {mine}" for name, (mine, its) in pairs.items() if its != mine]
    return f"has {', '.join(apart)}" if apart else ""


def refusal(gain: Gain, others: Sequence[Gain], unlike: Sequence[str] = ()) -> str:
    """Why a gain must not be claimed, empty where it may be. ``others``: the same race of other runs like this one;
    ``unlike``: runs that cannot agree, in words."""
    if gain.baseline:
        return f"the baseline is not NCCL untouched: {gain.baseline}"
    if gain.steps < LEAST_STEPS:
        return f"{gain.steps} alternating steps, {LEAST_STEPS} are needed"
    if not gain.low > 0:
        return "the test does not exclude that there is no gain"
    if not any(other.low > 0 and not other.baseline and other.table == gain.table for other in others):
        return "; ".join(["no second run agrees", *unlike])
    return ""


def best_table(sweep: pd.DataFrame, comm: str, n_bytes: int) -> str:
    """The fastest sound config of each collective of one size that was measured, as ``func:bytes:decision;...``.

    Where nothing beats NCCL's own choice, the best of the others. Empty where the sweep has none.
    """
    sound = sweep[is_sound(sweep)]
    mine = sound[sound["comm"] == comm]
    of_size = mine[mine["n_bytes"] == n_bytes]
    timed = of_size[of_size["calls"] > 0]
    fits = timed[timed["asked"] != "auto"]
    best = []
    for func in dict.fromkeys(fits["func"]):
        rows = fits[fits["func"] == func]
        row = rows.loc[rows["p50_us"].idxmin()]
        best.append(f"{func}:{n_bytes}:{row['asked']}")
    return ";".join(best)


# -- noise -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """How default steps scatter. ``sd``: robust standard deviation of the log of a step; ``lags``: correlation at lags
    1, 10 and 100 (NaN where too short); ``long``: part of steps longer than LONG medians; ``pair``: robust standard
    deviation of a difference of neighbours; ``aa``: the default against itself."""

    race: str
    steps: int
    sd: float
    lags: tuple[float, float, float]
    long: float
    pair: float
    aa: Gain


def noise_of(race: str, us: Array) -> Noise:
    """The noise of one series of default steps, in microseconds."""
    logs = np.log(us)
    lags = correlation(logs, 1), correlation(logs, 10), correlation(logs, 100)
    long = float((us > LONG * np.median(us)).mean())
    return Noise(race, len(us), robust_sd(logs), lags, long, robust_sd(paired(us)), judged(race, us))


def correlation(logs: Array, lag: int) -> float:
    """Correlation of a series with itself ``lag`` steps later, outliers pulled in; NaN for a short series."""
    if len(logs) < 3 * lag + 10:
        return math.nan
    middle, scale = np.median(logs), 3 * max(robust_sd(logs), 1e-9)
    x = np.clip(logs - middle, -scale, scale)
    x = x - x.mean()
    return float((x[lag:] * x[:-lag]).mean() / max(float((x * x).mean()), 1e-18))


def noises(results: Results) -> list[Noise]:
    """The noise of each A/A series on file."""
    steps = results.tables["steps"]
    default = steps[steps["arm"] == "default"]
    found = []
    for race in dict.fromkeys(default["race"]):
        us = default[default["race"] == race].sort_values("at")["us"].to_numpy(float)
        if len(us) >= 8:
            found.append(noise_of(race, us))
    return found


@dataclass(frozen=True)
class Ratio:
    """Step time with the silent tuner over step time without it: log mean, standard error, pairs of blocks."""

    ratio: float
    error: float
    pairs: int


def outside(results: Results) -> Ratio | None:
    """Arm (a) over arm (b): blocks of steps of two processes in turn; None where there are none."""
    steps = results.tables["steps"]
    mine = steps[steps["race"] == "outside"]
    number = mine["at"] // BLOCK
    middles = {}
    for block in sorted(set(number.astype(int))):
        rows = mine[number == block]
        middles[block] = str(rows["arm"].iloc[0]), float(rows["us"].median())
    logs = []
    for block in range(0, len(middles) - 1, 2):
        if block not in middles or block + 1 not in middles:
            continue
        pair = dict((middles[block], middles[block + 1]))
        if len(pair) == 2:
            logs.append(math.log(pair["tuner"] / pair["profiler"]))
    if not logs:
        return None
    error = float(np.std(logs, ddof=1) / math.sqrt(len(logs))) if len(logs) > 1 else math.nan
    return Ratio(math.exp(float(np.mean(logs))), error, len(logs))


#: Numbers that a block of steps has for itself.
BLOCK = 100_000


def power(gain: float, series: Sequence[Array], alpha: float = ALPHA) -> tuple[int, int]:
    """How many of some noise series (log step times) show a gain of their second arm: (found, of how many)."""
    found = 0
    for logs in series:
        us = 1e4 * np.exp(logs)
        second = np.arange(len(us)) % 4 // 2 != np.arange(len(us)) % 2
        us = np.where(second, us * (1 - gain), us)
        found += judged("", us, alpha).low > 0
    return found, len(series)
