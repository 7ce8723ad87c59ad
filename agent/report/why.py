"""Why each row of a run's table is what it is: from what the trace measured, not from what was said at the time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...envs.nccl_model.arms import masked
from ...envs.replay.decisions import load
from ...traces.files import Trace
from ...traces.queries.costs import decision_text
from ...traces.records import PAIRS, Slot, decision_from
from ...traces.spaces import decision_of
from .summary import RunSummary

#: Two configs this many standard errors apart can be told apart.
_APART = 2.0


def chains(trace: Trace, summary: RunSummary, wanted: str = "") -> list[dict[str, Any]]:
    """One chain a slot whose text contains ``wanted``, the dearest first; savings are parts of the step.

    What NCCL chose and its prices; every config that was tried, with the windows it was measured in, what it saved and
    the standard error; what was decided, whether it is in force, how sure that it is faster, and the next best. Raises
    TraceError for a trace without steps or slots.
    """
    recorded = load(trace, min_share=0.0)
    found = []
    for i, p in enumerate(recorded.profiles):
        if wanted not in str(p.slot):
            continue
        offered = zip(PAIRS, p.fingerprint.cost_us[0], strict=True)
        prices = {"/".join(pair): round(float(us), 1) for pair, us in offered if us >= 0}
        own = p.own
        noise = float(recorded.noise[i])
        tried: list[dict[str, Any]] = []
        for config, savings in recorded.windows[i].items():
            values = np.array(savings) * recorded.share[i]
            spread = max(float(np.std(values, ddof=1)) if len(values) > 2 else 0.0, noise * math.sqrt(2))
            error = spread / math.sqrt(len(values))
            told = {"decision": str(decision_of(config)), "windows": len(values), "saved": float(values.mean())}
            tried.append({**told, "error": error})
        tried.sort(key=lambda t: -float(t["saved"]))
        decided, reason = _decided(summary, p.slot, p.n_bytes)
        if decided is None:
            nothing = "the run left no word of it" if summary else "the run goes on, or was cut off"
            reason = summary.ended or nothing
        mine = next((t for t in tried if _same(str(t["decision"]), decided)), None)
        other = next((t for t in tried if t is not mine), None)
        row: dict[str, Any] = {"slot": str(p.slot), "n_ranks": p.slot.n_ranks, "n_nodes": p.slot.n_nodes}
        row |= {"n_bytes": p.n_bytes, "calls": p.calls, "share": float(p.share), "own": own, "prices": prices}
        row |= {"tried": tried, "decided": decided, "reason": reason, "next": other}
        row["masked"] = {
            why.title: int(configs.sum()) for why, configs in masked(p.fingerprint).items() if configs.any()
        }
        row["refused"] = [r for r in summary.refused if r["slot"] == str(p.slot)]
        row["in_force"] = None if decided is None else bool(summary.kept) and decided != "auto"
        row["sure"] = None if mine is None else 0.5 * math.erfc(-mine["saved"] / mine["error"] / math.sqrt(2))
        row["apart"] = None
        if mine is not None and other is not None:
            row["apart"] = mine["saved"] - other["saved"] > _APART * math.hypot(mine["error"], other["error"])
        found.append(row)
    return found


def _decided(summary: RunSummary, slot: Slot, n_bytes: int) -> tuple[str | None, str | None]:
    """What the run's summary says of a slot: (decision as text, reason); None where it says nothing."""
    for d in summary.decisions:
        here = d.get("func") == slot.func and int(d["min_bytes"]) <= n_bytes <= int(d["max_bytes"])
        if here and int(d.get("n_ranks") or slot.n_ranks) == slot.n_ranks:
            return decision_text(d), d.get("reason")
    return None, None


def _same(a: str, b: str | None) -> bool:
    return b is not None and decision_from(a) == decision_from(b)


def lines(chain: Mapping[str, Any]) -> list[str]:
    """A chain in a few lines for people."""
    said = [
        f"{chain['slot']} on {chain['n_ranks']} ranks: {chain['calls']:.0f} calls, {chain['share']:.1%} of the step"
    ]
    prices = ", ".join(f"{pair} {us:g} us" for pair, us in sorted(chain["prices"].items(), key=lambda x: x[1]))
    said.append(f"  NCCL    {chain['own']}, as its prices say: {prices}")
    for t in chain["tried"][:5]:
        n = f"{t['windows']} window{'s' if t['windows'] > 1 else ''}"
        said.append(f"  tried   {t['decision']}: saved {t['saved']:.1%} +- {1.96 * t['error']:.1%} of the step in {n}")
    if len(chain["tried"]) > 5:
        said.append(f"          and {len(chain['tried']) - 5} more that saved less")
    if not chain["tried"]:
        said.append("  tried   nothing else")
    said += [f"  refused {row['why']}" for row in chain["refused"]]
    if chain["masked"]:
        said.append("  masked  " + ", ".join(f"{n} configs {name}" for name, n in chain["masked"].items()))
    if chain["decided"] is None:
        said.append(f"  decided nothing: {chain['reason']}")
    else:
        state = "in force" if chain["in_force"] else "NCCL decides" if chain["decided"] == "auto" else "not in force"
        said.append(f"  decided {chain['decided']} ({state}){': ' + chain['reason'] if chain['reason'] else ''}")
    if chain["sure"] is not None:
        said.append(f"  sure    {chain['sure']:.0%} that it is faster than NCCL's own choice")
    if chain["apart"] is not None:
        next_ = chain["next"]
        verb = "measurably better than" if chain["apart"] else "not to be told apart from"
        said.append(f"  not     {next_['decision']}, the next best ({next_['saved']:.1%}): it is {verb} that")
    return said
