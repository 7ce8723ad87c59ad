"""Suite 3: whole jobs that entrants are judged on, as seeds: they are drawn again where they are needed.

A suite holds equal numbers of jobs of each stratum, by what there is to gain; how often each comes up in its family is
kept beside it. Drawing is the same on every machine up to the last digits, and a job that comes out otherwise than on
record is an error: a suite of an older world is not the same suite.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..search.belief import Prior
from ..search.watch import SearchConfig
from ..sim.family import HELD_OUT, STANDARD, JobFamily
from ..sim.jobs import SLOTS, Jobs, draw_jobs, oracle
from ..sim.noise import NoiseStream
from ..sim.windows import SimSearch
from .job_arena import AccountedWindows
from .scores import LossAccount, Scores, bootstrap
from .strata import STRATA, SUITES, stratum

Array = np.ndarray[Any, Any]

FAMILIES = {family.name: family for family in (STANDARD, HELD_OUT)}
#: Jobs are drawn in blocks: any job can be had without all before it.
BLOCK = 256
#: What a fresh draw may differ from the record by: the last digits of another machine's arithmetic.
SAME = 1e-4


@dataclass
class JobSuite:
    """``n`` jobs with their best configs."""

    name: str
    family: JobFamily
    seed: int
    picked: Array  # (n,) numbers of the jobs among all of that seed
    jobs: Jobs
    best: Array  # (n, SLOTS) configs
    best_us: Array  # (n,) step under them
    weights: Array  # (len(STRATA),) how often each stratum comes up in the family

    def __len__(self) -> int:
        return len(self.picked)

    @property
    def gain(self) -> Array:
        """What there is to gain, (n,), as a part of the default step."""
        return np.asarray(1 - self.best_us / self.jobs.default_us)

    @property
    def digest(self) -> str:
        """Twelve hex digits that change with the jobs."""
        told = [self.family.name, self.family.version, self.seed, self.picked.tolist()]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]

    @property
    def n_slots(self) -> Array:
        """Slots of each job, (n,)."""
        return self.jobs.n_slots

    def open(self, rows: Array, seed: int, prior: Prior, rules: SearchConfig) -> tuple[SimSearch, LossAccount]:
        """Searches on the jobs at ``rows``, and their bill. In its step t a job meets the same noise, whoever plays."""
        jobs = self.jobs.take(rows)
        luck, ledger = NoiseStream(seed, self.picked[rows], SLOTS), LossAccount(jobs, self.best_us[rows])
        return SimSearch(jobs, prior, np.random.default_rng(0), rules, AccountedWindows(jobs, luck, ledger)), ledger

    def told(self) -> dict[str, Scores]:
        """What needs no search: the best joint configs, and each slot's quickest call alone, from the first step."""
        found = {}
        for name, tables in (("oracle", self.best), ("static-best", quickest_alone(self.jobs))):
            ledger = LossAccount(self.jobs, self.best_us)
            ledger.end(np.arange(len(self)), tables)
            found[name] = ledger.scores()
        return found

    def record(self) -> dict[str, Any]:
        """What a file holds."""
        return {
            "suite": self.name,
            "family": self.family.name,
            "version": self.family.version,
            "seed": self.seed,
            "weights": {k: round(float(w), 4) for k, w in zip(STRATA, self.weights, strict=True)},
            "figures": figures(self),
            "picked": self.picked.tolist(),
            "default_us": [round(float(us), 3) for us in self.jobs.default_us],
            "best": ["".join(f"{c:02x}" for c in row) for row in self.best],
            "gain": [round(float(g), 6) for g in self.gain],
        }

    def save(self, path: Path) -> None:
        """Write the record."""
        path.write_text(json.dumps(self.record(), indent=0) + "\n")

    @classmethod
    def load(cls, name: str | Path, most: int | None = None) -> JobSuite:
        """A shipped suite (one of SUITES) or a file; ``most`` jobs of it, evenly over the strata.

        Raises ValueError when it is none, is of another version of its family, or does not come out as on record.
        """
        source = resources.files(__package__).joinpath(SUITES[str(name)]) if str(name) in SUITES else Path(name)
        try:
            told = json.loads(source.read_text())
            family = FAMILIES[told["family"]]
            if told["version"] != family.version:
                raise ValueError(f"it is of version {told['version']} of its family, this is {family.version}")
            rows = slice(None) if most is None else np.linspace(0, len(told["picked"]) - 1, most).astype(int)
            picked = np.array(told["picked"])[rows]
            best = np.array([list(bytes.fromhex(row)) for row in told["best"]])[rows]
            expected_us, gain = np.array(told["default_us"])[rows], np.array(told["gain"])[rows]
            jobs = numbered(family, int(told["seed"]), picked)
            weights = np.array([told["weights"][k] for k in STRATA])
            off = np.abs(jobs.default_us / expected_us - 1)
            if (off <= SAME).all():
                suite = cls(told["suite"], family, told["seed"], picked, jobs, best, quiet_step_us(jobs, best), weights)
                off = np.abs(suite.gain - gain)
            if (off > SAME).any():
                raise ValueError(f"job {int(picked[off.argmax()])} comes out otherwise than on record")
        except FileNotFoundError as error:
            known = ", ".join(SUITES)
            raise ValueError(f"there is no suite {name}: known are {known}, replay, or a file with one") from error
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is not a suite of jobs: {error}") from error
        return suite


def numbered(family: JobFamily, seed: int, picked: Array) -> Jobs:
    """The jobs of those numbers among all that a seed draws."""
    picked = np.asarray(picked)
    blocks = {b: draw_jobs(family, np.random.default_rng([seed, b]), BLOCK) for b in np.unique(picked // BLOCK)}
    parts = [blocks[b].take(picked[picked // BLOCK == b] % BLOCK) for b in blocks]
    order = np.concatenate([np.flatnonzero(picked // BLOCK == b) for b in blocks])
    return Jobs.join(parts).take(np.argsort(order))


def calm(jobs: Jobs) -> Jobs:
    """The same jobs in fair weather."""
    found = jobs.take(slice(None))
    found.swing[:, 0] = 0
    return found


def quiet_step_us(jobs: Jobs, configs: Array) -> Array:
    """Step times (n,) us under ``configs`` in fair weather."""
    return calm(jobs).step_us(configs)[0]


def draw_suite(name: str, family: JobFamily, seed: int, n: int) -> JobSuite:
    """``n`` jobs, equally many of each stratum. Raises ValueError where the family has too few of one."""
    each = n // len(STRATA)
    jobs, best, us, seen = list[Jobs](), list[Array](), list[Array](), 0
    counts, drawn, picked = np.zeros(len(STRATA), int), np.zeros(len(STRATA)), list[int]()
    for block in range(64):
        some = draw_jobs(family, np.random.default_rng([seed, block]), BLOCK)
        configs, fast = oracle(calm(some))
        of = stratum(1 - fast / some.default_us)
        drawn += np.bincount(of, minlength=len(STRATA))
        keep = [i for i in range(BLOCK) if (np.flatnonzero(of == of[i]) < i).sum() + counts[of[i]] < each]
        counts += np.bincount(of[keep], minlength=len(STRATA))
        jobs.append(some.take(keep))
        best.append(configs[keep])
        us.append(fast[keep])
        picked += [seen + i for i in keep]
        seen += BLOCK
        if (counts >= each).all():
            break
    else:
        raise ValueError(
            f"family {family.name} has too few jobs of a stratum: {dict(zip(STRATA, counts, strict=True))}"
        )
    all_jobs, all_best, all_us = Jobs.join(jobs), np.concatenate(best), np.concatenate(us)
    order = np.argsort(stratum(1 - all_us / all_jobs.default_us), kind="stable")
    return JobSuite(
        name,
        family,
        seed,
        np.array(picked)[order],
        all_jobs.take(order),
        all_best[order],
        all_us[order],
        drawn / drawn.sum(),
    )


def quickest_alone(jobs: Jobs) -> Array:
    """For each slot the config whose call alone is quickest, as an offline sweep finds it, (n, SLOTS)."""
    return np.asarray(np.where(jobs.mask, jobs.tables.us, np.inf).argmin(axis=2))


def figures(suite: JobSuite) -> dict[str, Any]:
    """What needs no entrant: what there is to gain, and what an offline sweep of single calls makes of it.

    Means over jobs with 95 % intervals; a fresh draw's must lie within them, which a test looks after.
    """
    sweep = quiet_step_us(suite.jobs, quickest_alone(suite.jobs)) / suite.jobs.default_us
    found: dict[str, Any] = {}
    for name, values in (("oracle_gain", suite.gain), ("sweep_gain", 1 - sweep)):
        found[name] = round(float(values.mean()), 5)
        found[f"{name}_ci95"] = bootstrap(values)
    return found


assert SLOTS * 2 < 256
