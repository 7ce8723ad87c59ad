"""``dynamiccl show``: show a recorded run, finished or not, from its trace alone."""

from __future__ import annotations

import contextlib
import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import JSON, PATH, argument, command, fail, option, refusing, results, sample

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ...traces.files import Trace
    from ...traces.queries.costs import RuleKey
    from ..report.summary import RunSummary


#: How many collectives are read from a trace: the first and the last ones of a long run.
MOST_EVENTS = 500_000


@command
@argument(
    "trace",
    type=PATH,
    required=False,
    help="Folder of a run, its trace, or a file or folder of another tool.",
)
@option(
    "--sample", "sample_run", is_flag=True, help="Show a recorded run that comes with this package. Emulated."
)
@option(
    "--windows",
    is_flag=True,
    help="Also list all windows. A window is a few steps under one table, or under two that alternate.",
)
@JSON
@option("--whole", is_flag=True, help="Read all events of a long run, not only its first and last ones.")
def show(trace: Path | None, sample_run: bool, windows: bool, json: bool, whole: bool) -> None:
    """Show the result of a run and its reasons.

    It shows the verdict, the time of each collective, NCCL's estimates, the settings that were tried, and the decision
    for each slot (one kind and size of collective). Files of other tools have times only. Of several nodes' results
    give rank 0's.

    \b
    dynamiccl show runs/tune/latest
    dynamiccl show --sample
    """
    from ...traces.files import Trace, TraceError
    from ...traces.importers.recording import is_recording, read_recording
    from ..report.summary import RunSummary

    if (trace is None) != sample_run:
        fail("give either TRACE, the folder of a run, or --sample")
    with refusing(TraceError, OSError):
        where = results(trace) if trace else sample("run")
        if is_recording(where):
            read = read_recording([where])
        else:
            read = Trace.read(where, most_events=None if whole else MOST_EVENTS)
    summary = RunSummary.of_trace(read)
    story = tell(read, summary)
    if json:
        print(json_module.dumps(story, indent=2, allow_nan=False))
    else:
        _print(story, summary, windows)


def tell(trace: Trace, summary: RunSummary) -> dict[str, Any]:
    """Returns all that ``show`` prints, ready for JSON. Unknown values are None."""
    from ...traces.files import TraceError
    from ...traces.header import plain
    from ...traces.queries.costs import generations, slot_costs
    from ...traces.queries.lives import last_life
    from ...traces.queries.stage import looks_like
    from ...traces.queries.steps import told_steps
    from ..report.summary import EVENT
    from ..report.why import chains

    life = last_life(trace)
    which = generations(trace, summary.decisions or None)
    costs = slot_costs(trace.events, which.default, which.tuned, told_steps(trace))
    story: dict[str, Any] = {
        "folder": str(trace.folder),
        "warnings": life.warnings,
        "header": trace.header,
        "steps": _steps(life.steps),
        "stage": looks_like(life.events)._asdict(),
        "n_events": len(trace.events),
        "records_lost": trace.header.get("records_lost", 0),
        "slots": [_slot(c, which.rules) for c in costs.to_dict("records")],
        "windows": _of_kind(trace, "window"),
        "events": _of_kind(trace, EVENT),
        "tables": len(trace.tables) - 1,
        "summary": vars(summary),
        "consistency": summary.consistency,
        "why": [],
    }
    with contextlib.suppress(TraceError):  # no steps, or nothing of what NCCL offered
        story["why"] = chains(trace, summary)
    told: dict[str, Any] = plain(story)
    return told


def _of_kind(trace: Trace, kind: str) -> list[dict[str, Any]]:
    """The lines of a trace's log of this kind, without its name."""
    return [{k: v for k, v in line.items() if k != "kind"} for line in trace.log if line["kind"] == kind]


def _slot(cost: dict[Any, Any], rules: frozenset[RuleKey]) -> dict[str, Any]:
    """Returns a slot's costs and its setting in the table; None if the table leaves it to NCCL."""
    fits = [rule.decision for rule in rules if rule.fits(cost)]
    return {**cost, "table": fits[0] if fits else None}


def _steps(steps: pd.DataFrame) -> dict[str, Any]:
    """Returns number, range and median time of the optimizer steps, of one rank."""
    from ...traces.queries.steps import of_one_rank

    if steps.empty:
        return {"n": 0}
    mine = of_one_rank(steps)
    return {
        "n": len(mine),
        "first": int(mine["index"].min()),
        "last": int(mine["index"].max()),
        "ranks": int(steps["rank"].nunique()),
        "median_ms": float(mine["duration_ns"].median()) / 1e6,
        "memory_pressure": _pressure(steps),
    }


def _pressure(steps: pd.DataFrame) -> dict[str, float] | None:
    """Returns the least and the most used part of the memory of the fullest GPU; None if the job does not tell."""
    known = steps[steps["memory_total"] > 0]
    if known.empty:
        return None
    used = known["memory_used"] / known["memory_total"]
    of_fullest = used.groupby(known["index"]).max()
    return {"least": float(of_fullest.min()), "most": float(of_fullest.max())}


# For people ----------------------------------------------------------------------------------------------------------


def _print(story: dict[str, Any], summary: RunSummary, windows: bool) -> None:
    from ...traces.queries.exposed import critical
    from ..report.runs import beside_rank_0
    from ..report.terminal import say, wide_terminal
    from ..report.texts import consistency_text, nothing_decided, result_lines
    from ..report.why import lines

    console = wide_terminal()
    for warning in story["warnings"]:
        say(console, f"warning: {warning}", "yellow")
    _print_head(console, story)
    if summary:
        say(console, "\n".join(["", *result_lines(summary), ""]))
    else:
        say(console, f"no decisions: {nothing_decided(summary, story['header'])}")
    if results_there := beside_rank_0(Path(story["folder"]).parent):
        say(console, f"rank 0 of this job was on another node: its results are in {results_there}")
    if story["slots"]:
        _print_costs(console, story["slots"])
    if not summary.exposed:  # a run has named them with its results
        say(console, "\n".join(map(str, critical(story["why"]))))
    for chain in story["why"]:
        say(console, "\n".join(lines(chain, summary)))
    if windows:
        _print_course(console, story)
    if summary.consistency:
        bad = summary.consistency["mismatches"]
        say(console, consistency_text(summary.consistency), "bold red" if bad else "")


def _print_course(console: Console, story: dict[str, Any]) -> None:
    """All windows, and what happened between them."""
    from ...traces.reasons import revived
    from ..report.terminal import say
    from ..report.texts import window_parts

    course = [*story["windows"], *story["events"]]
    for line in sorted(course, key=lambda line: float(line.get("time") or 0)):
        parts = [f"step {line['step']}", str(revived(line["what"]))] if "what" in line else window_parts(line)
        say(console, "  ".join(parts))


def _print_costs(console: Console, slots: list[dict[str, Any]]) -> None:
    """The table of collectives, on a narrow terminal without the columns that it has no room for."""
    from ..report.terminal import fitting, grid, say
    from ..report.texts import COSTS, COSTS_NOTE, NARROW, NUMBERS, cost_rows

    heads, rows = fitting(console, COSTS, NARROW, cost_rows(slots))
    console.print(grid(heads, rows, NUMBERS, title="time of each collective"))
    say(console, COSTS_NOTE, "dim")


def _print_head(console: Console, story: dict[str, Any]) -> None:
    from ...traces.queries.stage import Stage
    from ..report.terminal import say
    from ..report.texts import emulation_text, policy_text

    h, steps = story["header"], story["steps"]
    console.print(f"[bold]{story['folder']}[/]", soft_wrap=True)
    if h.get("emulated"):
        say(console, emulation_text(h), "yellow")
    facts = [h.get("date"), h.get("host"), h.get("nccl") and f"NCCL {h['nccl']}"]
    facts.append(h.get("job") or h.get("command"))
    say(console, "  ".join(str(fact) for fact in facts if fact))
    if h.get("policy"):
        say(console, f"policy: {policy_text(h['policy'])}")
    if not steps["n"]:
        whole = "; calls are counted over the whole recording" if "source" in h else ""
        say(console, f"no optimizer step was seen; {story['n_events']} collectives{whole}")
        return
    seen = f"steps {steps['first']} to {steps['last']}, {steps['median_ms']:.1f} ms (median), "
    seen += f"{steps['ranks']} ranks recorded, {story['n_events']} collectives, tables: {story['tables']}"
    say(console, seen)
    say(console, str(Stage(**story["stage"])))
    if steps["memory_pressure"]:
        least, most = steps["memory_pressure"].values()
        say(console, f"memory pressure: {least:.0%} to {most:.0%} of the fullest GPU's memory is used")
    if story["records_lost"]:
        lost = f"{story['records_lost']} records were lost because the tuner did not read them in time"
        say(console, f"{lost}; counts below are too low", "yellow")
