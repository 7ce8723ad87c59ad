"""Tables as ``NCCL_ALGO`` and ``NCCL_PROTO`` per collective (NCCL 2.24 on), written and read; what is lost is said.

The variables are masks: they hold for all sizes and communicators of a process, and NCCL's model picks among what is
left. So they say a table only where it says one pair for all messages of a collective.
"""

from __future__ import annotations

import re

from ...traces.records import ALGOS, PROTOS, Decision, Rule, Table

MAX_BYTES = 2**63 - 1
_FUNCS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}
_NAME = {func: name for name, func in _FUNCS.items()}
_NCCL = {"collnet_direct": "collnetdirect", "collnet_chain": "collnetchain", "nvls_tree": "nvlstree"}


def to_env(table: Table) -> tuple[dict[str, str], list[str]]:
    """(variables, what they lose of the table, one line each)."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    lost: list[str] = []
    for rule in table.rules:
        d, name = rule.decision, _NAME.get(rule.func, rule.func)
        if d.algo is None:
            lost.append(f"{name}: {d} is left out: the variables cannot set channels")
            continue
        pairs.setdefault(rule.func, []).append((d.algo, str(d.proto)))
        if rule.min_bytes > 1 or rule.max_bytes < MAX_BYTES:
            lost.append(f"{name}: {d} is for {rule.min_bytes} to {rule.max_bytes} bytes, the variable for all sizes")
        if rule.n_ranks:
            lost.append(f"{name}: {d} is for {rule.n_ranks} ranks on {rule.n_nodes} nodes, the variable for all")
        if d.n_channels:
            lost.append(f"{name}: the {d.n_channels} channels of {d} (NCCL_MAX_CTAS would limit all collectives)")
        if d.proto == "ll128":
            lost.append(f"{name}: NCCL's test of whether LL128 is safe on this machine is off when NCCL_PROTO names it")
    for func, found in pairs.items():
        if len(set(found)) > 1:
            lost.append(
                f"{_NAME.get(func, func)}: {len(set(found))} pairs become one mask; NCCL's model picks among them"
            )
    if pairs:
        lost.append("a tuner can no longer choose anything else: NCCL applies these before it asks one")
    variables = {}
    for key, place in (("NCCL_ALGO", 0), ("NCCL_PROTO", 1)):
        names = {
            _NAME.get(func, func): dict.fromkeys(_NCCL.get(p[place], p[place]) for p in found)
            for func, found in pairs.items()
        }
        if names:
            variables[key] = ";".join(f"{func}:{','.join(values)}" for func, values in sorted(names.items()))
    return variables, list(dict.fromkeys(lost))


def from_env(text: str) -> Table:
    """The table in lines ``NCCL_ALGO=...``, ``NCCL_PROTO=...``. Raises ValueError where they are masks of several."""
    chosen: dict[str, dict[str, list[str]]] = {}
    for key in ("NCCL_ALGO", "NCCL_PROTO"):
        found = re.search(rf"^\s*(?:export\s+)?{key}=[\"']?([^\"'\s#]*)", text, flags=re.M)
        if found is None:
            raise ValueError(f"no {key}=: a table names algorithm and protocol of each collective")
        for part in filter(None, found[1].lower().split(";")):
            name, colon, values = part.rpartition(":")
            if not colon or name not in _FUNCS:
                raise ValueError(f"{key}: {part!r} is not for one collective; write {', '.join(_FUNCS)}:NAME")
            chosen.setdefault(_FUNCS[name], {})[key] = values.split(",")
    back = {value: key for key, value in _NCCL.items()}
    rules = []
    for func, keys in sorted(chosen.items()):
        algos, protos = ([back.get(v, v) for v in keys.get(k, [])] for k in ("NCCL_ALGO", "NCCL_PROTO"))
        if len(algos) != 1 or len(protos) != 1:
            told = f"{len(algos)} algorithms and {len(protos)} protocols"
            raise ValueError(f"{func}: {told} are a mask; a table names one each")
        if algos[0] not in ALGOS or protos[0] not in PROTOS:
            raise ValueError(f"{func}: {algos[0]}/{protos[0]} is none; algorithms are {', '.join(ALGOS)}")
        rules.append(Rule(0, 0, func, 0, MAX_BYTES, Decision(algos[0], protos[0])))
    return Table(1, tuple(rules))
