"""The reasons for each row of a run's table: NCCL's estimates, the settings that ran, and the comparisons.

Only a comparison that changed one row alone gives the gain of that row. Rows that always changed together have one
common gain, the table's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...envs.replay.decisions import default_generations, load, windows_of
from ...traces.files import Trace
from ...traces.queries.exposed import exposed_parts_of, exposed_text
from ...traces.queries.slots import SlotProfile
from ...traces.records import PAIRS, decided
from .summary import RunSummary
from .texts import nothing_decided
from .verdict import OWN, change, outcome


def chains(trace: Trace, summary: RunSummary) -> list[dict[str, Any]]:
    """Returns one chain per slot, the largest share of the step first.

    A chain has NCCL's setting and estimates, the settings that ran with their windows, the comparisons that changed
    only this slot, and the decision. Raises TraceError for a trace without steps or slots.
    """
    recorded = load(trace, min_share=0.0)
    told = {row["slot"]: row["exposed"] for row in summary.exposed}  # each figure is told alike everywhere
    shown = exposed_parts_of(trace, default_generations(trace))
    found = []
    for profile, share in zip(recorded.profiles, recorded.share, strict=True):
        exposed = told.get(str(profile.slot), shown.get(profile.slot))
        shares = {"share": float(share), "exposed": exposed}
        found.append(_chain(profile, trace, summary) | shares)
    return found


def _chain(p: SlotProfile, trace: Trace, summary: RunSummary) -> dict[str, Any]:
    """The chain of one slot, without its shares."""
    offered = zip(PAIRS, p.fingerprint.cost_us[0], strict=True)
    mine = next((row for row in summary.decisions if _is_of(row, p)), None)
    decision = decided(mine) if mine else None
    in_force = None if decision is None else bool(summary.kept) and decision != "auto"
    return {
        "slot": str(p.slot),
        "n_ranks": p.slot.n_ranks,
        "calls": p.calls,
        "own": p.own,
        "prices": {"/".join(pair): round(float(us), 1) for pair, us in offered if us >= 0},
        "tried": dict(_tried(trace, p).most_common()),
        "alone": _alone(summary, p),
        "refused": [r for r in summary.refused if r["slot"] == str(p.slot)],
        "decided": decision,
        "reason": mine.get("reason") if mine else nothing_decided(summary, trace.header),
        "in_force": in_force,
        "table": summary.in_force if in_force else None,
    }


def _is_of(row: Mapping[str, Any], p: SlotProfile) -> bool:
    """Whether a row of a summary or of a trace's table applies to a slot; 0 ranks: any number."""
    inside = int(row["min_bytes"]) <= p.n_bytes <= int(row["max_bytes"])
    return row["func"] == p.slot.func and inside and int(row.get("n_ranks") or 0) in (0, p.slot.n_ranks)


def _tried(trace: Trace, p: SlotProfile) -> Counter[str]:
    """Settings that a slot ran under tables, with their numbers of windows."""
    rules = {
        g: [str(rule["decision"]) for rule in rules if _is_of(rule, p)] for g, rules in trace.tables.items()
    }
    return Counter(decision for w in windows_of(trace) for decision in rules.get(w.generation, ()))


def _alone(summary: RunSummary, p: SlotProfile) -> list[dict[str, Any]]:
    """Comparisons of two tables that differ only in this slot."""
    found = []
    for c in summary.comparisons:
        sides = [{_key(row): row for row in summary.tables.get(c[name], ())} for name in ("table", "against")]
        apart = [row for key, row in (sides[0] | sides[1]).items() if sides[0].get(key) != sides[1].get(key)]
        if len(apart) == 1 and _is_of(apart[0], p):
            found.append({"decision": decided(sides[0].get(_key(apart[0]), {})), **c})
    return found


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("func", "min_bytes", "max_bytes", "n_ranks", "n_nodes"))


def lines(chain: Mapping[str, Any], summary: RunSummary) -> list[str]:
    """Returns a chain as a few lines for people."""
    calls, share = (
        f"{chain['calls']:.0f} call{'s' * (round(chain['calls']) != 1)}",
        f"{chain['share']:.1%} of the step",
    )
    prices = ", ".join(
        f"{pair} {us:g} us" for pair, us in sorted(chain["prices"].items(), key=lambda x: x[1])
    )
    tried = ", ".join(f"{config} in {n} window{'s' * (n > 1)}" for config, n in chain["tried"].items())
    waits = "" if chain["exposed"] is None else f"; {exposed_text(chain['exposed'])}"
    said = [f"{chain['slot']} on {chain['n_ranks']} ranks: {calls}, {share}{waits}"]
    said += [
        f"  NCCL    {chain['own']}, by its own estimates: {prices}",
        f"  tried   {tried or 'nothing else'}",
    ]
    said += [f"  alone   {c['decision']}: {outcome(c)}" for c in chain["alone"]]
    said += [f"  refused {row['why']}" for row in chain["refused"]]
    return said + _decided(chain, summary)


def _decided(chain: Mapping[str, Any], summary: RunSummary) -> list[str]:
    """Returns the decision for a slot and its gain, as lines."""
    if chain["decided"] is None:
        return [f"  decided nothing: {chain['reason']}"]
    if not chain["in_force"]:
        state = "NCCL decides" if chain["decided"] == "auto" else "not used"
        return [f"  decided {chain['decided']} ({state}){': ' + chain['reason'] if chain['reason'] else ''}"]
    said = [f"  decided {chain['decided']}, used as a row of {chain['table'] or 'the table'}"]
    if summary.speedup is not None:
        rows = sum(decided(row) != "auto" for row in summary.decisions)
        which = f"these {rows} rows together" if rows > 1 else "this row"
        apart = "; not separable" if rows > 1 and not chain["alone"] else ""
        gain = change(summary.speedup, summary.speedup_ci95)
        said.append(f"  gain    {which}: steps {gain} than under {OWN}{apart}")
    return said
