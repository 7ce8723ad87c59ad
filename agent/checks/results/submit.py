"""Builds the folder that ``lab submit`` prints: measured times, without anything that names a machine or its people.

Only what is listed here goes into it: a field that is added to run.json or to a trace later stays out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ....envs.nccl.plugin.build import build_of
from ....traces.files import Trace, row_for
from ....traces.queries.consistency import numbered
from ....traces.queries.slots import with_sizes
from ....traces.records import decision_from, size_class
from .files import COLUMNS, Results

#: Version of what is submitted; header.json names it.
SCHEMA = 1
#: Bytes of the whole folder, at most.
MOST_BYTES = 1_000_000
HEADER, SWEEP, STEPS = "header.json", "sweep.csv", "steps.csv"
#: Columns of steps.csv: default steps, each relative to the median of its series.
STEP_COLUMNS = ("series", "at", "relative")
#: Steps of one series that are submitted, at most.
MOST_STEPS = 2000
#: Fields of header.json -> what its value must look like: nothing that could name somebody fits.
FIELDS = {
    "schema": r"\d+",
    "source": r"gpu-check|tune",
    "commit": r"[0-9a-f]{0,40}\+?",
    "plugin": r"[0-9a-f]{0,16}",
    "gpu": r"(NVIDIA [A-Za-z0-9 -]{1,40})|emulated|unknown",
    "gpus_per_node": r"\d{1,3}",
    "nodes": r"\d{1,5}",
    "ranks": r"\d{1,6}",
    "placement": r"apart|hosts|shared|unknown",
    "network": r"infiniband|roce|ethernet|unknown",
    "emulated": r"[a-z0-9-]{0,40}",
    "week": r"\d{4}-W\d\d",
}
VERSIONS = ("dynamiccl", "torch", "nccl", "driver", "cuda")
VERSION = r"\d+(\.\d+)*([+.]?(cpu|cu\d+|rocm[\d.]+))?"
#: Settings that are submitted: NCCL's own, whose values are numbers or names of algorithms.
SETTINGS = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS"),
    *("NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_NVLS_ENABLE", "NCCL_PAT_ENABLE"),
    *("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_MULTI_RANK_GPU_ENABLE"),
    *("NCCL_MNNVL_ENABLE", "NCCL_CROSS_NIC", "NCCL_CTA_POLICY", "NCCL_RUNTIME_CONNECT"),
)
SETTING = r"[A-Za-z0-9^,:-]{1,60}"


def build(source: Path, out: Path) -> dict[str, int]:
    """Write the folder ``out`` from a folder of ``gpu-check`` or ``tune``; bytes of each file.

    Raises ValueError where ``source`` is neither, has no times, or makes more than MOST_BYTES; OSError.
    """
    if (source / "run.json").exists():
        header, sweep, steps = _of_check(Results.read(source))
    else:
        header, sweep, steps = _of_run(source)
    if sweep.empty:
        raise ValueError(f"{source}: no time of a collective is in it: nothing to submit")
    out.mkdir(parents=True, exist_ok=False)
    (out / HEADER).write_text(json.dumps(header, indent=1) + "\n")
    sweep.to_csv(out / SWEEP, index=False)
    steps.to_csv(out / STEPS, index=False)
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    if sum(sizes.values()) > MOST_BYTES:
        raise ValueError(f"{out}: {sum(sizes.values()):,} bytes, at most {MOST_BYTES:,} are submitted")
    return sizes


def header_of(
    found: Mapping[str, Any], versions: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The header's fields, each only if its value looks as FIELDS says; else it is left out."""
    header = {"schema": SCHEMA, **found}
    kept: dict[str, Any] = {}
    for name, value in header.items():
        if fits(FIELDS.get(name), value):
            kept[name] = value
    kept["versions"] = _fitting(versions, VERSIONS, VERSION)
    kept["settings"] = _fitting(settings, SETTINGS, SETTING)
    return kept


def _fitting(values: Mapping[str, Any], names: Iterable[str], pattern: str) -> dict[str, Any]:
    """The values of these names that look like ``pattern``."""
    return {name: values[name] for name in names if fits(pattern, values.get(name))}


def fits(pattern: str | None, value: Any) -> bool:
    """Whether the whole of a value's text looks like this."""
    return pattern is not None and value is not None and re.fullmatch(pattern, str(value)) is not None


def _of_check(results: Results) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    run = results.run
    emulated = str(run.get("emulated") or "")
    found = {
        name: run.get(name) for name in ("plugin", "placement", "network", "nodes", "ranks", "gpus_per_node")
    }
    found |= {"source": "gpu-check", "emulated": emulated, "week": _week(str(run.get("began", "")))}
    found |= {"commit": run.get("commit", ""), "gpu": "emulated" if emulated else run.get("device")}
    header = header_of(found, run.get("versions", {}), run.get("environment", {}))
    steps = results.tables["steps"]
    default = steps[steps["arm"] == "default"]
    series = {}
    races = default["race"].astype(str)
    for race in dict.fromkeys(races):
        rows = default[default["race"] == race]
        rows = rows.sort_values("at")
        series[race] = rows["us"].to_numpy(float)
    return header, results.tables["sweep"], _relative(series)


def _of_run(source: Path) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """From the trace of a tuning run. Sizes become those of their class: the shape of a model stays at home."""
    trace = Trace.read(source)
    told = trace.header
    ranks = int(trace.comms["n_ranks"].max()) if len(trace.comms) else 0
    nodes = int(trace.comms["n_nodes"].max()) if len(trace.comms) else 0
    gpu = "emulated" if told.get("emulated") else _gpu(told)
    found = {
        "source": "tune",
        "commit": str(told.get("commit") or "")[:12],
        "plugin": build_of(),
        "gpu": gpu,
        "gpus_per_node": ranks // max(nodes, 1),
        "nodes": nodes,
        "ranks": ranks,
        "placement": "unknown",
        "network": "unknown",
        "emulated": str(told.get("cluster") or "") if told.get("emulated") else "",
        "week": _week(str(told.get("date", ""))),
    }
    versions = {**told.get("versions", {}), **{"nccl": told.get("nccl")}}
    header = header_of(found, versions, told.get("environment", {}))
    steps = trace.steps
    under_default = steps["table_generation"] == 0
    steps = steps[under_default & (steps["rank"] == 0)]
    steps = steps.sort_values("end_ns")  # not by number: a job that is started again counts from 0 again
    durations = {"default": steps["duration_ns"].to_numpy(float)}
    return header, calls_of(trace), _relative(durations)


def _gpu(told: Mapping[str, Any]) -> str:
    hardware = str(told.get("hardware") or "")
    named = re.search(r"NVIDIA [A-Za-z0-9 -]{1,40}", hardware)
    return named.group(0).strip() if named else "unknown"


def calls_of(trace: Trace) -> pd.DataFrame:
    """Rows as in the sweep from the kernel times of a run's collectives."""
    events = _timed(trace)
    pair = events["algo"] + "/" + events["proto"]
    channels = events["n_channels"].astype(str)
    ran = pair + "/" + channels
    on_ranks = ran.groupby(events["call"]).transform("nunique")
    sizes = [2 ** size_class(n) for n in events["n_bytes"]]
    wanted = _wanted(events, trace)
    events = events.assign(ran=ran, agreed=on_ranks == 1, wanted=wanted, n_bytes=sizes)
    rows: list[dict[str, Any]] = []
    kinds = events.groupby(["func", "n_bytes", "wanted", "ran"])
    for kind, calls in kinds:
        func, n_bytes, asked, had = kind
        low, middle, high = np.quantile(calls["us"], (0.1, 0.5, 0.9))
        row: dict[str, Any] = {"comm": "nccl", "func": func, "n_bytes": n_bytes, "asked": asked, "ran": had}
        row |= {
            "calls": len(calls),
            "p10_us": round(low, 2),
            "p50_us": round(middle, 2),
            "p90_us": round(high, 2),
        }
        row["right"] = ""
        row["obeyed"] = _obeyed(str(asked), str(had))
        row["agreed"] = bool(calls["agreed"].all())
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS["sweep"]))


def _timed(trace: Trace) -> pd.DataFrame:
    """Events whose kernel was timed, with ``us``, ``asked`` and the number of their ``call``.

    Communicators with captured calls are left out: NCCL does not count these alike on all ranks, so nobody can say
    whether the ranks agreed.
    """
    captured = trace.events["captured"]
    unsure = trace.events.loc[captured, "comm_id"].unique()
    is_sure = ~trace.events["comm_id"].isin(unsure)
    events = trace.events[is_sure].dropna(subset=["start_ns", "end_ns"])
    is_tuned = events["func"].isin(("all_gather", "reduce_scatter"))
    is_told = events["table_generation"].isin(trace.tables)
    events = events[is_tuned & is_told & (events["n_bytes"] > 0)]
    return with_sizes(numbered(events))


#: What a row of a table is found by.
_CALL = ["table_generation", "func", "n_ranks", "n_nodes", "asked"]


def _wanted(events: pd.DataFrame, trace: Trace) -> list[str]:
    """What the table of each call asked for; ``auto`` where it has no row for the call, or NCCL asked not about it."""
    known: dict[tuple[Any, ...], str] = {}
    found = []
    for call in events[_CALL].itertuples(index=False, name=None):
        if call not in known:
            known[call] = _decision(trace, *call)
        found.append(known[call])
    return found


def _decision(trace: Trace, generation: int, func: str, n_ranks: int, n_nodes: int, asked: int) -> str:
    if asked == 0:
        return "auto"
    call = {"func": func, "n_ranks": n_ranks, "n_nodes": n_nodes, "n_bytes": asked}
    row = row_for(trace.tables[generation], call)
    return str(row["decision"]) if row else "auto"


def _obeyed(asked: str, ran: str) -> bool:
    """Whether a call ran as asked for; NCCL may take fewer channels."""
    wanted = decision_from(asked)
    algo, proto, channels = ran.split("/")
    had = (algo, proto)
    pair = (wanted.algo, wanted.proto)
    most = wanted.n_channels
    is_pair = pair == had or wanted.algo is None
    is_within = most == 0 or int(channels) <= most
    return is_pair and is_within


def _relative(series: Mapping[str, np.ndarray[Any, Any]]) -> pd.DataFrame:
    """Step times relative to their median, in order."""
    parts = []
    for number, times in enumerate(series.values()):
        kept = times[:MOST_STEPS]
        if len(kept):
            relative = np.round(kept / np.median(kept), 4)
            part = {"series": number, "at": range(len(kept)), "relative": relative}
            parts.append(pd.DataFrame(part))
    return pd.concat(parts) if parts else pd.DataFrame(columns=list(STEP_COLUMNS))


def _week(text: str) -> str:
    """``2026-11-26T17:00:00Z`` -> ``2026-W48``: a day says more than it has to. Today's where it is no date."""
    try:
        date = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        date = datetime.now(UTC)
    year, week, _ = date.isocalendar()
    return f"{year}-W{week:02d}"
