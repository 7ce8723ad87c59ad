"""Runs entrants of the benchmark, each in a process of its own, and keeps what they decided.

To enter, write a policy: any object with ``predict(observation, state, episode_start, deterministic)`` that returns
``(actions, state)``, as in stable-baselines3. It is asked as it is beside a job, one turn at a time: (1, N_OBSERVATION)
float32 in, (1, 3) int64 ``[pair, channels, what]`` out. ``envs.search.turns.seen`` says in plain arrays what it holds,
``turns.actions_of`` turns config indices, and what comes next, into actions. Then, where ``my_module.py`` lies::

    dynamiccl bench --policy my_module:MyPolicy --policy random --suite held-out

A submission is one JSON file: who, which suite, every decision (packed), and what came of it, job by job. The judge
(``envs.bench.submissions``) believes only the decisions: it plays them again and refuses what does not come out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import urllib.parse
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ...envs.bench.job_suites import JobSuite
from ...envs.bench.submissions import FORMAT, enter, rows_of
from ..policies.choosing import DEFAULT, RULES, WEIGHTS, look_here, make_chooser
from ..policies.classical import CLASSICAL
from .spread import spread

Array = np.ndarray[Any, Any]

#: On the board without a rank: ``aa`` is the default policy under other noise (what lies between it and that policy is
#: luck); the others read the truth and search nothing.
UNRANKED = ("aa", "oracle", "static-best")


def entrants() -> tuple[str, ...]:
    """The board's entrants that play: ``tpe`` where Optuna is installed, ``lstm`` where its weights are."""
    found = ["aa", *RULES, *CLASSICAL]
    if importlib.util.find_spec("optuna"):
        found.append("tpe")
    try:
        make_chooser("lstm")
        found.insert(0, "lstm")
    except ValueError:
        pass
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entrant on one suite (the name of a shipped one, a file, or the jobs themselves)."""

    name: str
    suite: str | JobSuite
    jobs: int | None = None  # so many of them, evenly over the suite
    seed: int = 0
    limit_s: float = 1800.0  #: after which a run is given up

    @property
    def played(self) -> JobSuite:
        """The suite. Raises ValueError when there is none such."""
        return JobSuite.load(self.suite) if isinstance(self.suite, str) else self.suite

    @property
    def noise_seed(self) -> int:
        """Of the noise that it meets: all the same, but for ``aa``."""
        return self.seed + (1 if self.name == "aa" else 0)


def enter_one(entry: Entry) -> dict[str, Any]:
    """Play and return the submission. What the policy raises, or is refused for, passes through."""
    policy = make_chooser(DEFAULT if entry.name == "aa" else entry.name, entry.noise_seed)
    command = f"dynamiccl bench --policy {entry.name} --suite {entry.played.name}"
    head = {"entrant": entry.name, "version": version_of(entry.name), "command": command}
    return head | enter(policy, entry.played, entry.noise_seed, entry.jobs)


def version_of(name: str) -> str:
    """What played: the release and a digest of the code, settings and weights that decide, a guest's or ours."""
    release, sha = importlib.metadata.version("dynamiccl"), hashlib.sha256()
    for file in _code_of(name):
        sha.update(file.read_bytes())
    return f"{release} {sha.hexdigest()[:12]}"


def _code_of(name: str) -> list[Path]:
    """Files that decide what an entrant does: its own, and those of the search that asks it."""
    root = Path(str(resources.files("dynamiccl")))
    rooms = [root / "envs" / room for room in ("bench", "search", "nccl_model", "sim")]
    ours = [p for room in rooms for p in room.glob("*") if p.suffix in (".py", ".c", ".npz")]
    if ":" in name:
        look_here()
        spec = importlib.util.find_spec(name.split(":")[0])
        origin = Path(spec.origin) if spec and spec.origin else None
        # A module in a package goes with all of it.
        theirs = [] if origin is None else [origin]
        if origin is not None and (origin.parent / "__init__.py").exists():
            theirs = list(origin.parent.rglob("*.py"))
    else:
        policies = (root / "agent" / "policies").glob("*")
        theirs = [p for p in policies if p.suffix in (".py", ".json", ".npz")]
        theirs += [Path(name)] if name.endswith(WEIGHTS) else []
    return sorted(ours) + sorted(theirs)


def run(entries: Sequence[Entry], folder: Path, processes: int = 2, again: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the submission of each entry, or ``{"entrant", "failed"}``; results already in ``folder`` are kept, if
    they are of the same code.

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
    for entry, result in spread(enter_one, waiting, processes, lambda entry: entry.limit_s):
        if "failed" in result:
            yield {"entrant": entry.name, "failed": result["failed"]}
            continue
        part = _path(entry, folder).with_suffix(".part")
        part.write_text(json.dumps(result) + "\n")
        part.replace(_path(entry, folder))
        yield result


def _path(entry: Entry, folder: Path) -> Path:
    return folder / f"{urllib.parse.quote(entry.name, safe='')}.json"


def _kept(entry: Entry, folder: Path) -> dict[str, Any] | None:
    """A finished result of the same entrant on the same jobs, from before."""
    try:
        kept = json.loads(_path(entry, folder).read_text())
        suite = entry.played
        jobs = len(rows_of(suite, entry.jobs))
        wanted = (suite.digest, jobs, entry.noise_seed, FORMAT, version_of(entry.name))
        found = (kept["digest"], kept["jobs"], kept["seed"], kept["format"], kept["version"])
    except (OSError, ImportError, KeyError, TypeError, ValueError):
        return None
    return dict(kept) if found == wanted else None
