"""``dynamiccl advise``: which table to try first for a recorded job, or what changed between two recordings."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ALL_REDUCE, JSON, PATH, argument, command, fail, option, refusing, results, sample

if TYPE_CHECKING:
    from ..advice.outlook import Outlook
    from ..report.summary import RunSummary


@command
@argument(
    "recording",
    type=PATH,
    nargs=-1,
    metavar="RECORDING...",
    help="Folder of a run, or files of another tool (one per rank), or their folder. Two folders are compared.",
)
@option("--sample", "sample_profile", is_flag=True, help="Read a profile that comes with this package.")
@option("--cluster", help="Cluster of the recording: a preset such as dgx-h100-2x8, or a .toml file.")
@option(
    "--nccl", help="NCCL release of --cluster, e.g. 2.28.9. Default: from the recording, else the cluster."
)
@option(
    "--out",
    type=PATH,
    help="Write the table to this file, for `dynamiccl apply`. A line says if there is none to write.",
)
@option(
    "--ranks-per-node",
    type=int,
    help="Ranks per node, where the recording does not say it. Default: the cluster's.",
)
@ALL_REDUCE
@JSON
def advise(
    recording: Sequence[Path],
    sample_profile: bool,
    cluster: str | None,
    nccl: str | None,
    out: Path | None,
    ranks_per_node: int | None,
    all_reduce: str | None,
    json: bool,
) -> None:
    """Predict whether a recorded job is worth a tuning run, and which table to try first.

    One profile of PyTorch is enough, with at least 30 steps. Two folders: do collectives explain a regression?
    Predicted gains have not been checked on GPUs. docs/start.md explains the answers.

    \b
    dynamiccl advise --sample
    dynamiccl advise profiles/ --cluster dgx-h100-2x8 --out table.json
    dynamiccl advise last-week/ today/
    """
    from ...traces.files import TraceError
    from ...traces.importers.recording import read_recording

    if bool(recording) == sample_profile:
        fail("give either RECORDING, or --sample")
    with refusing(TraceError, ValueError, OSError):
        if nccl and not cluster:
            raise ValueError("--nccl is the release of a --cluster: give that too, or leave --nccl out")
        recording = [results(path) for path in recording or [sample("profile")]]
        if len(recording) == 2 and all(path.is_dir() for path in recording):
            from ..advice.compare import compare
            from ..advice.texts import show_comparison

            if cluster or nccl:
                raise ValueError(
                    "--cluster and --nccl are for one recording: two folders are compared as they were recorded"
                )
            before, after = (read_recording([path], ranks_per_node) for path in recording)
            _tell(compare(before, after), json, show_comparison)
            _no_table(out, "two recordings are compared")
            return
        _advise_on_one(recording, (cluster, nccl, ranks_per_node, all_reduce), out, json)


def _advise_on_one(
    recording: list[Path],
    read_as: tuple[str | None, str | None, int | None, str | None],
    out: Path | None,
    json: bool,
) -> None:
    """Print advice on one recording. ``read_as``: cluster, NCCL's release, ranks a node, the option for all_reduce.
    Raises TraceError or ValueError."""
    from ...envs.nccl.tables import to_json
    from ...envs.replay.recordings import named
    from ...traces.records import Table
    from ..advice.advise import Advice, read
    from ..advice.inventory import inventory
    from ..advice.outlook import of_advice, of_run, without_steps
    from ..advice.texts import show_advice, show_inventory
    from ..report.summary import RunSummary

    cluster, nccl, *_ = read_as
    trace = read(recording, *read_as)
    measured = RunSummary.of_trace(trace)
    if measured.speedup is not None:
        _tell_measured(measured, of_run(measured), json)
        _no_table(out, "the run has measured tables itself")
        return
    if trace.steps.empty and "source" in trace.header:
        _tell(inventory(trace), json, show_inventory, without_steps(trace.events["func"], trace.all_reduce))
        _no_table(out, "the recording has no steps")
        return
    place = named(cluster, nccl, trace.header.get("nccl")) if cluster else None
    advice = Advice(trace, place)
    told = advice.as_dict()
    failed = None
    if out is not None and advice.decisions:
        try:
            out.write_text(to_json(Table.of(1, advice.decisions)))
            told["table"] = str(out)
        except OSError as error:  # the advice is told all the same
            failed = error
    _tell(told, json, show_advice, of_advice(told))
    if failed:
        raise failed
    if not advice.decisions:
        few = f"{advice.n_steps} steps are too few to say what to try"
        _no_table(out, "nothing to try" if advice.is_long else few)


def _no_table(out: Path | None, why: str) -> None:
    """Say that the file of ``--out`` was not written. Where there is one already the command fails: `apply` would take
    its table for this job's."""
    if out is None:
        return
    before = "; the file that is there is not of this recording" if out.exists() else ""
    print(f"no table written to {out}: {why}{before}", file=sys.stderr)
    if before:
        raise SystemExit(1)


def _tell(
    told: dict[str, Any], json: bool, show: Callable[[dict[str, Any]], None], outlook: Outlook | None = None
) -> None:
    """Print it all. Of one recording the last line says whether there is anything to win."""
    if json:
        ends = {} if outlook is None else {"outlook": outlook._asdict()}
        print(json_module.dumps({**told, **ends}, indent=1, allow_nan=False))
        return
    show(told)
    if outlook is not None:
        print(f"\n{outlook}")


def _tell_measured(summary: RunSummary, outlook: Outlook, json: bool) -> None:
    from ..report.verdict import verdict

    keys = ("speedup", "speedup_ci95", "aa_speedup_ci95", "kept", "table")
    told: dict[str, Any] = {"predicted": False, **{key: getattr(summary, key) for key in keys}}
    kept = f"apply its table: {told['table']}" if told["kept"] and told["table"] else "no table was kept"
    told["verdict"] = f"measured by this run: {verdict(summary)}; {kept}"
    _tell(told, json, lambda told: print(told["verdict"]), outlook)
