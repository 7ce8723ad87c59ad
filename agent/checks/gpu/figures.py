"""What folders of ``lab gpu-check`` say: gains that may be claimed, contention, the noise of steps.

``python -m dynamiccl.agent.checks.gpu.figures FOLDER... --write`` puts them into the README and ``measured.json``.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ....envs.sim.fabric.measured import FILE
from ....traces.files import Trace, TraceError
from ....traces.outside import read_json, write_whole
from ...report.summary import read_object
from ..sweep.room import Result, result_of
from .beside import CONTENTION, KERNELS
from .check import SCHEMA

README = Path(__file__).resolve().parents[3] / "README.md"
BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"
#: What two calls have in common if one confirms the gain of the other.
ALIKE = ("device", "ranks", "placement", "network", "nccl", "environment")
#: Rows and columns of a tile of a matrix product on Hopper.
TILE = 128 * 256
#: Steps of a race below which its noise is not told.
LEAST_STEPS = 100


@dataclass(frozen=True)
class Race:
    """A race by the summary of its tuned job: how much faster the table is, with the comparison's interval."""

    name: str
    table: str
    speedup: float
    low: float
    high: float
    reasons: str = ""

    @property
    def is_gain(self) -> bool:
        """Whether the comparison excludes "no gain"."""
        return self.low > 1

    def __str__(self) -> str:
        if math.isnan(self.speedup):
            return f"{self.name}: not compared ({self.reasons or 'no reason was left'})"
        saved = [100 * (1 - 1 / x) for x in (self.speedup, self.low, self.high)]
        return f"{self.name}: {{:.1f}} % of a step saved [{{:.1f}}, {{:.1f}}] by {self.table}".format(*saved)


@dataclass(frozen=True)
class Folder:
    """One call's folder."""

    path: Path
    run: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Raises ValueError, naming the file."""
        try:
            run = read_json(path / "run.json")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path / 'run.json'}: no results of gpu-check ({error}): name the folder it printed"
            ) from None
        if not isinstance(run, dict) or run.get("schema") != SCHEMA:
            raise ValueError(
                f"{path / 'run.json'}: not of format {SCHEMA}: read it with the release that wrote it"
            )
        return cls(path, run)

    def races(self) -> list[Race]:
        """Those that left a summary."""
        found = []
        for name in self.run.get("parts", {}):
            path = self.path / name / "summary.json"
            if name.startswith("race-") and path.exists():
                found.append(_race(name, read_object(path)))
        return found

    def sweep(self) -> Result | None:
        """None where it did not come far enough."""
        try:
            return result_of(self.path / "sweep")
        except ValueError:
            return None

    def rows(self, name: str, columns: Sequence[str]) -> pd.DataFrame:
        """A table; a last line that was cut off is left out. Raises ValueError for other columns."""
        path = self.path / f"{name}.csv"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            return pd.DataFrame(columns=list(columns))
        found = pd.read_csv(io.StringIO(whole), keep_default_na=False)
        if list(found.columns) != list(columns):
            raise ValueError(f"{path}: its columns are {', '.join(map(str, found.columns))}")
        return found

    def untouched_steps(self) -> list[Any]:
        """Of each race without a cap the logs of its steps without a table, ns, in order; the first quarter apart."""
        found = []
        for name in self.run.get("parts", {}):
            if not name.startswith("race-") or "-cap" in name:
                continue
            try:
                steps = Trace.read(self.path / name / "trace").steps
            except (TraceError, OSError, ValueError):
                continue
            mine = steps[(steps["rank"] == 0) & (steps["table_generation"] == 0)].sort_values("end_ns")
            logs = np.log(mine["duration_ns"].to_numpy(float))
            if len(logs) >= LEAST_STEPS:
                found.append(logs[len(logs) // 4 :])
        return found


def _race(name: str, summary: dict[str, Any]) -> Race:
    rows = summary.get("tables", {}).get(summary.get("compared") or "", [])
    table = ", ".join(
        sorted({f"{row.get('algo') or 'auto'}/{row.get('proto') or ''}/{row['n_channels']}" for row in rows})
    )
    low, high = summary.get("speedup_ci95") or (math.nan, math.nan)
    speedup = summary.get("speedup")
    reasons = "; ".join(summary.get("reasons") or [])
    return Race(name, table, math.nan if speedup is None else speedup, low, high, reasons)


def claims(folders: Sequence[Folder]) -> list[tuple[Folder, Race, str]]:
    """All races, each with why its gain must not be claimed: "" where it may be."""
    return [(one, race, _refusal(one, race, folders)) for one in folders for race in one.races()]


def _refusal(mine: Folder, race: Race, folders: Sequence[Folder]) -> str:
    if mine.run.get("emulated"):
        return "emulated"
    if not race.is_gain:
        return "the comparison does not exclude that there is no gain"
    for other in folders:
        is_same = all(other.run.get(key) == mine.run.get(key) for key in ALIKE)
        if other.path != mine.path and other.run.get("began") != mine.run.get("began") and is_same:
            for its in other.races():
                if its.name == race.name and its.table == race.table and its.is_gain:
                    return ""
    return "no second call on such a machine agrees"


def staircase(rows: pd.DataFrame) -> float:
    """Part that is seen of what waves of tiles say a collective's channels cost a product; NaN where nothing tells.

    Waves: ceil(tiles / (SMs - channels)) over ceil(tiles / SMs).
    """
    seen = []
    for row in rows.to_dict("records"):
        channels, sms = int(str(row["ran"]).rpartition("/")[2]), int(row["sms"])
        if channels >= sms:  # also without a GPU, where it has none
            continue
        tiles = math.ceil(int(row["size"]) ** 2 / TILE)
        expected = math.ceil(tiles / (sms - channels)) / math.ceil(tiles / sms)
        if expected > 1:
            seen.append((float(row["beside_us"]) / float(row["alone_us"]) - 1) / (expected - 1))
    return float(np.median(seen)) if seen else math.nan


def noise(series: Sequence[Any]) -> dict[str, list[float]]:
    """Range over some series of steps: scatter of the log (robust), and correlation with the step before."""
    sigma, memory = [], []
    for logs in series:
        x = logs - np.median(logs)
        scale = 1.4826 * float(np.median(np.abs(x)))
        x = np.clip(x, -3 * scale, 3 * scale)
        x = x - x.mean()
        sigma.append(round(scale, 4))
        memory.append(round(float((x[1:] * x[:-1]).mean() / max(float((x * x).mean()), 1e-18)), 2))
    return {"sigma": [min(sigma), max(sigma)], "memory": [min(memory), max(memory)]} if sigma else {}


def obedience(rows: pd.DataFrame) -> tuple[int, int]:
    """(settings whose kernels are named and sized as NCCL's events say, settings that were seen)."""
    right = seen = 0
    for _, one in rows[rows["kernel"] != ""].groupby(["func", "asked"]):
        algo, proto, channels = one["ran"].iloc[0].split("/")
        ending = {"simple": "SIMPLE"}.get(proto, proto.upper())
        wanted = f"{one['func'].iloc[0].title().replace('_', '')}_", f"_{algo.upper()}_{ending}"
        names = one["kernel"].str
        is_named = names.contains(wanted[0], regex=False) & names.contains(wanted[1], regex=False)
        is_sized = one["grid"].astype(str).str.startswith(f"{channels}x")
        seen += 1
        right += bool((is_named & is_sized).all())
    return right, seen


def measured(folders: Sequence[Folder]) -> dict[str, dict[str, Any]]:
    """Records for measured.json, by name; of emulated folders none."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        if folder.run.get("emulated"):
            continue
        run = folder.run
        source = (
            f"lab gpu-check on {run['device']}, NCCL {run['nccl']}, {run['placement']}: {folder.path.name}"
        )
        about = {"source": source, "date": str(folder.run["began"])[:10]}
        value = staircase(folder.rows("contention", CONTENTION))
        if not math.isnan(value):
            found["staircase_seen"] = {"value": round(value, 2), **about}
        if folder.run["placement"] != "apart" and (series := noise(folder.untouched_steps())):
            found["shared_gpu_noise"] = {"value": series, **about}
    return found


def sentence(folders: Sequence[Folder]) -> str:
    """The README's sentence. A figure of an emulated cluster says so."""
    found = claims(folders)
    sure = [(folder, race) for folder, race, why in found if not why]
    if sure:
        folder, race = max(sure, key=lambda one: one[1].low)
        shared = ", two ranks share one GPU" if folder.run["placement"] != "apart" else ""
        return f"{folder.run['device']}{shared}: {race}."
    if any(not folder.run.get("emulated") for folder in folders):
        return f"`lab gpu-check` ran on a GPU: of {len(found)} races none may be claimed."
    if found:
        emulated = max(
            (race for _, race, _ in found), key=lambda race: (not math.isnan(race.speedup), race.low)
        )
        return (
            f"`lab gpu-check` has not run on a GPU yet. On the emulated cluster, emulated times, {emulated}."
        )
    return "`lab gpu-check` has not run on a GPU yet."


def page(folders: Sequence[Folder]) -> str:
    """All that the folders say, as text."""
    lines = []
    for folder in folders:
        mark = "EMULATED times: " if folder.run.get("emulated") else ""
        lines.append(
            f"{mark}{folder.path.name}: {folder.run['device']}, {folder.run['ranks']} ranks, {folder.run['placement']}"
        )
        lines += [
            f"  {name}: {one['status']} after {one['took_s']} s" for name, one in folder.run["parts"].items()
        ]
        if swept := folder.sweep():
            lines.append(f"  {swept.line}")
        right, seen = obedience(folder.rows("kernels", KERNELS))
        lines.append(
            f"  kernels: {right} of {seen} settings launched the kernel and the grid that were asked for"
        )
        rows = folder.rows("contention", CONTENTION)
        lines.append(
            f"  contention: {len(rows)} rows; part of the staircase that is seen: {staircase(rows):.2f}"
        )
    for folder, race, why in claims(folders):
        lines.append(f"  {folder.path.name} {race}: {f'no claim: {why}' if why else 'CLAIM'}")
    return "\n".join([*lines, sentence(folders)])


def main() -> None:
    """Print the page; with ``--write`` also change the README and measured.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--measured", type=Path, default=FILE)
    asked = parser.parse_args()
    folders = [Folder.read(path) for path in asked.folders]
    print(page(folders))
    if asked.write:
        before, _, rest = asked.readme.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        if not after:
            raise SystemExit(f"{asked.readme} has no place between {BEGIN} and {END}")
        write_whole(asked.readme, f"{before}{BEGIN}{sentence(folders)}{END}{after}")
        records = json.loads(asked.measured.read_text("utf-8"))
        for name, record in measured(folders).items():
            value = record["value"]
            old = records.get(name, {}).get("value")
            if isinstance(value, dict) and isinstance(old, dict):
                record = record | {"value": old | value}
            records[name] = record
        write_whole(asked.measured, json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
