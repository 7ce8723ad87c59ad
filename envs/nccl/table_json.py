"""A table as a file has it; tables.py reads it.

``{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "min_bytes": 0, "max_bytes": 1048576, "algo": "ring",
"proto": "ll", "n_channels": 0, "n_ranks": 16, "n_nodes": 2}]}``. ``algo`` and ``proto`` may be left out together,
``n_channels`` too; so may ``n_ranks`` and ``n_nodes``, then the rule holds for every communicator that has none of its
own.
"""

from __future__ import annotations

import json

from ...traces.records import Table

FORMAT = 1
#: In a folder of results: the table that the run confirmed.
TABLE = "table.json"


def to_json(table: Table) -> str:
    """The text of a table's file."""
    rules = []
    for rule in table.rules:
        row = {"func": rule.func, "min_bytes": rule.min_bytes, "max_bytes": rule.max_bytes}
        row |= {"n_ranks": rule.n_ranks, "n_nodes": rule.n_nodes} if rule.n_ranks else {}
        rules.append(row | {name: value for name, value in vars(rule.decision).items() if value})
    return json.dumps({"dynamiccl_table": FORMAT, "rules": rules}, indent=1) + "\n"
