"""The judge of submissions: believes only decisions, and plays them again. It never imports ``agent``.

A submission is one JSON object: who played which jobs of which suite with which search, each turn's decision (packed),
and what it says came of it. Any job can be played again alone. The search's name (``sources.search_digest``) only
explains a refusal.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...traces.spaces import N_CONFIGS
from ..search.interfaces import Policy, actions_of
from .job_arena import ReplayedDecisions, play
from .job_suites import JobSuite
from .scores import Scores, summary
from .sources import search_digest

Array = np.ndarray[Any, Any]

#: Layout of a submission. One of the layout before is read too: it has a decision in a byte, what comes next first.
FORMAT, BEFORE = 6, 5
#: A figure that comes out again may differ by so much, in its own unit: the last digits of another machine.
SAME = 2e-5
#: More turns than this no search takes.
MOST_TURNS = 20_000
#: The rule again under other noise: what lies between it and the rule is luck.
AGAIN = "aa"


def seed_of(entrant: str) -> int:
    """Of the noise that an entrant meets: all the same, so that the board compares them job by job; but for AGAIN."""
    return 1 if entrant == AGAIN else 0


def pack(decisions: Sequence[Sequence[int]]) -> str:
    """Decisions of each job as text: how many, and the actions in two bytes each, compressed, base64."""
    lengths = np.array([len(job) for job in decisions], "<u4")
    jobs = [np.asarray(job, "<u2") for job in decisions]
    flat = np.concatenate(jobs or [np.zeros(0, "<u2")])
    data = lengths.tobytes() + flat.tobytes()
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpack(text: str, n: int, layout: int = FORMAT) -> list[list[int]]:
    """Inverse of :func:`pack` for ``n`` jobs. Raises ValueError when it is not that."""
    size = 1 if layout == BEFORE else 2
    try:
        # Never more than what can be wanted: a few bytes may unpack to gigabytes.
        most = n * (size * MOST_TURNS + 4) + 1
        compressed = base64.b64decode(text, validate=True)
        data = zlib.decompressobj().decompress(compressed, most)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the decisions cannot be unpacked: {error}") from error
    lengths = np.frombuffer(data[: 4 * n], "<u4") if len(data) >= 4 * n else np.zeros(0, int)
    rest = data[4 * n :]
    whole = len(rest) - len(rest) % size
    numbers = np.frombuffer(rest[:whole], f"<u{size}")
    flat = numbers.astype(np.int64)
    if layout == BEFORE:
        what, configs = np.divmod(flat, N_CONFIGS)
        flat = actions_of(configs, what)
    if len(lengths) != n or int(lengths.sum()) != len(flat):
        raise ValueError(f"{len(flat)} decisions, not as many as {n} jobs say that they have")
    ends = np.cumsum(lengths)
    parts = np.split(flat, ends[:-1].astype(int))
    return [part.tolist() for part in parts]


@dataclass(frozen=True)
class PlayedPart:
    """What a policy did on some jobs of a suite; plain values, as they go from one process to another."""

    rows: list[int]  # of the suite
    scores: dict[str, Any]
    decisions: list[list[int]]
    decision_us: float  # mean time of one


def play_part(policy: Policy, suite: JobSuite, rows: Sequence[int], seed: int = 0) -> PlayedPart:
    """Play the jobs at ``rows``. What the policy raises, or is refused for, passes through."""
    game = play(policy, *suite.open(np.array(rows), seed))
    return PlayedPart(list(rows), game.scores.record(), game.decisions, game.decision_us)


def submission(parts: Sequence[PlayedPart], suite: JobSuite, seed: int = 0) -> dict[str, Any]:
    """The submission of jobs that were played in parts, in any order, without who played."""
    ordered = sorted(parts, key=lambda part: part.rows)
    record = dict[str, Any]()
    for name in ordered[0].scores:
        record[name] = [value for part in ordered for value in part.scores[name]]
    decisions = [job for part in ordered for job in part.decisions]
    times = []
    turns = []
    for part in ordered:
        n_turns = sum(map(len, part.decisions))
        turns.append(1 + n_turns)
        times.append(part.decision_us)
    decision_us = np.average(times, weights=turns)
    return {
        "format": FORMAT,
        "suite": suite.name,
        "digest": suite.digest,
        "search": search_digest(),
        "jobs": len(decisions),
        "seed": seed,
        "figures": summary(Scores.of(record)) | {"decision_us": round(float(decision_us), 1)},
        "scores": record,
        "decisions": pack(decisions),
    }


def rows_of(suite: JobSuite, most: int | None) -> Array:
    """``most`` jobs of a suite, evenly over it; they are ordered by what there is to gain."""
    n = len(suite)
    if most is None or most >= n:
        return np.arange(n)
    places = np.linspace(0, n - 1, most)
    return places.round().astype(int)


def claimed(submission: Mapping[str, Any], suite: JobSuite) -> Scores:
    """The scores that a submission says, after all has been checked that needs no playing.

    Raises ValueError, with the reason, when it is of another format, suite or noise, or does not agree with itself.
    """
    try:
        if submission["format"] not in (FORMAT, BEFORE):
            raise ValueError(f"format {submission['format']}, this version reads {BEFORE} and {FORMAT}")
        if submission["digest"] != suite.digest:
            raise ValueError(
                f"made on {submission['suite']} {submission['digest']}, this is {suite.name} {suite.digest}"
            )
        seed = seed_of(submission.get("entrant", ""))
        if submission["seed"] != seed:
            raise ValueError(
                f"played under noise {submission['seed']}, not {seed} as on the board: play it by `dynamiccl bench`"
            )
        scores = Scores.of(submission["scores"])
        n = int(submission["jobs"])
        if len(scores.gain) != n or not 0 < n <= len(suite):
            raise ValueError(f"scores of {len(scores.gain)} jobs, {n} were played of {len(suite)}")
        told = dict(submission["figures"])
        found = summary(scores)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a submission: {type(error).__name__} {error}") from error
    for key, value in found.items():
        if told.get(key) != value:
            raise ValueError(f"its jobs give {key} {value}, it says {told.get(key)}")
    took = told.get("decision_us")
    if not (isinstance(took, int | float) and 0 <= took < 1e9):
        raise ValueError("it does not say what a decision takes")
    return scores


def replay(submission: Mapping[str, Any], suite: JobSuite, check: int | None = None, seed: int = 0) -> Scores:
    """Play a submission's decisions again, of ``check`` jobs drawn by ``seed`` (all), believing nothing else in it.

    Raises ValueError as :func:`claimed` does, and when a figure of a job does not come out.
    """
    scores = claimed(submission, suite)
    n = len(scores.gain)
    try:
        decisions = unpack(submission["decisions"], n, submission["format"])
        picked = np.arange(n)
        if check is not None and check < n:
            drawn = np.random.default_rng(seed).choice(n, check, replace=False)
            picked = np.sort(drawn)
        rows = rows_of(suite, n)[picked]
        opened = suite.open(rows, seed_of(submission.get("entrant", "")))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a submission: {type(error).__name__} {error}") from error
    policy = ReplayedDecisions([decisions[i] for i in picked])
    try:
        game = play(policy, *opened)
        _compare(submission, game.scores, scores, picked)
    except ValueError as error:
        raise ValueError(f"{error}{_other_search(submission)}") from error
    return scores


def _compare(submission: Mapping[str, Any], found: Scores, scores: Scores, picked: Array) -> None:
    """Raise ValueError if what came of the jobs ``picked`` is not what the submission says."""
    for name, values in vars(Scores.of(found.record())).items():
        said = getattr(scores, name)[picked]
        if submission["format"] == BEFORE and name == "quiet":  # it did not tell
            continue
        off = ~np.isclose(values, said, rtol=SAME, atol=SAME, equal_nan=True)
        if off.any():
            k = tuple(np.argwhere(off)[0])
            raise ValueError(
                f"its decisions give {name} {values[k]} in job {picked[k[0]]}, it says {said[k]}"
            )


def _other_search(submission: Mapping[str, Any]) -> str:
    """Cause and cure for a refusal, if the submission was not made with this search or does not tell."""
    this = search_digest()
    made_with = submission.get("search")
    if made_with == this:
        return ""
    told = f"search {made_with}"[:19] if made_with else "a search that it does not name"
    return f" (made with {told}, this is search {this}: play its policy again)"
