"""``dynamiccl advise``: from a recording of a job to the table to try first."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import Argument, Json, Option, refusing, results

if TYPE_CHECKING:
    from ..report.summary import RunSummary


def advise(
    recording: Annotated[
        list[Path],
        Argument(
            metavar="RECORDING...", help="A run's trace, profiles of PyTorch, one a rank, or their folder."
        ),
    ],
    cluster: Annotated[
        str | None, Option(help="Where it was recorded: a preset, as of `tune`, or a .toml file.")
    ] = None,
    nccl: Annotated[
        str | None, Option(help="NCCL's release, e.g. 2.28.9. Default: the recording's, else the cluster's.")
    ] = None,
    out: Annotated[Path | None, Option(help="Write the table, for `dynamiccl apply`.")] = None,
    ranks_per_node: Annotated[
        int | None, Option(help="Ranks on a node. Default: the recording's, else the cluster's.")
    ] = None,
    json: Json = False,
) -> None:
    """Is a recorded job worth a tuning run, and which table is to be tried first?

    Every gain is predicted, by what the search itself believes of a job before it has tried anything. Intervals hold
    the truth in about 8 cases of 10. Of a finished run of `dynamiccl tune` the measured verdict is told.

    Another tool's recording is one of PyTorch's profiler, with record_shapes=True and its step() after each step of the
    optimizer: one .json or .json.gz a rank.

    \b
    dynamiccl advise profiles/ --cluster dgx-h100-2x8 --out table.json
    dynamiccl advise rank0.json rank1.json --cluster mine.toml
    """
    from ...envs.nccl.tables import to_json
    from ...envs.replay.recordings import named
    from ...traces.files import TraceError
    from ...traces.records import Table
    from ..advice.advise import Advice, read
    from ..report.summary import RunSummary

    with refusing(TraceError, ValueError):
        trace = read([results(path) for path in recording], cluster, nccl, ranks_per_node)
        measured = RunSummary.read(trace.folder, trace.folder.parent)
        if measured.speedup is not None:
            _tell_measured(measured, json)
            return
        advice = Advice(trace, named(cluster, nccl, trace.header.get("nccl")) if cluster else None)
    told = advice.as_dict()
    if out is not None and advice.decisions:
        out.write_text(to_json(Table.of(1, advice.decisions)))
        told["table"] = str(out)
    if json:
        print(json_module.dumps(told, indent=1, allow_nan=False))
    else:
        _show(told)


def _tell_measured(summary: RunSummary, json: bool) -> None:
    from ..report.verdict import verdict

    keys = ("speedup", "speedup_ci95", "aa_speedup_ci95", "kept", "table")
    told: dict[str, Any] = {"predicted": False, **{key: getattr(summary, key) for key in keys}}
    kept = (
        f"apply its table: {told['table']}"
        if told["kept"] and told["table"]
        else "no table of it is in force"
    )
    told["verdict"] = f"measured by this run: {verdict(summary)}; {kept}"
    print(json_module.dumps(told, indent=1) if json else told["verdict"])


def _show(a: dict[str, Any]) -> None:
    from textwrap import fill

    from rich import box

    from ..advice.advise import text
    from ..report.terminal import grid, wide_terminal

    print(a["verdict"])
    kind = "emulated, not GPU times" if a["emulated"] else a["source"]
    print(f"{a['recording']} ({kind}) on {a['cluster']}, NCCL {a['nccl']}")
    print(
        f"step {a['step_ms']:.1f} ms, {a['communication']:.1%} of it in these collectives; {a['steps']} steps"
    )
    rows = []
    for s in (s for s in a["slots"] if s["share"] >= 0.005 or s["advice"] != "auto"):
        bare = "?" if s["exposed_share"] is None else f"{s['exposed_share']:.1%}"
        row = [
            s["slot"],
            f"{s['calls']:.0f}",
            f"{s['call_us'] / 1e3:.2f} ms",
            f"{s['share']:.1%}",
            bare,
            s["own"],
        ]
        advice = "as it is" if s["advice"] == "auto" else s["advice"]
        rows.append([*row, advice, "" if s["saves"] is None else text(s["saves"])])
    heads = ("recorded", "calls", "one call", "of the step", "exposed", "NCCL's choice", "try", "should save")
    numbers = ("calls", "one call", "of the step", "exposed", "should save")
    wide_terminal().print(grid(heads, rows, numbers, no_wrap=True, box=box.SIMPLE))
    if a["gain"]:
        print(f"predicted: this table saves {text(a['gain'])} of the step ({a['level']:.0%} interval)")
        print(f"  it makes steps over 1 % longer with a probability of {a['risk']:.0%}")
    for title, lines in (("not known, or assumed", a["unknown"]), ("what no table reaches", a["launch"])):
        lines = [fill(f"  - {line}", 100, subsequent_indent="    ") for line in lines]
        print("\n".join([f"\n{title}:", *lines] if lines else lines))
    if a.get("table"):
        print(f"\ntable: {a['table']}; dynamiccl apply {a['table']} -- COMMAND")
