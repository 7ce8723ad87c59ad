"""The judge: what policies made of a suite, in figures, intervals and ranks. It never imports ``agent``."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from .arena import WINDOWS, Arena, Played, Policy, Recorded, Suite, play

Array = np.ndarray[Any, Any]

#: "Near the oracle": the slot costs at most this much more than under its best config.
NEAR = 0.02
#: Trials after which the share of the oracle's gain is told.
MARKS = (1, 2, 4, 8, 16, 32, 64)
#: A window this many times the default's is one that people notice.
HARSH = 1.5
#: Pairs of windows of the A/A comparison that says what counts as slower.
AA_PAIRS = 20
#: Intervals speak of other tasks; with fewer tasks than this they can only speak of other noise on the same ones.
FEW = 10


def step_time(saving: Array, share: Array) -> Array:
    """Step time in units of the default's, for scaled savings of a slot with that share of the step."""
    return np.maximum(1 - np.asarray(saving) * share, 0.05)


def shares_of_gain(played: Played) -> dict[str, float]:
    """Part of the oracle's gain in step time that the best config measured so far brings, summed over tasks."""
    gain, got = played.oracle @ played.share, played.best @ played.share
    return {str(k): round(float(got[k - 1] / gain[k - 1]), 4) for k in MARKS if k <= len(gain)}


def trials_until_near(played: Played) -> Array:
    """(n,) windows until the best measured config is within NEAR of the oracle; 0: AUTO is; windows + 1: never."""
    near = played.gap <= NEAR
    first = np.where(near.any(axis=0), near.argmax(axis=0) + 1, len(near) + 1)
    # Before any trial AUTO is what a stop would commit; its saving is 0.
    auto = played.oracle[0] / np.maximum(1 - played.oracle[0], 0.05) <= NEAR
    return np.where(auto, 0, first)


def per_task(played: Played) -> dict[str, Array]:
    """The figures of each row, (n,): what intervals and ranks are made of.

    ``regret``: sum over the windows of step time over the oracle's step time, minus 1, exploration included.
    ``is_slower``: ends slower than default by more than AA_PAIRS windows of default against default could show.
    ``is_harsh``: had a window of more than HARSH default steps.
    """
    expected, oracle = step_time(played.expected, played.share), step_time(played.oracle, played.share)
    final, best = step_time(played.best[-1], played.share), step_time(played.oracle[-1], played.share)
    return {
        "regret": (expected / oracle - 1).sum(axis=0),
        "slot_regret": played.regret.sum(axis=0),
        "trials_until_near": trials_until_near(played).astype(float),
        "speedup": 1 / final,
        "oracle_speedup": 1 / best,
        "gain": 1 - final,
        "oracle_gain": 1 - best,
        "worst_window": expected.max(axis=0),
        "is_slower": (final > 1 + 1.96 * played.noise * np.sqrt(2 / AA_PAIRS)).astype(float),
        "is_harsh": (expected.max(axis=0) > HARSH).astype(float),
    }


def by_task(values: Array, n_tasks: int) -> Array:
    """Mean over the repeats of each task, (n_tasks,), of ``values`` (repeats x n_tasks,): repeats of one task are not
    independent, so intervals are drawn over tasks. With fewer than FEW tasks ``values`` are returned as they are."""
    return values if n_tasks < FEW else np.asarray(values.reshape(-1, n_tasks).mean(axis=0))


def bootstrap(values: Array, seed: int = 0, rounds: int = 2000, over: Array | None = None) -> list[float]:
    """95 % percentile-bootstrap interval (Efron 1979) of the mean of ``values`` (n,), or of their sum over the sum of
    ``over`` (n,)."""
    draws = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
    means = values[draws].mean(axis=1)
    if over is not None:
        means = means / np.maximum(over[draws].mean(axis=1), 1e-9)
    return [round(float(q), 4) for q in np.percentile(means, [2.5, 97.5])]


def _spread(values: Array, digits: int = 4) -> list[float]:
    return [round(float(q), digits) for q in np.percentile(values, [10, 50, 90])]


def summary(played: Played, n_tasks: int | None = None) -> dict[str, Any]:
    """Figures of one entrant over all rows of an arena, for people and programs.

    ``n_tasks``: tasks of the suite, of which the rows are repeats (default: every row is a task of its own).
    ``..._percentiles`` are p10, median and p90 over rows, ``..._ci95`` bootstrap intervals over tasks.
    """
    rows = per_task(played)
    n_tasks = n_tasks or len(played.share)
    near, regret = rows["trials_until_near"], rows["regret"]
    speed = by_task(np.log(rows["speedup"]), n_tasks)
    gain, got = (by_task(saved[-1] * played.share, n_tasks) for saved in (played.oracle, played.best))
    return {
        "speedup": round(float(np.exp(speed.mean())), 4),
        "speedup_ci95": [round(float(np.exp(q)), 4) for q in bootstrap(speed)],
        "speedup_percentiles": _spread(rows["speedup"]),
        "oracle_speedup": round(float(np.exp(np.log(rows["oracle_speedup"]).mean())), 4),
        "share_of_gain": shares_of_gain(played),
        "share_of_gain_ci95": bootstrap(got, over=gain),
        "trials_until_near": _spread(near),
        "never_near": round(float((near > len(played.best)).mean()), 4),
        "regret": round(float(regret.mean()), 3),
        "regret_ci95": bootstrap(by_task(regret, n_tasks)),
        "regret_percentiles": _spread(regret, 3),
        "slot_regret": round(float(rows["slot_regret"].mean()), 3),
        "worst_window": round(float(rows["worst_window"].max()), 3),
        "worst_window_percentiles": _spread(rows["worst_window"], 3),
        "harsh": round(float(rows["is_harsh"].mean()), 4),
        "slower": round(float(rows["is_slower"].mean()), 4),
        "decision_us": round(played.decision_us, 1),
    }


def ranks(regrets: Mapping[str, Array], seed: int = 0) -> dict[str, int]:
    """Rank of each entrant by mean regret over the same tasks (``by_task``), 1 = best; entrants that cannot be told
    apart share one.

    Going down the list, an entrant ties with the best of the group above it unless the 95 % bootstrap interval of
    their paired difference leaves out 0.
    """
    order = sorted(regrets, key=lambda name: float(regrets[name].mean()))
    place: dict[str, int] = {}
    head = ""
    for i, name in enumerate(order):
        if not head or bootstrap(regrets[name] - regrets[head], seed)[0] > 0:
            head, rank = name, i + 1
        place[name] = rank
    return place


#: Layout of a submission.
FORMAT = 2
#: What an entrant leaves in force when its search is over: the best config it measured, or the last one it played.
COMMITS = ("best", "last")


def judged(policy: Policy, suite: Suite, repeats: int, seed: int, commits: str = "best") -> Played:
    """:func:`play`, with what is left in force by the rule ``commits``. Raises ValueError as ``play`` does."""
    if commits not in COMMITS:
        raise ValueError(f"commits is {' or '.join(COMMITS)}, not {commits!r}")
    arena = Arena(suite, repeats, seed)
    played = play(policy, arena)
    if commits == "last":
        kept = [suite.truth_at(t)[arena.task, configs] for t, configs in enumerate(played.configs)]
        played = dataclasses.replace(played, best=np.stack(kept))
    return played


def pack(configs: Array) -> str:
    """Decisions (windows, n) as text: bytes, compressed, base64."""
    return base64.b64encode(zlib.compress(np.asarray(configs, np.uint8).tobytes(), 9)).decode()


def unpack(text: str, n: int) -> Array:
    """Inverse of :func:`pack`, (windows, n). Raises ValueError when it is not that."""
    try:
        # Never more than what is wanted: a few bytes may unpack to gigabytes.
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), max(1, WINDOWS * n + 1))
        flat = np.frombuffer(data, np.uint8)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the decisions cannot be unpacked: {error}") from error
    if len(flat) != WINDOWS * n:
        raise ValueError(f"{len(flat)} decisions, the suite has {WINDOWS} windows x {n} runs")
    return flat.reshape(WINDOWS, n)


def replay(submission: Mapping[str, Any], suite: Suite) -> Played:
    """Play a submission's decisions again, believing nothing else in it.

    Raises ValueError, with the reason, when it is of another format or suite, or its figures do not come out.
    """
    try:
        if submission["format"] != FORMAT:
            raise ValueError(f"format {submission['format']}, this version reads {FORMAT}")
        if submission["digest"] != suite.digest:
            raise ValueError(
                f"made on {submission['suite']} {submission['digest']}, this is {suite.name} {suite.digest}"
            )
        repeats = int(submission["repeats"])
        configs = unpack(submission["decisions"], repeats * len(suite))
        played = judged(Recorded(configs), suite, repeats, int(submission["seed"]), submission["commits"])
        claimed = dict(submission["figures"])
        found = summary(played, len(suite)) | {"decision_us": float(claimed["decision_us"])}  # ours took no decision
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a submission: {type(error).__name__} {error}") from error
    for key, value in found.items():
        if claimed.get(key) != value:
            raise ValueError(f"its decisions give {key} {value}, it says {claimed.get(key)}")
    return played
