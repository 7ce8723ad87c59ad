"""The reasons for each row of a run's table: NCCL's estimates, the settings that ran, and the comparisons.

Only a comparison that changed one row alone gives the gain of that row. Rows that always changed together have one
common gain, the table's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...envs.replay.decisions import load
from ...traces.files import Trace, applies, row_for
from ...traces.queries.costs import default_generations
from ...traces.queries.exposed import exposed_parts_of, exposed_text
from ...traces.queries.slots import SlotProfile
from ...traces.records import PAIRS_OF, Slot, decided
from .summary import RunSummary
from .texts import nothing_decided
from .verdict import OWN, change, outcome


def chains(trace: Trace, summary: RunSummary) -> list[dict[str, Any]]:
    """Returns one chain per slot, the largest share of the step first.

    A chain has NCCL's setting and estimates, the settings that ran with their windows, the comparisons that changed
    only this slot, and the decision. Raises TraceError for a trace without steps or slots.
    """
    recorded = load(trace, min_share=0.0)
    shown = exposed_parts_of(trace, default_generations(trace))
    found = []
    for profile, share in zip(recorded.profiles, recorded.share, strict=True):
        slot = profile.slot
        # Each figure is told alike everywhere.
        exposed = shown.get(slot)
        for row in summary.exposed:
            if _names(row, slot):
                exposed = row["exposed"]
        shares = {"share": float(share), "exposed": exposed}
        found.append(_chain(profile, trace, summary) | shares)
    return found


def _chain(p: SlotProfile, trace: Trace, summary: RunSummary) -> dict[str, Any]:
    """The chain of one slot, without its shares."""
    offered = zip(PAIRS_OF[p.slot.func], p.fingerprint.cost_us[0], strict=True)
    mine = row_for(summary.decisions, _call_of(p))
    decision = decided(mine) if mine else None
    in_force = None if decision is None else bool(summary.kept) and decision != "auto"
    prices = {}
    for pair, us in offered:
        if us >= 0:
            name = "/".join(pair)
            prices[name] = round(float(us), 1)
    refused = [row for row in summary.refused if _names(row, p.slot)]
    return {
        "slot": str(p.slot),
        "n_ranks": p.slot.n_ranks,
        "calls": p.calls,
        "own": p.own,
        "prices": prices,
        "tried": dict(_tried(trace, p).most_common()),
        "alone": _alone(summary, p),
        "refused": refused,
        "decided": decision,
        "reason": str(mine.get("why") or "") if mine else nothing_decided(summary, trace.header),
        "in_force": in_force,
        "table": summary.in_force if in_force else None,
    }


def _names(row: Mapping[str, Any], slot: Slot) -> bool:
    """Whether a row of a summary names a slot."""
    return (row["slot"], row["n_ranks"], row["n_nodes"]) == (str(slot), slot.n_ranks, slot.n_nodes)


def _call_of(p: SlotProfile) -> dict[str, Any]:
    """A slot's calls as the rows of tables are compared with."""
    return vars(p.slot) | {"n_bytes": p.n_bytes}


def _tried(trace: Trace, p: SlotProfile) -> Counter[str]:
    """Settings that a slot ran under tables, with their numbers of windows: those of the log, as everywhere.

    The steps do not tell them: in turns one window is many stretches of steps, and a table in force is no window.
    """
    by_generation = {}
    windows = []
    for line in trace.log:
        if line["kind"] == "window":
            windows.append(line.get("generation"))
        elif line["kind"] == "table" and (row := row_for(line["table"]["rules"], _call_of(p))):
            by_generation[line["table"]["generation"]] = str(row["decision"])
    return Counter(by_generation[generation] for generation in windows if generation in by_generation)


def _alone(summary: RunSummary, p: SlotProfile) -> list[dict[str, Any]]:
    """Comparisons of two tables that differ only in this slot."""
    found = []
    for comparison in summary.comparisons:
        table = _rows(summary, comparison["table"])
        against = _rows(summary, comparison["against"])
        both = table | against
        apart = [key for key in both if table.get(key) != against.get(key)]
        if len(apart) != 1:
            continue
        (key,) = apart
        if applies(both[key], _call_of(p)):
            decision = decided(table.get(key, {}))
            found.append({"decision": decision, **comparison})
    return found


def _rows(summary: RunSummary, table: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """The rows of one of the summary's tables, by what they apply to."""
    rows = summary.tables.get(table, ())
    return {_key(row): row for row in rows}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("func", "min_bytes", "max_bytes", "n_ranks", "n_nodes"))


def lines(chain: Mapping[str, Any], summary: RunSummary) -> list[str]:
    """Returns a chain as a few lines for people."""
    calls = f"{chain['calls']:.0f} call{'s' * (round(chain['calls']) != 1)}"
    share = f"{chain['share']:.1%} of the step"
    cheapest_first = sorted(chain["prices"].items(), key=lambda price: price[1])
    prices = ", ".join(f"{pair} {us:g} us" for pair, us in cheapest_first)
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
