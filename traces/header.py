"""What every trace says of itself, without secrets, and how values become JSON."""

from __future__ import annotations

import math
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from .here import host, kernel, version_of
from .outside import readable
from .reasons import Why
from .records import Decision, Slot, Table

#: Version of a trace folder's layout. Raise it when a reader of the old layout would go wrong.
FORMAT = 4
#: Kinds of rows in a segment of a trace: those in numbered parts, and those in one file each.
IN_PARTS, IN_ONE_FILE = ("events", "steps", "waits"), ("comms", "offers")

#: Key of another tool's recording: where the number of ranks is 0, all_gather and reduce_scatter have one rank's bytes.
OF_ONE_RANK = "bytes_of_one_rank"


def files_of_trace(folder: Path) -> list[Path]:
    """The files of a trace in ``folder``, and no others: what may be removed with it."""
    names = ["header.json", "windows.jsonl", "segment-*.json", "*.tmp"]
    names += [f"{kind}*.parquet" for kind in (*IN_ONE_FILE, *IN_PARTS)]
    return [path for name in names for path in folder.glob(name)]


def new_header() -> dict[str, Any]:
    """What every trace says of itself: format, date (UTC), host, versions, the commit if in a checkout."""
    versions = {"python": platform.python_version()}
    for package in ("dynamiccl", "numpy", "pandas", "pyarrow", "torch"):
        if (version := version_of(package)) is not None:
            versions[package] = version
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host(),
        "kernel": kernel(),
        "versions": versions,
        "commit": commit(),
        "command": readable(masked(" ".join(sys.argv))),
    }


#: Names of options and variables whose value is a secret, and values that are one whatever they are called.
_SECRET_NAME = (
    r"[\w.-]*(?:token|(?:secret|passw(?:or)?d|passphrase|(?:api|access|private)[_-]?key|credential)s?)"
)
_SECRETS = (
    re.compile(
        rf"(?i)(?P<keep>(?<![\w-])(?:--?)?{_SECRET_NAME}(?:\s*[=:]\s*|\s+)[\"']?)(?P<secret>[^\s\"']+)"
    ),
    re.compile(r"(?P<keep>\b\w{1,20}://[^\s/:@]{1,200}:)(?P<secret>[^\s/@]{1,500})(?=@)"),
    re.compile(r"(?P<keep>(?i:bearer|basic)\s+)(?P<secret>[\w.~+/=-]{8,})"),
    re.compile(
        r"(?P<keep>)(?P<secret>\b(?:hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
        r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+))"
    ),
)


def masked(text: str) -> str:
    """``text`` (a command line) with the secrets in it, as far as they have a known form, replaced by ``***``."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: f"{found['keep']}***", text)
    return text


def git(*args: str) -> str | None:
    """What git says of the checkout that this code lies in, None where it lies in none."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The commit of this code: the checkout's, else the one that the wheel was built of; None if neither tells."""
    if found := git("rev-parse", "HEAD"):
        return found
    try:
        return (Path(__file__).resolve().parents[1] / "commit.txt").read_text("ascii").strip() or None
    except (OSError, ValueError):
        return None


def _plain_table(table: Table) -> dict[str, Any]:
    told = {"generation": table.generation, "rules": [plain(vars(rule)) for rule in table.rules]}
    return told | {name: n for name, n in table.trial._asdict().items() if n}


def plain(value: Any) -> Any:
    """What JSON can hold: our records by their fields, numpy by value, NaN and infinities as None."""
    match value:
        case Decision():
            return str(value)
        case Why():
            return value.as_json() | {"text": readable(str(value))}
        case Slot():
            return asdict(value)
        case Table():
            return _plain_table(value)
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple():
            return [plain(v) for v in value]
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float():
            return value
    return readable(str(value))
