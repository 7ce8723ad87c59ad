"""Tables in files.

``{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "min_bytes": 0, "max_bytes": 1048576, "algo": "ring", "proto":
"ll", "n_channels": 0, "n_ranks": 16, "n_nodes": 2}]}``. OPERATING.md says what may be omitted. A rule with ``threads``
is a ceiling (``untouched.py``). ``dropped`` says why a run dropped the table.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ...traces.header import plain
from ...traces.outside import atomically, parse_json
from ...traces.reasons import Why
from ...traces.records import FUNCS, Decision, Rule, Table

FORMAT = 1
#: In a folder of results: the table that the run confirmed.
TABLE = "table.json"
#: Beside it: the table that the run dropped last, with the reason.
DROPPED = "dropped-table.json"
MAX_BYTES = 2**63 - 1
MAX_TEXT = 4 << 20  # characters of a table's file: the plugin holds 1024 rows
_KEYS = ("func", "min_bytes", "max_bytes", "algo", "proto", "n_channels", "n_ranks", "n_nodes", "threads")


def to_json(table: Table, dropped: Why | None = None) -> str:
    """The text of a table's file; ``dropped``: why its run dropped it."""
    rules = []
    for rule in table.rules:
        row = {"func": rule.func, "min_bytes": rule.min_bytes, "max_bytes": rule.max_bytes}
        row |= {"n_ranks": rule.n_ranks, "n_nodes": rule.n_nodes} if rule.n_ranks else {}
        row |= {"threads": rule.threads} if rule.threads else {}
        rules.append(row | {name: value for name, value in vars(rule.decision).items() if value})
    why = {"dropped": plain(dropped)} if dropped else {}
    return json.dumps({"dynamiccl_table": FORMAT, **why, "rules": rules}, indent=1) + "\n"


def set_aside(folder: Path, why: Why) -> None:
    """Rename the table of a folder of results, if it has one, and write into it why it is dropped.

    Raises OSError or TraceError.
    """
    path = folder / TABLE
    if not path.exists():
        return
    text = ""
    with contextlib.suppress(ValueError):  # somebody has damaged it
        text = to_json(load_table(path), why)
    if text:
        atomically(folder / DROPPED, lambda draft: draft.write_text(text))
    path.unlink(missing_ok=True)


def why_dropped(path: Path) -> Why | None:
    """Why its run dropped the table of this file; None where the file does not say so, or cannot be read."""
    with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
        told = parse_json(file.read(MAX_TEXT), MAX_TEXT)
        if isinstance(told, dict):
            return Why.of(told.get("dropped"))
    return None


def load_table(path: Path | str) -> Table:
    """Read a table, or the one that a run left in its folder. Raises ValueError naming file, rule and cure."""
    path = Path(path)
    if path.is_dir():
        path /= TABLE
    if path.name == TABLE and path.parent.is_dir() and not path.exists():
        raise ValueError(f"{path}: there is none: {_why_no_table(path.parent)}")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a table: that is a JSON text") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > MAX_TEXT:
        raise ValueError(f"{path}: over {MAX_TEXT >> 20} MiB is no table")
    try:
        table = _from_json(text)
        table.to_array()  # overlaps
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return table


def _why_no_table(folder: Path) -> str:
    """Of a job on several nodes only the tuner beside rank 0 keeps a table. Slurm's tasks leave their results in one
    folder: it is in one of the others then."""
    tasks = sorted(folder.parent.glob(f"task-*/{TABLE}")) if folder.name.startswith("task-") else []
    if tasks:
        return f"rank 0 of this job was on another node: give {tasks[-1]}"
    dropped = folder / DROPPED
    if why := why_dropped(dropped):
        return f"the run dropped its table ({why}): to use it all the same, give {dropped}"
    return "the run has confirmed no table, or is no run; of a job on several nodes, give the results of rank 0's node"


def _from_json(text: str) -> Table:
    try:
        content = parse_json(text, MAX_TEXT)
    except ValueError as error:
        raise ValueError(f"not a table of dynamiccl, which is JSON ({error})") from None
    version = content.get("dynamiccl_table") if isinstance(content, dict) else None
    if version != FORMAT:
        raise ValueError(f"table of format {version}, this release reads {FORMAT}")
    if not isinstance(content.get("rules"), list):
        raise ValueError("'rules' must be a list")
    rules = []
    for number, row in enumerate(content["rules"], 1):
        try:
            rules.append(_rule(row))
        except ValueError as error:
            raise ValueError(f"rule {number}: {error}") from None
    return Table(1, tuple(rules))


def _rule(row: Any) -> Rule:
    if not isinstance(row, dict) or not row.keys() <= set(_KEYS):
        raise ValueError(f"may have {', '.join(sorted(_KEYS))}")
    if row.get("func") not in FUNCS:
        raise ValueError(f"func is one of {', '.join(FUNCS)}")
    n_channels, n_ranks, n_nodes = (
        _whole(row, key, 0, 2**32 - 1) for key in ("n_channels", "n_ranks", "n_nodes")
    )
    if (n_ranks == 0) != (n_nodes == 0):
        raise ValueError("n_ranks and n_nodes of its communicators are named together or not at all")
    low, high = _whole(row, "min_bytes", 0, MAX_BYTES), _whole(row, "max_bytes", MAX_BYTES, MAX_BYTES)
    if low > high:
        raise ValueError(f"sizes {low} to {high} are no range")
    decision = Decision(row.get("algo"), row.get("proto"), n_channels)
    threads = _whole(row, "threads", 0, 512)
    if threads and (threads not in (256, 512) or decision.algo or not n_channels):
        raise ValueError(
            "threads, 256 or 512, make a ceiling: a row with n_channels and without algo and proto"
        )
    return Rule(n_ranks, n_nodes, row["func"], low, high, decision, threads)


def _whole(row: dict[str, Any], key: str, otherwise: int, most: int) -> int:
    value = row.get(key, otherwise)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{key} is a whole number up to {most}, not {value!r}")
    return value
