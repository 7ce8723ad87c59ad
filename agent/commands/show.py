"""``dynamiccl show``: what happened in a recorded run, from its trace alone, finished or not."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import Argument, Json, Option, fail, refusing

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from ...traces.files import Trace
    from ..report.summary import RunSummary


#: Collectives that are read of a trace: the first and the last of a long run.
MOST_EVENTS = 500_000


def show(
    trace: Annotated[
        Path, Argument(help="A trace folder, the folder of a run, or a recording as for `dynamiccl advise`.")
    ],
    json: Json = False,
    events: Annotated[int, Option(help="Also list the first so many collectives.")] = 0,
    whole: Annotated[
        bool, Option(help="Read every event of a long trace, not only its first and last half a million.")
    ] = False,
) -> None:
    """Show what a run did: its collectives, what was tried, what was decided and why, and whether ranks agreed."""
    from ...traces.files import Trace, TraceError
    from ...traces.importers.recording import read_recording
    from ..report.summary import RunSummary

    if events < 0:
        fail(f"--events is 0 or more, not {events}")
    with refusing(TraceError):
        if _is_recording(trace):
            read = read_recording([trace])
        else:
            read = Trace.read(trace, most_events=None if whole else MOST_EVENTS)
    summary = RunSummary.read(read.folder, read.folder.parent)
    story = tell(read, summary, events)
    if json:
        print(json_module.dumps(story, indent=2, allow_nan=False))
    else:
        _print(story, summary)


def _is_recording(path: Path) -> bool:
    """Another tool's file, or a folder of such."""
    names = {inside.name for inside in path.iterdir()} if path.is_dir() else set()
    return path.is_file() or (bool(names) and not names & {"header.json", "trace"})


def tell(trace: Trace, summary: RunSummary | None = None, n_events: int = 0) -> dict[str, Any]:
    """Everything that ``show`` prints, ready for JSON; unknown values are None."""
    from ...traces.header import plain
    from ...traces.queries.audit import audit
    from ...traces.queries.costs import generations, slot_costs
    from ...traces.queries.slots import regime
    from ..report.summary import RunSummary

    summary = summary or RunSummary()
    which = generations(trace, summary.decisions or None)
    costs = slot_costs(trace.events, which.default, which.tuned)
    story: dict[str, Any] = {
        "folder": str(trace.folder),
        "warnings": trace.warnings,
        "header": trace.header,
        "regime": regime(trace.events),
        "steps": _steps(trace.steps),
        "n_events": len(trace.events),
        "records_lost": trace.header.get("records_lost", 0),
        "communicators": _communicators(trace),
        "slots": [_slot(c, which.rules) for c in costs.to_dict("records")],
        "windows": [{k: v for k, v in line.items() if k != "kind"} for line in trace.log if line["kind"] == "window"],
        "tables": len(trace.tables) - 1,
        "summary": vars(summary),
        "consistency": vars(audit(trace.events)),
    }
    if n_events:
        rows = trace.events.head(n_events).astype(object).to_dict("records")
        story["events"] = [{**row, "comm_id": _hex(row["comm_id"])} for row in rows]
    told: dict[str, Any] = plain(story)
    return told


def _hex(comm_id: Any) -> str:
    """A communicator's id as NCCL's logs write it; as a number it has more digits than many JSON readers keep."""
    return f"{int(comm_id):#018x}"


def _slot(cost: dict[Any, Any], rules: frozenset[tuple[str, int, int, str]]) -> dict[str, Any]:
    """A slot's costs with what the table in question sets for its messages, None if it leaves them to NCCL."""
    fits = [d for func, low, high, d in rules if func == cost["func"] and low <= cost["n_bytes"] <= high]
    return {**cost, "table": fits[0] if fits else None}


def _steps(steps: pd.DataFrame) -> dict[str, Any]:
    """The optimizer steps."""
    if steps.empty:
        return {"n": 0}
    first = steps[steps["rank"] == steps["rank"].min()]
    return {
        "n": len(first),
        "first": int(first["index"].min()),
        "last": int(first["index"].max()),
        "ranks": int(steps["rank"].nunique()),
        "median_ms": float(first["duration_ns"].median()) / 1e6,
    }


def _communicators(trace: Trace) -> list[dict[str, Any]]:
    """Communicators as announced; those only known from their collectives have no name."""
    calls = trace.events.groupby("comm_id").size()
    announced = sorted(trace.comms["comm_id"].unique().tolist())
    rows = []
    for comm_id in dict.fromkeys([*announced, *calls.index]):
        table = trace.comms if comm_id in announced else trace.events
        seen = table[table["comm_id"] == comm_id]
        row = {
            "comm_id": _hex(comm_id),
            "name": str(seen["name"].iloc[0]) if comm_id in announced else None,
            "n_ranks": int(seen["n_ranks"].max()) or None,
            "n_nodes": int(seen["n_nodes"].max()) or None,
            "ranks_seen": sorted(seen["rank"].unique().tolist()),
            "n_events": int(calls.get(comm_id, 0)),
        }
        rows.append(row)
    return rows


# For people ----------------------------------------------------------------------------------------------------------


def _print(story: dict[str, Any], summary: RunSummary) -> None:
    from ..report.terminal import grid, terminal, wide_terminal
    from ..report.texts import COSTS, COSTS_NOTE, NUMBERS, cost_rows, nothing_decided, result_lines, window_parts

    console = wide_terminal()
    for warning in story["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    _print_head(console, story)
    if story["slots"]:
        console.print(grid(COSTS, cost_rows(story["slots"]), NUMBERS, title="slots"))
        console.print(COSTS_NOTE, style="dim")
    if story["windows"]:
        console.print("\n[bold]windows[/]")
        for line in story["windows"]:
            console.print("  ".join(window_parts(line)), markup=False, soft_wrap=True)
    if not summary.decisions:
        console.print(f"\nno decisions: {nothing_decided(summary, story['header'])}", markup=False)
    if summary:
        console.print("\n".join(["", *result_lines(summary)]), markup=False, soft_wrap=True)
    _print_consistency(console, story["consistency"])
    if (events := story.get("events")) is not None:
        listed = grid(events[0] if events else ["none"], (event.values() for event in events), title="collectives")
        terminal(highlight=False, width=max(console.width, 240)).print(listed)


def _print_head(console: Console, story: dict[str, Any]) -> None:
    from ..report.texts import emulation_text

    h, steps = story["header"], story["steps"]
    console.print(f"[bold]{story['folder']}[/]", soft_wrap=True)
    if h.get("emulated"):
        console.print(f"{emulation_text(h)}: these are not GPU times", style="yellow")
    facts = [h.get("date"), h.get("host"), h.get("nccl") and f"NCCL {h['nccl']}", h.get("job") or h.get("command")]
    console.print("  ".join(str(fact) for fact in facts if fact), markup=False, soft_wrap=True)
    if not steps["n"]:
        console.print(f"no optimizer step was seen; {story['n_events']} collectives")
        return
    console.print(
        f"{story['regime']}: steps {steps['first']} to {steps['last']}, {steps['median_ms']:.1f} ms in the median, "
        f"{steps['ranks']} ranks recorded, {story['n_events']} collectives, {story['tables']} tables published"
    )
    if story["records_lost"]:
        lost = f"{story['records_lost']} records were lost: the tuner did not read them in time"
        console.print(f"{lost}; counts below are too low", style="yellow")


def _print_consistency(console: Console, check: dict[str, Any]) -> None:
    from ..report.texts import consistency_text

    console.print(consistency_text(check), style="bold red" if check["mismatches"] else "")
    for example in check["examples"]:
        views = (
            f"rank {r}: {v['algo']}/{v['proto']}/{v['n_channels']}, {v['n_bytes']} bytes, "
            f"table {v['table_generation']}, step {v['step']}"
            for r, v in example["ranks"].items()
        )
        console.print(f"  {example['func']} {example['seq']}: {'; '.join(views)}", markup=False, soft_wrap=True)
