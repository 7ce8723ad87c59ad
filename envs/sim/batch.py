"""Whole jobs, many at once: what a step takes under any configs, what is measured of it, and the best there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ...traces.fingerprint import Fingerprint
from ...traces.spaces import N_CONFIGS
from .clusters import Fleet
from .fabric import Truth, congested
from .noise import Luck, Noise
from .step import Calls, Law
from .works import SLOTS, Works

Array = np.ndarray[Any, Any]
Batch = TypeVar("Batch")
NEVER = 2**62


def joined(parts: Sequence[Batch]) -> Batch:
    """One dataclass of several: arrays are put one after the other, within other dataclasses too; the rest is the
    first's."""
    out: dict[str, Any] = {}
    for f in fields(parts[0]):  # type: ignore[arg-type]
        values = [getattr(part, f.name) for part in parts]
        if isinstance(values[0], np.ndarray):
            out[f.name] = np.concatenate(values)
        else:
            out[f.name] = values[0] if isinstance(values[0], Works) or not is_dataclass(values[0]) else joined(values)
    return type(parts[0])(**out)


@dataclass
class Sites:
    """Where ``n`` jobs run: what another job on the same clusters has in common with them. Arrays (n, ...)."""

    fleet: Fleet
    truth: Truth
    other: Array  # (n, 2, 6, N_COUNTS) what the formulas miss, far in message size from where truth.effect holds
    turn: Array  # pi / 2 / octaves of message size from the one to the other
    touch: Array  # calls slow the compute so many times as much as the fabric says
    law: Array  # (n, 4) of step.Law

    def take(self, rows: Array) -> Sites:
        """Those at ``rows``."""
        arrays = {name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return Sites(self.fleet.take(rows), self.truth.take(rows), **arrays)

    def worsened(self, rng: np.random.Generator) -> Sites:
        """The same clusters after their network changed, see ``fabric.congested``."""
        return replace(self, truth=congested(self.truth, self.fleet, rng))


@dataclass
class Tables:
    """What a call takes under every config, (rows, SLOTS, N_CONFIGS) float32; rows are jobs, some of them twice."""

    us: Array
    slow: Array
    near: Array
    far: Array
    crowd: Array

    def at(self, rows: Array, configs: Array) -> list[Array]:
        """The five of Calls for jobs at ``rows`` (n,) under ``configs`` (n, SLOTS)."""
        place = rows[:, None], np.arange(SLOTS)[None], configs
        return [table[place].astype(float) for table in (self.us, self.slow, self.near, self.far, self.crowd)]


@dataclass
class Jobs:
    """``n`` jobs of up to SLOTS slots, ordered by the bytes they move; arrays begin with (n,) but the fingerprint's.

    Configs are indices into ``spaces``' N_CONFIGS, 0 is the default (AUTO). ``fingerprint`` has arrays (n * SLOTS,),
    of which places without a slot hold copies of the job's first.
    """

    label: Array  # str: cluster and workload
    n_slots: Array
    fingerprint: Fingerprint
    release: Array  # of NCCL, 22809 for 2.28.9
    mask: Array  # (n, SLOTS, N_CONFIGS) bool: one config an arm, AUTO always; places without a slot only AUTO
    default_us: Array  # true time of the default step in fair weather, before any change
    exposed: Array  # (n, SLOTS) part of a slot's time, under the default, with no compute beside it: hidden
    connect_us: Array  # what the first use of an algorithm on a communicator costs, once
    calls: Array  # (n, SLOTS) a step
    works: Works
    tables: Tables
    which: Array  # of works
    beside: Array  # (n, 2, 5) calls that are not tuned
    scale: Array  # of compute
    law: Array  # (n, 4)
    noise: Noise
    swing: Array  # (n, 3): size, period in steps, phase
    on_network: Array  # bool: a slot goes over the network
    sites: Sites
    change_at: Array  # step; NEVER
    change_until: Array  # step at which all is as before; NEVER
    change_row: Array  # of tables, from then on
    change_scale: Array  # of compute, from then on

    def __len__(self) -> int:
        return len(self.n_slots)

    @property
    def at(self) -> Array:
        """Steps that each job has run, (n,)."""
        return self.noise.at

    def take(self, rows: Any) -> Jobs:
        """The jobs at ``rows`` (indices or flags), at the same time; they share only what never changes."""
        rows = np.arange(len(self))[rows]
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in parts.items():
            if isinstance(value, np.ndarray):
                parts[name] = value[rows].copy()
        slots = (rows[:, None] * SLOTS + np.arange(SLOTS)).ravel()
        seen = {f.name: getattr(self.fingerprint, f.name)[slots] for f in fields(Fingerprint)}
        at = np.concatenate([rows, np.where(self.change_row != np.arange(len(self)), self.change_row, 0)[rows]])
        parts["tables"] = Tables(**{f.name: getattr(self.tables, f.name)[at] for f in fields(Tables)})
        changes = self.change_row[rows] != rows
        parts["change_row"] = np.where(changes, len(rows) + np.arange(len(rows)), np.arange(len(rows)))
        return Jobs(
            **parts
            | {"fingerprint": Fingerprint(**seen), "noise": self.noise.take(rows), "sites": self.sites.take(rows)}
        )

    @classmethod
    def join(cls, parts: Sequence[Jobs]) -> Jobs:
        """One batch of several of the same family. Raises ValueError when their steps are not the same."""
        if not parts or any(part.works is not parts[0].works for part in parts):
            raise ValueError("only jobs of one family can be joined, and at least one batch")
        # The later tables of all come after the first tables of all.
        firsts = np.cumsum([0, *(len(part) for part in parts)])
        extra = np.cumsum([firsts[-1], *(len(part.tables.us) - len(part) for part in parts)])
        out = joined(parts)
        out.change_row = np.concatenate(
            [
                np.where(p.change_row < len(p), p.change_row + a, p.change_row - len(p) + b)
                for p, a, b in zip(parts, firsts, extra, strict=False)
            ]
        )
        for f in fields(Tables):
            tables = [getattr(part.tables, f.name) for part in parts]
            heads, tails = zip(*((t[: len(p)], t[len(p) :]) for t, p in zip(tables, parts, strict=True)), strict=True)
            setattr(out.tables, f.name, np.concatenate([*heads, *tails]))
        return out

    def step_us(self, configs: Array, rows: Array | None = None) -> tuple[Array, Array]:
        """The truth now under ``configs`` (m, SLOTS) of the jobs at ``rows`` (all).

        Returns the step's us (m,) and the mean call's (m, SLOTS): what a profiler would see, with what runs beside it.
        Places without a slot are NaN. Raises ValueError for a config that is masked.
        """
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        configs = np.asarray(configs)
        place = rows[:, None], np.arange(SLOTS)[None], configs
        if configs.shape != (len(rows), SLOTS) or not self.mask[place].all():
            raise ValueError(f"configs are ({len(rows)}, {SLOTS}) and within the mask, not {configs.shape}")
        total, spent, _ = self._run(configs, rows, self._weather(rows))
        with np.errstate(invalid="ignore"):
            return total, np.where(self.calls[rows] > 0, spent[:, :SLOTS] / self.calls[rows], np.nan)

    def window(self, configs: Array, n_steps: Array | int, rng: np.random.Generator | Luck) -> tuple[Array, Array]:
        """Run ``n_steps`` (n,) or a number of steps under ``configs`` (n, SLOTS), and measure; time goes on.

        Returns step times (n, most) us, NaN beyond a job's own number, and mean durations of the calls (n, SLOTS) us,
        NaN where no step's kernels were sampled. A job with 0 steps does not run.
        """
        n_steps = np.broadcast_to(np.asarray(n_steps, int), len(self))
        rows = np.flatnonzero(n_steps > 0)
        us, call_us = np.zeros(len(self)), np.full((len(self), SLOTS), np.nan)
        us[rows], call_us[rows] = self.step_us(np.asarray(configs)[rows], rows)
        steps = self.noise.steps(us, n_steps, rng)
        return steps, self.noise.calls(call_us, n_steps, rng)

    def advance(self, n_steps: Array | int) -> None:
        """Let ``n_steps`` pass unmeasured."""
        self.noise.at = self.noise.at + np.asarray(n_steps, int)

    def _weather(self, rows: Array) -> Array:
        size, period, phase = self.swing[rows].T
        wave = 0.5 + 0.5 * np.sin(2 * np.pi * (self.at[rows] / period + phase))
        return np.asarray(1.0 + size * wave * np.where(self.on_network[rows], 1.0, 0.2))

    def _run(self, configs: Array, rows: Array, weather: Array) -> tuple[Array, Array, Array]:
        changed = (self.at[rows] >= self.change_at[rows]) & (self.at[rows] < self.change_until[rows])
        parts = self.tables.at(np.where(changed, self.change_row[rows], rows), configs)
        five = [np.concatenate([part, self.beside[rows, :, k]], axis=1) for k, part in enumerate(parts)]
        five[0] = five[0] * weather[:, None]
        scale = self.scale[rows] * np.where(changed, self.change_scale[rows], 1.0)
        return self.works.steps.run(self.which[rows], Calls(*five), scale, Law(*self.law[rows].T))


def oracle(jobs: Jobs, passes: int = 4) -> tuple[Array, Array]:
    """The best joint configs now: (n, SLOTS), and the step's us (n,) under them.

    Every config of a slot in turn, until no slot helps; begun from the default and from each slot's quickest call,
    whatever that does to the rest of the step.
    """
    n = len(jobs)
    alone = np.where(jobs.mask, jobs.tables.us[:n], np.inf).argmin(axis=2)
    found: list[tuple[Array, Array]] = []
    for start in (np.zeros((n, SLOTS), int), alone):
        best, chosen = jobs.step_us(start)[0], start.copy()
        active = np.ones(n, bool)
        for _ in range(passes):
            before = best.copy()
            for s in range(SLOTS):
                for config in range(N_CONFIGS):
                    rows = np.flatnonzero(active & jobs.mask[:, s, config] & (s < jobs.n_slots))
                    rows = rows[chosen[rows, s] != config]
                    if not len(rows):
                        continue
                    trial = chosen[rows].copy()
                    trial[:, s] = config
                    us, _ = jobs.step_us(trial, rows)
                    better = us < best[rows] * (1 - 1e-6)
                    best[rows[better]], chosen[rows[better], s] = us[better], config
            active = best < before * (1 - 1e-4)
        found.append((chosen, best))
    (a, a_us), (b, b_us) = found
    return np.where((b_us < a_us)[:, None], b, a), np.minimum(a_us, b_us)
