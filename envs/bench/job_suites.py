"""Suite 4: whole jobs that entrants are judged on, as seeds: they are drawn again where they are needed.

A suite holds equally many jobs of each world of its family, one world after the other. Drawing is the same on every
machine up to the last digits, and a job that comes out otherwise than on record is an error: a suite of an older world
is not the same suite. A further suite is a family in FAMILIES and a file in ``strata.SUITES``, made by
``tests/tools/make_job_suites.py``; a world with a mechanism of its own has a ``family.World.hook``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..search.belief.prior import Prior
from ..search.config import SearchConfig
from ..sim.family import HELD_OUT, STANDARD, WORLDS, JobFamily
from ..sim.jobs import SLOTS, Jobs, draw_jobs
from ..sim.noise import NoiseStream
from ..sim.unseen import UNSEEN
from ..sim.windows import SimSearch
from .job_arena import AccountedWindows
from .scores import LossAccount, Scores
from .strata import SUITES

Array = np.ndarray[Any, Any]

FAMILIES = {family.name: family for family in (STANDARD, HELD_OUT, UNSEEN)}
#: What a fresh draw may differ from the record by: the last digits of another machine's arithmetic.
SAME = 1e-4


@dataclass
class JobSuite:
    """``n`` jobs with their best configs."""

    name: str
    family: JobFamily
    seed: int
    each: int  # jobs of each world
    jobs: Jobs
    best: Array  # (n, SLOTS) configs
    best_us: Array  # (n,) usual step under them

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def gain(self) -> Array:
        """What there is to gain, (n,), as a part of the default step."""
        return np.asarray(1 - self.best_us / self.jobs.default_us)

    @property
    def strata(self) -> Array:
        """The world of each job, (n,) str."""
        return np.array(WORLDS)[self.jobs.sites.world]

    @property
    def digest(self) -> str:
        """Twelve hex digits that change with the jobs."""
        told = [self.family.name, self.family.version, self.seed, self.each, list(range(len(self)))]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]

    def open(self, rows: Array, seed: int) -> tuple[SimSearch, LossAccount]:
        """Searches on the jobs at ``rows``, and their bill. In its step t a job meets the same noise, whoever plays."""
        jobs = self.jobs.take(rows)
        ledger = LossAccount(jobs, self.best_us[rows])
        windows = AccountedWindows(jobs, NoiseStream(seed, rows, SLOTS), ledger)
        return SimSearch(windows, Prior.load(), SearchConfig()), ledger

    def told(self) -> dict[str, Scores]:
        """What needs no search: the best joint configs, and each slot's quickest call alone, from the first step."""
        found = {}
        for name, tables in (("oracle", self.best), ("static-best", quickest_alone(self.jobs))):
            ledger = LossAccount(self.jobs, self.best_us)
            ledger.end(np.arange(len(self)), tables)
            found[name] = ledger.scores()
        return found

    @classmethod
    def load(cls, name: str | Path) -> JobSuite:
        """A shipped suite (one of SUITES) or a file.

        Raises ValueError when it is none, is of another version of its family, or does not come out as on record.
        """
        source = (
            resources.files(__package__).joinpath(SUITES[str(name)]) if str(name) in SUITES else Path(name)
        )
        try:
            told = json.loads(source.read_text())
            family = FAMILIES[told["family"]]
            if told["version"] != family.version:
                raise ValueError(
                    f"it is of version {told['version']} of its family, this is {family.version}"
                )
            best = np.array([list(bytes.fromhex(row)) for row in told["best"]])
            jobs = drawn(family, int(told["seed"]), int(told["each"]))
            off = np.abs(jobs.default_us / np.array(told["default_us"]) - 1)
            if (off <= SAME).all():
                suite = cls(
                    told["suite"], family, told["seed"], told["each"], jobs, best, jobs.usual_us(best)
                )
                off = np.abs(suite.gain - np.array(told["gain"]))
            if (off > SAME).any():
                raise ValueError(f"job {off.argmax()} comes out otherwise than on record")
        except FileNotFoundError as error:
            known = ", ".join(SUITES)
            raise ValueError(
                f"there is no suite {name}: known are {known}, replay, or a file with one"
            ) from error
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is not a suite of jobs: {error}") from error
        return suite


def drawn(family: JobFamily, seed: int, each: int) -> Jobs:
    """``each`` jobs of every world of a family."""
    parts = enumerate(family.only(world) for world in family.worlds)
    return Jobs.join([draw_jobs(part, np.random.default_rng([seed, k]), each) for k, part in parts])


def quickest_alone(jobs: Jobs) -> Array:
    """For each slot the config whose call alone is quickest, as an offline sweep finds it, (n, SLOTS)."""
    return np.asarray(np.where(jobs.mask, jobs.tables.us, np.inf).argmin(axis=2))


assert SLOTS * 2 < 256
