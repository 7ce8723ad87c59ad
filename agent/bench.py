"""Runs entrants of the benchmark, each in a process of its own, and keeps what they decided.

To enter, write a policy: any object with ``predict(observation, state, episode_start, deterministic)`` that returns
``(actions, state)``, as in stable-baselines3. It gets (n, N_OBSERVATION) float32 rows, one a slot, and returns (n, 2)
int64 ``[pair, channels]``; ``envs.spaces.seen`` says in plain arrays what a row holds (what may be chosen, what was
measured), ``envs.spaces.actions_of`` turns config indices into actions. Then::

    dynamiccl bench --policy my_module:MyPolicy --policy lstm --suite held-out

A submission is one JSON file: who, which suite, every decision (packed), and the figures. The judge
(``envs.leaderboard``) believes only the decisions: it plays them again and refuses figures that do not come out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.arena import WINDOWS, Arena, Policy, Recorded, Suite, play
from ..envs.leaderboard import COMMITS, FORMAT, judged, pack, summary
from .baselines import BASELINES, POLICIES, make_baseline, make_policy
from .spread import Executor, Processes, spread
from .stopping import Stopping

Array = np.ndarray[Any, Any]

#: What plays by the suite's own tables, without looking: an offline sweep of each collective alone, and the truth.
TOLD = ("static-best", "oracle")
#: On the board without a rank: ``aa`` is the trained policy under other noise (what lies between it and ``lstm`` is
#: luck), the oracle is what nobody can know.
UNRANKED = ("aa", "oracle", "static-best")


def entrants() -> tuple[str, ...]:
    """The board's entrants; ``tpe`` where Optuna is installed."""
    try:
        importlib.metadata.version("optuna")
        tpe: tuple[str, ...] = ("tpe",)
    except importlib.metadata.PackageNotFoundError:
        tpe = ()
    return ("lstm", "aa", "static-best", *BASELINES, *tpe, "oracle")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entrant on one suite (a name, a file, or the tasks themselves)."""

    name: str
    suite: str | Suite
    repeats: int = 4
    seed: int = 0
    limit_s: float = 1200.0  #: after which a run is given up

    @property
    def tasks(self) -> Suite:
        """The suite. Raises ValueError when there is none such."""
        return self.suite if isinstance(self.suite, Suite) else Suite.load(self.suite)

    @property
    def noise_seed(self) -> int:
        """Of the arena's noise."""
        return self.seed + (1 if self.name == "aa" else 0)


def entrant(name: str, seed: int = 0, suite: Suite | None = None, repeats: int = 1) -> Policy:
    """The policy that plays under a name, with its best settings.

    Raises ValueError for an unknown name, or when the suite does not say what one of TOLD plays.
    """
    if name in TOLD:
        if suite is None or (name == "static-best" and not len(suite.alone)):
            raise ValueError("the suite does not say which config is fastest for each collective alone")
        rows = [suite.truth_at(t).argmax(axis=1) if name == "oracle" else suite.alone for t in range(WINDOWS)]
        return Recorded(np.tile(np.stack(rows), repeats))
    policy = make_policy("lstm" if name == "aa" else name, seed)
    return Stopping(policy) if name in ("aa", *POLICIES) else policy


def enter(entry: Entry) -> dict[str, Any]:
    """Play and return the submission. What the policy raises, or is refused for, passes through."""
    suite, seed = entry.tasks, entry.noise_seed
    policy = entrant(entry.name, seed, suite, entry.repeats)
    commits = COMMITS[entry.name in TOLD]
    played = judged(policy, suite, entry.repeats, seed, commits)
    took = 0.0 if entry.name in TOLD else decision_us(entrant(entry.name, seed), suite)
    return {
        "format": FORMAT,
        "entrant": entry.name,
        "version": version_of(entry.name),
        "command": f"dynamiccl bench --policy {entry.name} --suite {suite.name} --repeats {entry.repeats}",
        "suite": suite.name,
        "digest": suite.digest,
        "repeats": entry.repeats,
        "seed": seed,
        "commits": commits,
        "figures": summary(dataclasses.replace(played, decision_us=took), len(suite)),
        "decisions": pack(played.configs),
    }


def decision_us(policy: Policy, suite: Suite, n_tasks: int = 4) -> float:
    """Mean time of one decision for one slot, as beside a job: the first tasks of the suite, one at a time."""
    times = []
    for i in range(min(n_tasks, len(suite))):
        rows = {key: value[i : i + 1] for key, value in vars(suite).items() if key != "name" and len(value)}
        times.append(play(policy, Arena(Suite(suite.name, **rows))).decision_us)
    return float(np.mean(times))


def version_of(name: str) -> str:
    """What played: the release, and of our own entrants a digest of the code, settings and weights that decide."""
    release = importlib.metadata.version("dynamiccl")
    if ":" in name:
        return release
    here, sha = resources.files(__package__), hashlib.sha256()
    for file in (
        "baselines.json",
        "baselines.py",
        "belief.py",
        "bench.py",
        "policy.npz",
        "policy.py",
        "stopping.py",
        "tpe.py",
    ):
        sha.update(here.joinpath(file).read_bytes())
    return f"{release} {sha.hexdigest()[:12]}"


def run(
    entries: Sequence[Entry], folder: Path, executor: Executor | None = None, again: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the submission of each entry, or ``{"entrant", "failed"}``; results already in ``folder`` are kept.

    A failing or hanging entrant does not stop the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = []
    for entry in entries:
        kept = None if again else _kept(entry, folder)
        if kept is None:
            waiting.append(entry)
            _path(entry, folder).unlink(missing_ok=True)
        else:
            yield kept
    for entry, result in spread(enter, waiting, executor or Processes(), lambda entry: entry.limit_s):
        if "failed" in result:
            yield {"entrant": entry.name, "failed": result["failed"]}
            continue
        part = _path(entry, folder).with_suffix(".part")
        part.write_text(json.dumps(result) + "\n")
        part.replace(_path(entry, folder))
        yield result


def _path(entry: Entry, folder: Path) -> Path:
    return folder / f"{entry.name.replace(':', '-').replace('/', '-')}.json"


def _kept(entry: Entry, folder: Path) -> dict[str, Any] | None:
    """A finished result of the same entry on the same suite, from before."""
    try:
        kept = json.loads(_path(entry, folder).read_text())
        wanted = (entry.tasks.digest, entry.repeats, entry.noise_seed, FORMAT, version_of(entry.name))
        found = (kept["digest"], kept["repeats"], kept["seed"], kept["format"], kept["version"])
    except (OSError, KeyError, ValueError):
        return None
    return dict(kept) if found == wanted else None


#: What :func:`fit` tries for each baseline.
GRID: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "random": [{}],
    "coordinate-descent": [{}],
    "exhaustive": [{"hysteresis": h} for h in (0.0, 0.02, 0.05, 0.1)],
    "thompson": [
        {"noise": n, "prior_mean": m, "prior_std": s}
        for n in (0.02, 0.05, 0.1)
        for m in (-0.2, -0.05, 0.0)
        for s in (0.02, 0.05, 0.1, 0.3)
    ],
    "ucb1": [{"weight": w} for w in (0.02, 0.05, 0.1, 0.2)],
    "gp": [
        {"noise": n, "scale": s, "length": 2.0, "across": a, "weight": w, "mean": m}
        for n in (0.1, 0.2)
        for s in (0.3, 0.6, 1.0)
        for a in (0.1, 0.3, 0.6)
        for w in (0.5, 1.0)
        for m in (0.0, -0.2, -0.5, -1.0)
    ],
    "tpe": [{"startup": s} for s in (2, 4, 8)],
}
#: When a search ends, see ``Searcher``: first two that differ most, then, with the best settings, all.
NEVER = 10**6
ENDS = [{"horizon": 16, "patience": 2}, {"horizon": NEVER, "patience": NEVER}]
ALL_ENDS = [{"horizon": h, "patience": p} for h in (2, 4, 8, 16, 32, NEVER) for p in (2, NEVER)]


def fit(
    suite: Suite, executor: Executor | None = None, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Try the grid of each baseline on ``suite``; the settings with the least regret of each, the five best and the
    worst."""
    found = {}
    names = [name for name in entrants() if name in GRID]
    items = [(name, suite) for name in reversed(names)]  # the slow ones first
    for (name, _), result in spread(fit_one, items, executor or Processes(), lambda item: 3600.0):
        if "failed" in result:
            raise ValueError(f"{name}: {result['failed']}")
        best, worst = result["tried"][0], result["tried"][-1]
        found[name] = result | {"n_tried": len(result["tried"]), "tried": [*result["tried"][:5], worst]}
        of = f"worst of {len(result['tried'])}: {worst['regret']}"
        progress(f"{name}: {best['settings']} regret {best['regret']} ({of})")
    record = {"suite": suite.name, "digest": suite.digest, "tasks": len(suite), "objective": "regret"}
    return record | {"entrants": {name: found[name] for name in names}}


def fit_one(item: tuple[str, Suite]) -> dict[str, Any]:
    """The best settings of one baseline, and all that were tried, best first."""
    name, suite = item
    tried: list[dict[str, Any]] = []

    def try_all(candidates: list[dict[str, Any]]) -> dict[str, Any]:
        for settings in candidates:
            if any(row["settings"] == settings for row in tried):
                continue
            policy = make_baseline(name, 0, settings)
            figures = summary(play(Stopping(policy), Arena(suite)))
            row = {"settings": settings, "regret": figures["regret"], "gain": figures["share_of_gain"][str(WINDOWS)]}
            tried.append(row)
        tried.sort(key=lambda row: float(row["regret"]))
        return dict(tried[0]["settings"])

    grid, ends, all_ends = GRID[name], ENDS, ALL_ENDS
    if name == "exhaustive":  # a sweep that is cut short is no sweep
        ends, all_ends = ENDS[1:], []
    elif len(grid) > 50:
        ends = ENDS[:1]
    best = try_all([settings | end for settings in grid for end in ends])
    try_all([best | end for end in all_ends])
    return {"settings": tried[0]["settings"], "regret": tried[0]["regret"], "tried": tried}
