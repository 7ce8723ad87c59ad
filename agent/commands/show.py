"""``dynamiccl show``: what happened in a recorded run, from its trace alone, finished or not."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import fail, refusing

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table as Grid

    from ...traces.files import Trace


#: Collectives that are read of a trace: the first and the last of a long run.
MOST_EVENTS = 500_000


def show(
    trace: Annotated[
        Path, typer.Argument(help="A trace folder, the folder of a run, or a recording as for `dynamiccl advise`.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    events: Annotated[int, typer.Option(help="Also list the first so many collectives.")] = 0,
    whole: Annotated[
        bool, typer.Option(help="Read every event of a long trace, not only its first and last half a million.")
    ] = False,
) -> None:
    """Show what a run did: its collectives, what was tried, what was decided and why, and whether ranks agreed."""
    from ...traces.files import Trace, TraceError
    from ...traces.importers import read_recording

    if events < 0:
        fail(f"--events is 0 or more, not {events}")
    with refusing(TraceError):
        if _is_recording(trace):
            read = read_recording([trace])
        else:
            read = Trace.read(trace, most_events=None if whole else MOST_EVENTS)
    story = tell(read, summary_of(read.folder), events)
    if json:
        typer.echo(json_module.dumps(story, indent=2, allow_nan=False))
    else:
        _print(story)


def _is_recording(path: Path) -> bool:
    """Another tool's file, or a folder of such."""
    names = {inside.name for inside in path.iterdir()} if path.is_dir() else set()
    return path.is_file() or (bool(names) and not names & {"header.json", "trace"})


def tell(trace: Trace, summary: dict[str, Any], n_events: int = 0) -> dict[str, Any]:
    """Everything that ``show`` prints, ready for JSON; unknown values are None."""
    from ...traces.audit import audit, regime
    from ...traces.costs import generations, slot_costs
    from ...traces.header import plain

    decisions = summary.get("decisions") or []
    which = generations(trace, decisions or None)
    costs = slot_costs(trace.events, which.default, which.tuned)
    check = audit(trace.events)
    story: dict[str, Any] = {
        "folder": str(trace.folder),
        "warnings": trace.warnings,
        "header": trace.header,
        "regime": regime(trace.events),
        "steps": _steps(trace.steps, summary),
        "n_events": len(trace.events),
        "records_lost": trace.header.get("records_lost", 0),
        "communicators": _communicators(trace),
        "slots": [_slot(c, which.rules) for c in costs.to_dict("records")],
        "windows": [_plain_window(line) for line in trace.log if line["kind"] == "window"],
        "tables": len(trace.tables) - 1,
        "decisions": decisions,
        "result": {k: summary.get(k) for k in ("speedup", "speedup_ci95", "aa_speedup_ci95", "kept", "ended")},
        "consistency": vars(check),
    }
    if n_events:
        rows = trace.events.head(n_events).astype(object).to_dict("records")
        story["events"] = [{**row, "comm_id": _hex(row["comm_id"])} for row in rows]
    told: dict[str, Any] = plain(story)
    return told


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary that the run left beside its trace, {} if it never got so far."""
    for path in (folder / "summary.json", folder.parent / "summary.json"):
        try:
            found = json_module.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _hex(comm_id: Any) -> str:
    """A communicator's id as NCCL's logs write it; as a number it has more digits than many JSON readers keep."""
    return f"{int(comm_id):#018x}"


def _slot(cost: dict[Any, Any], rules: frozenset[tuple[str, int, int, str]]) -> dict[str, Any]:
    """A slot's costs with what the table in question sets for its messages, None if it leaves them to NCCL."""
    fits = [d for func, low, high, d in rules if func == cost["func"] and low <= cost["n_bytes"] <= high]
    return {**cost, "table": fits[0] if fits else None}


def _plain_window(line: dict[str, Any]) -> dict[str, Any]:
    """A logged window without the log's own fields, its slot as text."""
    from ...traces.records import Slot

    slot = line.get("slot")
    text = str(Slot.from_log(slot)) if isinstance(slot, dict) else slot
    return {**{k: v for k, v in line.items() if k not in ("kind", "time")}, "slot": text}


def _steps(steps: pd.DataFrame, summary: dict[str, Any]) -> dict[str, Any]:
    """The optimizer steps; the loss is the summary's, from the job's own log."""
    if steps.empty:
        return {"n": 0}
    first = steps[steps["rank"] == steps["rank"].min()]
    used, total = int(steps["memory_used"].max()), int(steps["memory_total"].max())
    return {
        "n": len(first),
        "first": int(first["index"].min()),
        "last": int(first["index"].max()),
        "ranks": int(steps["rank"].nunique()),
        "median_ms": float(first["duration_ns"].median()) / 1e6,
        "loss_first": summary.get("loss_first"),
        "loss_last": summary.get("loss_last"),
        "memory": used / total if total else None,
        "sample_every": int(first["sample_every"].iloc[-1]),
        "sampled": int(first["sampled"].sum()),
    }


def _communicators(trace: Trace) -> list[dict[str, Any]]:
    """Communicators as announced; those only known from their collectives have no name and no size."""
    calls = trace.events.groupby("comm_id").size()

    def row(comm_id: Any, seen: pd.DataFrame, name: str | None, n_ranks: int | None, n_nodes: int | None) -> Any:
        found = {"comm_id": _hex(comm_id), "name": name, "n_ranks": n_ranks, "n_nodes": n_nodes}
        ranks = sorted(seen["rank"].unique().tolist())
        return {**found, "ranks_seen": ranks, "n_events": int(calls.get(comm_id, 0))}

    rows = []
    for comm_id, group in trace.comms.groupby("comm_id"):
        head = group.iloc[0]
        rows.append(row(comm_id, group, str(head["name"]), int(head["n_ranks"]), int(head["n_nodes"])))
    for comm_id in calls.index.difference(trace.comms["comm_id"].unique().tolist()):
        seen = trace.events[trace.events["comm_id"] == comm_id]
        sizes = (int(seen[name].max()) or None for name in ("n_ranks", "n_nodes"))
        rows.append(row(comm_id, seen, None, *sizes))
    return rows


# For people ----------------------------------------------------------------------------------------------------------


def _print(story: dict[str, Any]) -> None:
    from ..terminal import terminal, wide_terminal

    console = wide_terminal()
    for warning in story["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    _print_head(console, story)
    _print_communicators(console, story["communicators"])
    _print_slots(console, story)
    if story["windows"]:
        console.print("\n[bold]windows[/]")
        for line in story["windows"]:
            console.print(_window(line), markup=False, soft_wrap=True)
    _print_decisions(console, story)
    _print_consistency(console, story["consistency"])
    if "events" in story:
        grid = _grid("collectives", list(story["events"][0]) if story["events"] else ["none"])
        for event in story["events"]:
            grid.add_row(*(_text(v) for v in event.values()))
        terminal(highlight=False, width=max(console.width, 240)).print(grid)


def _print_head(console: Console, story: dict[str, Any]) -> None:
    h, steps = story["header"], story["steps"]
    console.print(f"[bold]{story['folder']}[/]", soft_wrap=True)
    if h.get("emulated"):
        console.print(
            f"emulated cluster {h.get('cluster')}, bytes x {h.get('bytes_scale') or 1:g}, "
            f"compute x {h.get('compute_scale') or 1:g}: these are not GPU times",
            style="yellow",
        )
    words: list[Any] = [h.get("date"), f"host {h['host']}" if h.get("host") else None]
    words += [f"{k} {v}" for k, v in (h.get("versions") or {}).items() if k in ("dynamiccl", "torch")]
    words += [f"NCCL {h['nccl']}" if h.get("nccl") else None, f"commit {h['commit'][:12]}" if h.get("commit") else None]
    console.print("  ".join(str(w) for w in words if w), markup=False, soft_wrap=True)
    if command := h.get("job") or h.get("command"):
        console.print(f"command  {command}", markup=False, soft_wrap=True)
    if not steps["n"]:
        console.print(f"no optimizer step was seen; {story['n_events']} collectives")
        return
    loss = ""
    if steps["loss_first"] is not None:
        loss = f", loss {steps['loss_first']:.3f} -> {steps['loss_last']:.3f}"
    console.print(
        f"{story['regime']}: steps {steps['first']} to {steps['last']}, {steps['median_ms']:.1f} ms in the median, "
        f"{steps['ranks']} ranks recorded, {story['n_events']} collectives, {story['tables']} tables published{loss}"
    )
    if steps["sample_every"]:
        console.print(f"kernel times of {steps['sampled']} steps, at the end one in {steps['sample_every']}")
    if story["records_lost"]:
        lost = f"{story['records_lost']} records were lost: the tuner did not read them in time"
        console.print(f"{lost}; counts below are too low", style="yellow")


def _grid(title: str, columns: list[str], numbers: tuple[str, ...] = ()) -> Grid:
    from rich.table import Table as Grid

    grid = Grid(title=title, title_justify="left", title_style="bold")
    for name in columns:
        grid.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return grid


def _print_communicators(console: Console, comms: list[dict[str, Any]]) -> None:
    if not comms:
        return
    grid = _grid("communicators", ["id", "name", "ranks", "nodes", "recorded", "collectives"], ("ranks", "nodes"))
    for c in comms:
        seen = ", ".join(map(str, c["ranks_seen"][:8])) + (" ..." if len(c["ranks_seen"]) > 8 else "")
        grid.add_row(c["comm_id"], _text(c["name"]), _text(c["n_ranks"]), _text(c["n_nodes"]), seen, str(c["n_events"]))
    console.print(grid)


def _print_slots(console: Console, story: dict[str, Any]) -> None:
    if not story["slots"]:
        return
    numbers = ("calls/step", "default", "tuned", "change", "sampled")
    grid = _grid(
        "slots",
        ["slot", "calls/step", "NCCL's own", "table", "default", "tuned", "change", "sampled", "timed by"],
        numbers,
    )
    most = max((s[k] or 0 for s in story["slots"] for k in ("default_us", "tuned_us")), default=0)
    for s in story["slots"]:
        before, after = s["default_us"], s["tuned_us"]
        change = f"{100 * (after / before - 1):+.0f} %" if before and after else ""
        n = f"{s['n_default']} / {s['n_tuned']}"
        times = (_time(before, most), _time(after, most), change, n)
        by = s["timed_by"] if s["n_default"] + s["n_tuned"] else ""
        grid.add_row(s["slot"], f"{s['calls']:.3g}", _text(s["own"]), _text(s["table"]), *times, by)
    console.print(grid)
    note = "default, tuned: median time of one call under NCCL's own choice and under the table; timed by: "
    note += "latest start to latest stop of all ranks, or a rank's own start to its own stop, waiting included"
    console.print(note, style="dim")


def _window(line: dict[str, Any]) -> str:
    """One logged window in one line; whatever is unknown is left out."""
    step, default = line.get("step_ms"), line.get("default_ms")
    parts = [f"window {line.get('index', '?')}", str(line.get("phase") or ""), str(line.get("regime") or "")]
    if step is not None:
        against = f", default {default:.1f} ms ({100 * (step / default - 1):+.1f} %)" if default else ""
        parts.append(f"step {step:.1f} ms{against}")
    if (slot := line.get("slot")) and line.get("phase") not in ("verify", "profile"):
        parts += [str(slot), f"{line.get('previous') or 'auto'} -> {line.get('decision') or 'auto'}"]
    return "  ".join(p for p in [*parts, line.get("verdict"), line.get("reason")] if p)


def _print_decisions(console: Console, story: dict[str, Any]) -> None:
    from ...traces.costs import decision_text, size_text

    result = story["result"]
    if story["decisions"]:
        grid = _grid("decisions", ["collective", "messages", "decision", "why"], ("messages",))
        for d in story["decisions"]:
            text = decision_text(d)
            sizes = size_text(d["min_bytes"], d["max_bytes"])
            grid.add_row(d["func"], sizes, "left to NCCL" if text == "auto" else text, _text(d.get("reason")))
        console.print(grid)
    else:
        is_known = result["ended"] or result["speedup"] is not None
        console.print(f"\nno decisions: {'NCCL decides everywhere' if is_known else 'the run goes on, or was cut off'}")
    if result["speedup"] is not None:
        spread = "".join(
            f"  {name} [{low:.3f}, {high:.3f}]"
            for name, (low, high) in (
                ("95 %", result["speedup_ci95"] or (None, None)),
                ("default against itself", result["aa_speedup_ci95"] or (None, None)),
            )
            if low is not None
        )
        stays = {True: ", the table stays in force", False: ", NCCL's own choice stays in force"}
        console.print(f"speed-up {result['speedup']:.3f}{spread}{stays.get(result['kept'], '')}", markup=False)
    elif result["ended"]:
        console.print(f"no result: {result['ended']}", markup=False)


def _print_consistency(console: Console, check: dict[str, Any]) -> None:
    calls, bad = check["calls_checked"], check["mismatches"]
    if not calls:
        console.print("consistency: no collective was seen by two ranks, nothing to compare")
        return
    console.print(
        f"consistency: {calls} collectives compared across ranks, {bad} mismatches", style="bold red" if bad else ""
    )
    for example in check["examples"]:
        views = "; ".join(f"rank {r}: {_view(v)}" for r, v in example["ranks"].items())
        console.print(f"  {example['func']} {example['seq']}: {views}", markup=False, soft_wrap=True)


def _view(v: dict[str, Any]) -> str:
    config = f"{v['algo']}/{v['proto']}/{v['n_channels']}"
    return f"{config}, {v['n_bytes']} bytes, table {v['table_generation']}, step {v['step']}"


def _time(us: float | None, most: float) -> str:
    """A time in the unit that suits the longest of its column."""
    return "" if us is None else f"{us / 1e3:.2f} ms" if most >= 2000 else f"{us:.1f} us"


def _text(value: Any) -> str:
    return "" if value is None else str(value)
