"""Tables in files: our own (JSON, see table_json.py) and that of NVIDIA's example tuner plugin (CSV).

CSV: ``collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks[,pipe_ops[,reg_buff]]``, -1 = any; the
first line that fits a message counts. Nodes and ranks are those of a communicator, as in a Rule. -1 channels mean here
what they say, NCCL's own count: NVIDIA's example pins such a collective to one channel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...traces.records import ALGOS, FUNCS, PROTOS, Decision, Rule, Table
from .table_env import MAX_BYTES, from_env
from .table_json import FORMAT, TABLE

MAX_TEXT = 4 << 20  # characters of a table's file: the plugin holds 1024 rows
_CSV_FUNCS = {name.replace("_", ""): name for name in FUNCS}


def load_table(path: Path | str, *, n_ranks: int | None = None, n_nodes: int | None = None) -> Table:
    """Read a table of either format, or the one that a run left in its folder.

    Raises ValueError naming file, line and cure.

    ``n_ranks`` and ``n_nodes`` complete lines that name one of the two, and turn bytes per rank into bytes.
    """
    path = Path(path)
    if path.is_dir():
        path /= TABLE
    if path.name == TABLE and path.parent.is_dir() and not path.exists():
        raise ValueError(f"{path}: there is none: the run has confirmed no table, or is no run")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
        if len(text) > MAX_TEXT:
            raise ValueError(f"{path}: over {MAX_TEXT >> 20} MiB is no table")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: neither a JSON table nor NVIDIA's CSV") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    try:
        if text.lstrip().startswith("{"):
            table = _from_json(text, n_ranks)
        elif "NCCL_ALGO=" in text:
            table = from_env(text)
        else:
            table = from_csv(text, n_ranks, n_nodes)
        table.to_array()  # overlaps
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return table


def to_csv(table: Table) -> str:
    """NVIDIA's format. Raises ValueError for rules that it cannot say: channels only.

    There the first line counts, here a rule for a class of communicators: those come first.
    """
    lines = ["# collective,min_bytes,max_bytes,algorithm,protocol,channels,nodes,ranks"]
    for rule in sorted(table.rules, key=lambda rule: rule.n_ranks == 0):
        decision = rule.decision
        if decision.algo is None:
            raise ValueError("NVIDIA's table cannot set channels alone: name algorithm and protocol")
        name, size = rule.func.replace("_", ""), f"{rule.min_bytes},{rule.max_bytes}"
        comms = f"{rule.n_nodes or -1},{rule.n_ranks or -1}"
        lines.append(f"{name},{size},{decision.algo},{decision.proto},{decision.n_channels or -1},{comms}")
    return "\n".join(lines) + "\n"


def from_csv(text: str, n_ranks: int | None = None, n_nodes: int | None = None) -> Table:
    """Read NVIDIA's format. Raises ValueError naming the line."""
    rules: list[Rule] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = [field.strip() for field in line.partition("#")[0].split(",")]
        if fields == [""]:
            continue
        try:
            rule = _csv_rule(fields, n_ranks, n_nodes)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if rule is not None:
            rules += _uncovered(rule, rules)
    return Table(1, tuple(rules))


def _csv_rule(fields: list[str], n_ranks: int | None, n_nodes: int | None) -> Rule | None:
    """The rule of one line, or None where no table of ours can say it."""
    if not 8 <= len(fields) <= 10:
        raise ValueError(f"{len(fields)} fields, NVIDIA's tuner table has 8 to 10")
    func, algo, proto = fields[0].lower().replace("_", ""), fields[3].lower(), fields[4].lower()
    for value, known in ((func, _CSV_FUNCS), (algo, ALGOS), (proto, PROTOS)):
        if value not in known:
            raise ValueError(f"unknown name {value!r}; known are {', '.join(known)}")
    numbers = [int(f) if f.removeprefix("-").isdigit() else None for f in (*fields[1:3], *fields[5:])]
    if None in numbers:
        raise ValueError("sizes, channels, nodes and ranks are whole numbers")
    low, high, channels, nodes, ranks, *rest = (int(n or 0) for n in numbers)
    if min(nodes, ranks) < -1 or 0 in (nodes, ranks) or max(nodes, ranks) >= 2**32:
        raise ValueError(f"{nodes} nodes and {ranks} ranks are no communicator; -1 means any")
    if (nodes == -1) != (ranks == -1):
        named, missing, given = ("ranks", "nodes", n_nodes) if nodes == -1 else ("nodes", "ranks", n_ranks)
        if given is None:
            raise ValueError(f"names {named} alone: say how many {missing} its communicators have by --{missing}")
        nodes, ranks = (given, ranks) if nodes == -1 else (nodes, given)
    if any(value not in (-1, default) for value, default in zip(rest, (1, 0), strict=False)):
        return None  # grouped collectives, registered buffers: ranks may differ in these
    if low < 0 or (high != -1 and high < low) or high > MAX_BYTES:
        raise ValueError(f"sizes {low} to {high} are no range")
    high = MAX_BYTES if high == -1 else high
    return Rule(max(ranks, 0), max(nodes, 0), _CSV_FUNCS[func], low, high, Decision(algo, proto, max(channels, 0)))


def _uncovered(rule: Rule, before: list[Rule]) -> list[Rule]:
    """The parts of ``rule`` that no earlier rule covers: one of its collective, for all communicators or its class."""
    parts = [(rule.min_bytes, rule.max_bytes)]
    for old in before:
        if old.func == rule.func and (old.n_ranks, old.n_nodes) in ((0, 0), (rule.n_ranks, rule.n_nodes)):
            parts = [
                part
                for low, high in parts
                for part in ((low, min(high, old.min_bytes - 1)), (max(low, old.max_bytes + 1), high))
                if part[0] <= part[1]
            ]
    return [replace(rule, min_bytes=low, max_bytes=high) for low, high in dict.fromkeys(parts)]


def _from_json(text: str, n_ranks: int | None) -> Table:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("nested deeper than any table") from None
    if not isinstance(content, dict) or content.get("dynamiccl_table") != FORMAT:
        version = content.get("dynamiccl_table") if isinstance(content, dict) else None
        raise ValueError(f"table of format {version}, this release reads {FORMAT}")
    rules = content.get("rules")
    if not isinstance(rules, list):
        raise ValueError("'rules' must be a list")
    return Table(1, tuple(_json_rule(number, row, n_ranks) for number, row in enumerate(rules, 1)))


def _json_rule(number: int, row: Any, n_ranks: int | None) -> Rule:
    known = {"func", "min_bytes", "max_bytes", "min_bytes_per_rank", "max_bytes_per_rank"}
    known |= {"algo", "proto", "n_channels", "n_ranks", "n_nodes"}
    where = f"rule {number}"
    if not isinstance(row, dict) or not set(row) <= known:
        raise ValueError(f"{where}: may have {', '.join(sorted(known))}")
    if row.get("func") not in FUNCS:
        raise ValueError(f"{where}: func is one of {', '.join(FUNCS)}")
    numbers = {key: row.get(key, 0) for key in ("n_channels", "n_ranks", "n_nodes")}
    if not all(type(value) is int and 0 <= value < 2**32 for value in numbers.values()):
        raise ValueError(f"{where}: {', '.join(numbers)} are whole numbers")
    if (numbers["n_ranks"] == 0) != (numbers["n_nodes"] == 0):
        raise ValueError(f"{where}: n_ranks and n_nodes of its communicators are named together or not at all")
    n_ranks = numbers["n_ranks"] or n_ranks
    sizes = []
    for key, default in (("min_bytes", 0), ("max_bytes", MAX_BYTES)):
        per_rank = row.get(f"{key}_per_rank")
        if per_rank is not None and n_ranks is None:
            raise ValueError(f"{where}: sizes per rank need n_ranks: give n_ranks, or --ranks for all rules")
        size = row.get(key, default) if per_rank is None else per_rank
        factor = 1 if per_rank is None else int(n_ranks or 1)
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size * factor <= MAX_BYTES:
            raise ValueError(f"{where}: {key} is a whole number of bytes")
        sizes.append(size * factor)
    if sizes[0] > sizes[1]:
        raise ValueError(f"{where}: sizes {sizes[0]} to {sizes[1]} are no range")
    try:
        decision = Decision(row.get("algo"), row.get("proto"), numbers["n_channels"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Rule(numbers["n_ranks"], numbers["n_nodes"], str(row["func"]), sizes[0], sizes[1], decision)
