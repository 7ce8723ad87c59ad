"""Checks a folder of ``lab submit`` before it is filed: schema, obedience, A/A and plausibility of its times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ....traces.outside import read_json
from .files import COLUMNS
from .judge import paired, robust_sd
from .submit import (
    FIELDS,
    HEADER,
    MOST_BYTES,
    SETTING,
    SETTINGS,
    STEP_COLUMNS,
    STEPS,
    SWEEP,
    VERSION,
    VERSIONS,
    fits,
)

#: Bytes a second of one GPU's fastest link, doubled: no collective is faster than that.
FASTEST_BYTES_S = 3.6e12
#: Least microseconds of a collective: below, nothing ran.
LEAST_US = 1.0
#: Standard errors by which the default may differ from itself.
MOST_ERRORS = 4.0
#: Pairs of default steps below which a series says nothing.
LEAST_PAIRS = 10


def faults(folder: Path) -> list[str]:
    """All that is wrong with a submitted folder, one line each; empty for a good one.

    Each line begins with the check that failed: size, schema, privacy, obedience, plausibility or A/A.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in files)
    found = [f"size: {total:,} bytes, at most {MOST_BYTES:,}"] if total > MOST_BYTES else []
    names = {path.relative_to(folder).as_posix() for path in files}
    strangers = sorted(names - {HEADER, SWEEP, STEPS, "NOTE.md"})
    found += [f"schema: {name} is no file of a submission" for name in strangers]
    try:
        header = read_json(folder / HEADER)
        sweep = pd.read_csv(folder / SWEEP)
        steps = pd.read_csv(folder / STEPS)
    except (OSError, ValueError) as error:
        return [*found, f"schema: {error}"]
    found += header_faults(header) if isinstance(header, dict) else [f"schema: {HEADER} is no object"]
    for name, table, columns in ((SWEEP, sweep, COLUMNS["sweep"]), (STEPS, steps, STEP_COLUMNS)):
        if tuple(table.columns) != columns:
            return [*found, f"schema: the columns of {name} are {', '.join(map(str, table.columns))}"]
    is_run = isinstance(header, dict) and header.get("source") == "tune"
    return [*found, *_texts(sweep), *_obedience(sweep, is_run), *_plausibility(sweep), *_same(steps)]


def header_faults(header: Mapping[str, Any]) -> list[str]:
    """What is wrong with a header, one line each."""
    found = [f"schema: {HEADER} lacks {name}" for name in FIELDS if name not in header]
    known = {*FIELDS, "versions", "settings"}
    found += [f"privacy: {HEADER} has a field {name}" for name in header if name not in known]
    for name, pattern in FIELDS.items():
        if name in header and not fits(pattern, header[name]):
            found.append(f"privacy: {name} is {header[name]!r}")
    for group, names, pattern in (("versions", VERSIONS, VERSION), ("settings", SETTINGS, SETTING)):
        for name, value in dict(header.get(group, {})).items():
            if name not in names or not fits(pattern, value):
                found.append(f"privacy: {group} has {name} {value!r}")
    return found


#: Columns of text in the sweep -> what each cell must look like.
_TEXTS = {
    "comm": "nccl|raised",
    "func": "all_gather|reduce_scatter",
    "asked": r"[a-z0-9_]+(/[a-z0-9]+){0,2}",
    "ran": r"[a-z0-9_]+/[a-z0-9]+/\d+",
}


def _texts(sweep: pd.DataFrame) -> list[str]:
    """Cells of text that say more than they should."""
    found = []
    for name, pattern in _TEXTS.items():
        wrong = [cell for cell in sweep[name].unique() if not fits(pattern, cell)]
        found += [f"privacy: {name} is {cell!r}" for cell in wrong]
    return found


def _obedience(sweep: pd.DataFrame, is_run: bool) -> list[str]:
    """Rows whose call did not run as asked for, or came to a wrong result."""
    found = []
    for name, what in (("right", "results are wrong"), ("obeyed", "not obeyed"), ("agreed", "ranks differ")):
        cells = sweep[name].astype(str)
        if name == "right" and is_run:
            cells = cells.where(sweep[name].notna(), "True")  # a run does not look at results
        wrong = int((cells != "True").sum())
        if wrong:
            found.append(f"obedience: {what} in {wrong} rows")
    return found


def _plausibility(sweep: pd.DataFrame) -> list[str]:
    """Times that no collective can have."""
    rows = sweep[sweep["calls"] > 0]
    times = rows[["p10_us", "p50_us", "p90_us"]].astype(float).to_numpy()
    if not len(times) or not np.isfinite(times).all():
        return ["plausibility: times are missing"]
    found = []
    if (np.diff(times, axis=1) < 0).any():
        found.append("plausibility: quantiles are not in order")
    if times.min() < LEAST_US:
        found.append(f"plausibility: a call takes less than {LEAST_US} us")
    bytes_s = rows["n_bytes"].to_numpy(float) / (times[:, 1] * 1e-6)
    if bytes_s.max() > FASTEST_BYTES_S:
        found.append("plausibility: a call moves more bytes a second than any link")
    return found


def _same(steps: pd.DataFrame) -> list[str]:
    """A/A: default steps, taken as turns A B B A, must not differ from themselves."""
    found = []
    for series, rows in steps.groupby("series"):
        relative = rows["relative"].to_numpy(float)
        if not (relative > 0).all():
            return ["plausibility: a step time is not positive"]
        logs = paired(relative)
        if len(logs) < LEAST_PAIRS:
            continue
        scale = max(robust_sd(logs), 1e-4)
        mean = float(np.clip(logs, -5 * scale, 5 * scale).mean())
        errors = abs(mean) / scale * math.sqrt(len(logs))
        if errors > MOST_ERRORS:
            found.append(
                f"A/A: series {series} differs from itself by {mean:+.2%}, {errors:.1f} standard errors"
            )
    return found
