"""``dynamiccl advise``: from a recording of a job to the table to try first."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import ClusterName, Format, Nccl, RanksPerNode, Recording, refusing

if TYPE_CHECKING:
    from rich.console import Console


def advise(
    recording: Recording,
    cluster: ClusterName = None,
    nccl: Nccl = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the table, for `dynamiccl apply`.", show_default=False)
    ] = None,
    format_: Format = None,
    ranks_per_node: RanksPerNode = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """What communication costs a recorded job, which table to try first, and what no table can change.

    Every gain is predicted, by what the search itself believes of a job before it has tried anything; nothing was
    measured but what the recording says. Intervals hold the truth in about 8 cases of 10. To follow the advice, measure
    the table: `dynamiccl tune --recording` starts from the same belief, and keeps only what is faster.

    \b
    dynamiccl advise profiles/ --cluster dgx-h100-2x8 --out table.json
    dynamiccl advise trace.sqlite --cluster nccl_debug.log
    dynamiccl advise runs/tune/latest/trace
    """
    from ...envs.nccl.tables import to_json
    from ...envs.recordings import named
    from ...traces.files import TraceError
    from ..advise import Advice
    from ..recordings import read

    with refusing(TraceError, ValueError):
        trace = read(recording, cluster, nccl, format_, ranks_per_node)
        place = named(cluster, nccl, trace.header.get("nccl")) if cluster else None
        advice = Advice(trace, place)
    told = advice.as_dict()
    if out is not None:
        out.write_text(to_json(advice.table))
        told["table"] = str(out)
    if json:
        typer.echo(json_module.dumps(told, indent=1, allow_nan=False))
        return
    from ..terminal import wide_terminal

    console = wide_terminal()
    _show(console, told)


def _show(console: Console, a: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    kind = "emulated, not GPU times" if a["emulated"] else a["source"]
    say(f"{a['recording']} ({kind}) on {a['cluster']}, NCCL {a['nccl']}")
    say(f"step {a['step_ms']:.1f} ms, {a['steps']} steps, {a['communication']:.1%} of it in these collectives")
    grid = Table(box=box.SIMPLE)
    for head in ("recorded", "calls", "one call", "of the step", "exposed", "NCCL's choice", "try", "should save"):
        grid.add_column(head, justify="left" if head in ("recorded", "NCCL's choice", "try") else "right", no_wrap=True)
    for s in a["slots"]:
        if s["share"] < 0.005 and s["saves"] is None:
            continue
        bare = "?" if s["exposed_share"] is None else f"{s['exposed_share']:.1%}"
        saves = "" if s["saves"] is None else _interval(s["saves"])
        row = (s["slot"], f"{s['calls']:.0f}", f"{s['call_us'] / 1e3:.2f} ms", f"{s['share']:.1%}", bare)
        grid.add_row(*row, s["own"], "as it is" if s["advice"] == "auto" else s["advice"], saves)
    console.print(grid)
    for o in a["overlap"]:
        times = f"{1 + o['slowdown']:.2f} [{1 + o['low']:.2f}, {1 + o['high']:.2f}]"
        text = f"compute beside {o['slot']} on {o['ran']} takes {times} times as long"
        text += f" ({o['kernels']} kernels of {o['kinds']} kinds): {o['lost']:.1%} of the step"
        if o["fewer"]:
            text += f"; {o['fewer']['channels']} channels would give back {o['fewer']['gives_back']:.1%} (predicted)"
        say(text)
    if a["gain"]:
        say(f"predicted: this table saves {_interval(a['gain'])} of the step (80 % interval)")
        unseen = "it may be applied unseen" if a["unseen"] else "measure it first: dynamiccl tune --recording"
        say(f"  it makes steps over 1 % longer with a probability of {a['risk']:.0%}: {unseen}")
    else:
        say("predicted: no setting gains anything worth a table, so none is advised")
    say(f"the best table, were it known, would save {_interval(a['possible'])} of the step (predicted, 80 % interval)")
    if a["seen_with_600_steps"]:
        say(f"600 steps of tuning would see a gain of {a['seen_with_600_steps']:.2%}, as this job's steps scatter")
    for k in a["knobs"]:
        say(f"\nno table says: {k['knob']}\n  because  {k['because']}")
        say(f"  public   {k['evidence']}\n  set      {k['set']}")
    say("\nnot known:")
    for text in a["unknown"]:
        say(f"  - {text}")
    if a.get("table"):
        say(f"\ntable: {a['table']}" + (f"; dynamiccl apply {a['table']} -- COMMAND" if a["unseen"] else ""))


def _interval(gain: dict[str, float]) -> str:
    return f"{gain['median']:.1%} [{gain['low']:.1%}, {gain['high']:.1%}]"
