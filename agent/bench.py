"""Runs entrants of the benchmark, each in a process of its own, and keeps what they decided.

A submission is one JSON file: who, which suite, every decision (packed), and the figures. The judge
(``envs.leaderboard``) believes only the decisions.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.arena import Arena, Suite, play
from ..envs.leaderboard import FORMAT, pack, summary
from .baselines import BASELINES, make_policy
from .policy import Policy, Stopping

Array = np.ndarray[Any, Any]

#: The board's entrants; ``aa`` is the trained policy under other noise: what lies between it and ``lstm`` is luck.
ENTRANTS = ("lstm", *BASELINES, "aa")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entrant on one suite."""

    name: str
    suite: str
    repeats: int = 4
    seed: int = 0
    limit_s: float = 600.0  #: after which a run is given up


def best_settings() -> dict[str, dict[str, Any]]:
    """Settings of the baselines as :func:`fit` found them on tasks that no suite holds; ``stop`` adds the stop rule."""
    text = resources.files(__package__).joinpath("baselines.json").read_text()
    return {name: found["settings"] for name, found in json.loads(text)["entrants"].items()}


def entrant(name: str, seed: int = 0) -> Policy:
    """The policy that plays under a name, with its best settings. Raises ValueError for an unknown name."""
    if name in ("lstm", "aa"):
        return Stopping(make_policy("lstm", seed), patience=3)
    settings = dict(best_settings().get(name, {}))
    stop = settings.pop("stop", False)
    policy = BASELINES[name](seed, **settings) if name in BASELINES else make_policy(name, seed)
    return Stopping(policy) if stop else policy


def enter(entry: Entry) -> dict[str, Any]:
    """Play and return the submission. Raises ValueError with the reason when the policy is refused."""
    suite = Suite.load(entry.suite)
    seed = entry.seed + (1 if entry.name == "aa" else 0)
    try:
        policy = entrant(entry.name, seed)
        played = play(policy, Arena(suite, entry.repeats, seed))
    except ValueError:
        raise
    except Exception as error:  # a guest's policy may raise anything; its reason goes onto the board
        raise ValueError(f"{type(error).__name__}: {error}") from error
    command = f"dynamiccl bench --policy {entry.name} --suite {entry.suite} --repeats {entry.repeats}"
    return {
        "format": FORMAT,
        "entrant": entry.name,
        "version": getattr(getattr(policy, "policy", policy), "record", {}).get("commit", ""),
        "command": command,
        "suite": suite.name,
        "digest": suite.digest,
        "repeats": entry.repeats,
        "seed": seed,
        "decisions": pack(played.configs),
        "figures": summary(played),
    }


def _work(entry: Entry, path: Path) -> None:
    """In the child: write the submission, or why there is none."""
    try:
        result = enter(entry)
    except ValueError as error:
        result = {"entrant": entry.name, "failed": str(error)}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(path)


def run(entries: Sequence[Entry], folder: Path, processes: int = 2, again: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the submission of each entry, or ``{"entrant", "failed"}``; results already in ``folder`` are kept.

    A failing or hanging entrant does not stop the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting, running = list(entries), dict[Entry, tuple[Any, float]]()
    context = multiprocessing.get_context("spawn")
    while waiting or running:
        while waiting and len(running) < processes:
            entry = waiting.pop(0)
            kept = None if again else _kept(entry, folder)
            if kept is not None:
                yield kept
                continue
            path = _path(entry, folder)
            path.unlink(missing_ok=True)
            process = context.Process(target=_work, args=(entry, path), daemon=True)
            process.start()
            running[entry] = (process, time.monotonic())
        for entry, (process, begun) in list(running.items()):
            late = time.monotonic() - begun > entry.limit_s
            if process.is_alive() and not late:
                continue
            if late:
                process.terminate()
            process.join()
            del running[entry]
            path = _path(entry, folder)
            if path.exists():
                yield json.loads(path.read_text())
            else:
                reason = f"gave no result in {entry.limit_s:.0f} s" if late else f"exited with {process.exitcode}"
                yield {"entrant": entry.name, "failed": reason}
        time.sleep(0.05)


def _path(entry: Entry, folder: Path) -> Path:
    return folder / f"{entry.name.replace(':', '-').replace('/', '-')}.json"


def _kept(entry: Entry, folder: Path) -> dict[str, Any] | None:
    """A finished result of the same entry on the same suite, from before."""
    try:
        kept = json.loads(_path(entry, folder).read_text())
        seed = entry.seed + (1 if entry.name == "aa" else 0)
        wanted = (Suite.load(entry.suite).digest, entry.repeats, seed, FORMAT)
        if (kept["digest"], kept["repeats"], kept["seed"], kept["format"]) != wanted:
            return None
        if entry.name in ("lstm", "aa") and kept["version"] != make_policy("lstm").record.get("commit", ""):  # type: ignore[attr-defined]
            return None
    except (OSError, KeyError, ValueError):
        return None
    return dict(kept)


#: What :func:`fit` tries for each baseline, with and without the stop rule.
GRID: dict[str, list[dict[str, Any]]] = {
    "random": [{}],
    "default": [{}],
    "exhaustive": [{"hysteresis": h} for h in (0.0, 0.05)],
    "coordinate-descent": [{}],
    "thompson": [
        {"noise": n, "prior_mean": m, "prior_std": s}
        for n in (0.02, 0.05, 0.1)
        for m in (-0.5, -0.2, -0.05)
        for s in (0.05, 0.1, 0.3)
    ],
    "ucb1": [{"weight": w} for w in (0.02, 0.05, 0.1, 0.2)],
    "gp": [
        {"noise": n, "scale": s, "length": 2.0, "across": a, "weight": w, "mean": m}
        for n in (0.1, 0.2)
        for s in (0.3, 0.6)
        for a in (0.3, 0.6)
        for w in (0.5, 1.0)
        for m in (0.0, -0.2)
    ],
}


def fit(suite: Suite, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Try the grid of each baseline on ``suite``; the setting with the least regret of each, and all tried."""
    entrants = {}
    for name, grid in GRID.items():
        tried = []
        for settings in grid:
            for stop in (False, True):
                policy: Policy = BASELINES[name](0, **settings)
                played = play(Stopping(policy) if stop else policy, Arena(suite))
                figures = summary(played)
                tried.append(
                    {
                        "settings": settings | {"stop": stop},
                        "regret": figures["regret"],
                        "gain": figures["share_of_gain"]["64"],
                    }
                )
        tried.sort(key=lambda row: row["regret"])
        entrants[name] = {"settings": tried[0]["settings"], "regret": tried[0]["regret"], "tried": tried}
        progress(
            f"{name}: {tried[0]['settings']} regret {tried[0]['regret']} (worst of {len(tried)}: {tried[-1]['regret']})"
        )
    return {"suite": suite.name, "digest": suite.digest, "objective": "regret", "entrants": entrants}
