"""Suite 4: whole jobs that entrants are judged on, as seeds: they are drawn again where they are needed.

As many jobs of each world of the family. A job that comes out otherwise than on record is an error. A further suite is
a family in FAMILIES and a file in ``strata.SUITES``, made by ``tests/tools/make_job_suites.py``; own mechanisms:
``family.World.hook``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.outside import parse_json
from ..search.belief.prior import Prior
from ..search.config import SearchConfig
from ..sim.family import DDP, HELD_OUT, STANDARD, WORLDS, JobFamily
from ..sim.jobs import Jobs, draw_jobs
from ..sim.noise import NoiseStream
from ..sim.recorded_gains import MPI_HEADROOM
from ..sim.regimes import MOST_REGIMES
from ..sim.unseen import UNSEEN
from ..sim.windows import SimSearch
from .job_arena import AccountedWindows
from .scores import LossAccount, Scores
from .strata import SUITES

Array = np.ndarray[Any, Any]

FAMILIES = {family.name: family for family in (STANDARD, HELD_OUT, UNSEEN, MPI_HEADROOM, DDP)}
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
    tables: Array  # (n, MOST_REGIMES, width) the best configs in each of a job's regimes
    best_us: Array  # (n,) usual step where each regime has its own
    numbers: Array  # (n,) of the jobs in the whole suite

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def best(self) -> Array:
        """The best configs of each job, in the first of its regimes, (n, width)."""
        return np.asarray(self.tables[:, 0])

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
        family = self.family
        numbers = self.numbers.tolist()
        told = [family.name, family.version, self.seed, self.each, numbers]
        text = json.dumps(told)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def open(self, rows: Array, seed: int) -> tuple[SimSearch, LossAccount]:
        """Searches on the jobs at ``rows``, and their bill. In its step t a job meets the same noise, whoever plays."""
        jobs = self.jobs.take(rows)
        ledger = LossAccount(jobs, self.best_us[rows])
        noise = NoiseStream(seed, self.numbers[rows], jobs.width)
        windows = AccountedWindows(jobs, noise, ledger)
        search = SimSearch(windows, Prior.load(), SearchConfig())
        return search, ledger

    def only(self, worlds: Sequence[str]) -> JobSuite:
        """The jobs of these worlds. They meet the noise that they meet in the whole suite. Raises ValueError."""
        there = dict.fromkeys(self.strata.tolist())
        if unknown := [world for world in worlds if world not in there]:
            raise ValueError(f"no world {', '.join(unknown)} in {self.name}: it has {', '.join(there)}")
        is_kept = np.isin(self.strata, worlds)
        rows = np.flatnonzero(is_kept)
        text = ",".join(worlds)
        return replace(
            self,
            name=f"{self.name}:{text}",
            jobs=self.jobs.take(rows),
            tables=self.tables[rows],
            best_us=self.best_us[rows],
            numbers=self.numbers[rows],
        )

    def told(self) -> dict[str, Scores]:
        """What needs no search: the best joint configs, in each regime its own, and each slot's quickest call alone;
        from the first step."""
        ledger = LossAccount(self.jobs, self.best_us)
        ledger.end(np.arange(len(self)), quickest_alone(self.jobs))
        swept = ledger.scores()
        none = np.zeros(len(self), bool)
        loses_nothing = replace(
            swept, gain=self.gain, lost=np.zeros(len(self)), is_harsh=none, is_harmed=none.copy()
        )
        return {"oracle": loses_nothing, "static-best": swept}

    @classmethod
    def load(cls, name: str | Path) -> JobSuite:
        """A shipped suite (one of SUITES) or a file; ``standard:many,plain``: its jobs of these worlds.

        Raises ValueError when it is none, is of another version of its family, or does not come out as on record.
        """
        whole, _, worlds = str(name).partition(":")
        if worlds and not Path(name).exists():
            return cls.load(whole).only(worlds.split(","))
        source: Path | Traversable = Path(name)
        if str(name) in SUITES:
            source = resources.files(__package__).joinpath(SUITES[str(name)])
        try:
            told = parse_json(source.read_bytes())
            family = FAMILIES[told["family"]]
            version = told["version"]
            if version != family.version:
                raise ValueError(f"it is of version {version} of its family, this is {family.version}")
            seed, each = told["seed"], told["each"]
            jobs = drawn(family, int(seed), int(each))
            default_us = np.array(told["default_us"])
            off = np.abs(jobs.default_us / default_us - 1)
            if (off <= SAME).all():
                tables = unpacked(told["best"], jobs)
                best_us = jobs.followed_us(tables)
                numbers = np.arange(len(jobs))
                suite = cls(told["suite"], family, seed, each, jobs, tables, best_us, numbers)
                gain = np.array(told["gain"])
                off = np.abs(suite.gain - gain)
            if (off > SAME).any():
                raise ValueError(f"job {off.argmax()} comes out otherwise than on record")
        except FileNotFoundError as error:
            known = ", ".join(SUITES)
            why = f"there is no suite {name}"
            cure = f"known are {known}, or a file with one"
            raise ValueError(f"{why}: {cure}") from error
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source} is not a suite of jobs: {error}") from error
        return suite


def drawn(family: JobFamily, seed: int, each: int) -> Jobs:
    """``each`` jobs of every world of a family."""
    parts = []
    for k, world in enumerate(family.worlds):
        rng = np.random.default_rng([seed, k])
        part = draw_jobs(family.only(world), rng, each)
        parts.append(part)
    return Jobs.join(parts)


def packed(tables: Array, jobs: Jobs) -> list[str]:
    """Tables of each regime, (n, MOST_REGIMES, width), as text: one job's slots in hex digits, regime by regime."""
    texts = []
    for table, count, n_slots in zip(tables, jobs.regimes.count, jobs.n_slots, strict=True):
        own = table[:count, :n_slots]
        digits = own.astype(np.uint8).ravel()
        texts.append(bytes(digits).hex())
    return texts


def unpacked(texts: list[str], jobs: Jobs) -> Array:
    """Inverse of :func:`packed`; a regime that a job has not gets the table of its first. Raises ValueError when a row
    does not fit its job."""
    tables = np.zeros((len(jobs), MOST_REGIMES, jobs.width), np.int64)
    for i, text in enumerate(texts):
        count = int(jobs.regimes.count[i])
        digits = np.frombuffer(bytes.fromhex(text), np.uint8)
        rows = digits.reshape(count, -1)
        tables[i, :count, : rows.shape[1]] = rows
        tables[i, count:] = tables[i, 0]
    return tables


def quickest_alone(jobs: Jobs) -> Array:
    """For each slot the config whose call alone is quickest, as an offline sweep finds it, (n, width)."""
    offered_us = np.where(jobs.mask, jobs.tables.us, np.inf)
    return np.asarray(offered_us.argmin(axis=2))
