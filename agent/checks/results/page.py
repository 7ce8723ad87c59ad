"""From the files of one check to a page of results: plain text, for people."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ....envs.search.config import ALPHA
from ....traces.records import format_range
from .files import Results
from .judge import LONG, Gain, claims, flags, is_sound, noises, outside


def page(results: Results, others: Sequence[Results] = ()) -> str:
    """All that the folder answers, and which gains may be claimed. ``others``: further runs that may agree."""
    parts = (_head(results), _parts(results), _sweep(results), _contention(results), _noise(results))
    more = (_truth(results, others), _joint(results), _tune(results), _host(results))
    return "\n\n".join(filter(None, ("\n".join(lines) for lines in (*parts, *more)))) + "\n"


def _head(results: Results) -> Iterator[str]:
    run = results.run
    emulated = "; EMULATED: no figure here is a GPU's" if run.get("emulated") else ""
    yield f"{run.get('device', '?')}, {run.get('ranks', '?')} ranks ({run.get('placement', '?')}){emulated}"
    versions = ", ".join(f"{name} {text}" for name, text in run.get("versions", {}).items())
    yield f"{run.get('began', '?')}, commit {run.get('commit') or '?'}, {versions}"


def _parts(results: Results) -> Iterator[str]:
    yield "Parts"
    for name, told in results.run.get("parts", {}).items():
        why = f": {told['why']}" if told.get("why") else ""
        yield f"  {name:<12}{told['status']:<9}{told['took_s']:5.0f} of {told['planned_s']:.0f} s{why}"


def _sweep(results: Results) -> Iterator[str]:
    table = results.tables["sweep"]
    if table.empty:
        return
    wrong = {name: int((~flags(table[name])).sum()) for name in ("right", "obeyed", "agreed")}
    yield (
        f"Sweep: {len(table)} configs, {int((table['calls'] > 0).sum())} timed; wrong results {wrong['right']}, "
        f"not obeyed {wrong['obeyed']}, ranks differ {wrong['agreed']}"
    )
    yield "  Fastest config against NCCL untouched (median us of a call)"
    timed = table[table["calls"] > 0]
    for func, n_bytes in sorted(set(zip(timed["func"], timed["n_bytes"].astype(int), strict=True))):
        rows = timed[(timed["func"] == func) & (timed["n_bytes"] == n_bytes)]
        own = rows[(rows["comm"] == "nccl") & (rows["asked"] == "auto")]
        if own.empty:
            continue
        own_us = float(own["p50_us"].median())
        usable = rows[is_sound(rows) | rows.index.isin(own.index)]
        best = usable.sort_values("p50_us").iloc[0]
        what = f"{best['comm']} {best['asked']}"
        yield (
            f"  {func:<15}{format_range(n_bytes, n_bytes):>8}  untouched {own['ran'].iloc[0]:<16}{own_us:9.1f}"
            f"  best {what:<26}{best['p50_us']:9.1f}  ({best['p50_us'] / own_us:.2f})"
        )


def _contention(results: Results) -> Iterator[str]:
    table = results.tables["contention"]
    if table.empty:
        return
    yield "Contention: time of compute and collective together, relative to the compute alone"
    keys = ["compute", "size", "comm", "asked"]
    for (compute, size, comm, asked), rows in table.groupby(keys, sort=False):
        told = []
        for func in ("all_gather", "reduce_scatter"):
            at = rows.index[rows["func"] == func]
            for i in at:
                alone = table.loc[i - 1, "total_us"]  # written just before
                told.append(f"{func} {rows.loc[i, 'total_us'] / alone:.3f}")
        yield f"  {compute} {size:<10} {comm:<7}{asked:<16}{', '.join(told)}"


def _noise(results: Results) -> Iterator[str]:
    for one in noises(results):
        lags = ", ".join("-" if math.isnan(r) else f"{r:.2f}" for r in one.lags)
        yield (
            f"Noise ({one.race}): {one.steps} default steps, robust sd {one.sd:.2%}, correlation at lags 1, 10, 100: "
            f"{lags}; {one.long:.1%} longer than {LONG} medians; default against itself {_percent(one.aa)}"
        )
    ratio = outside(results)
    if ratio is not None:
        error = "" if math.isnan(ratio.error) else f" (standard error {ratio.error:.4f})"
        yield f"Silent tuner / no tuner: step time {ratio.ratio:.4f}{error}, {ratio.pairs} pairs of blocks"


def _percent(gain: Gain) -> str:
    return f"{gain.gain:+.2%} [{gain.low:+.2%}, {gain.high:+.2%}]"


def _truth(results: Results, others: Sequence[Results]) -> Iterator[str]:
    found = claims(results, others)
    if not found:
        return
    yield f"Truth: part of the step saved, against NCCL untouched, alternating at every step (level {ALPHA})"
    for gain, why in found:
        said = f"no claim: {why}" if why else "CLAIM"
        yield f"  {gain.race:<30}{_percent(gain)}, {gain.steps} steps; {said}"
        yield f"    {gain.table}"


def _joint(results: Results) -> Iterator[str]:
    table = results.tables["joint"]
    if len(table) < 8:
        return
    logs = table["total_us"].astype(float).map(math.log)
    cells = logs.groupby([table["first"], table["second"]]).mean().unstack()
    square = cells.dropna().to_numpy(float)
    if square.size < 4:
        return
    rows, columns = square.mean(axis=1, keepdims=True), square.mean(axis=0, keepdims=True)
    together = square - rows - columns + square.mean()
    again = logs.groupby([table["first"], table["second"]]).std(ddof=1).dropna()
    noise = float(np.sqrt((again**2).mean() / 2)) if len(again) else math.nan
    yield (
        f"Joint: interactions of two collectives {together.std():.2%} (standard deviation over {square.size} pairs of "
        f"settings, noise included), noise of a pair {noise:.2%}"
    )


def _tune(results: Results) -> Iterator[str]:
    told = results.run.get("parts", {}).get("tune", {})
    for name, text in told.get("verdicts", {}).items():
        yield f"Tune ({name}): {text}"


def _host(results: Results) -> Iterator[str]:
    told = results.run.get("parts", {}).get("host", {}).get("ns", {})
    if told.get("tuner") and told.get("none"):
        with_us, without = (float(np.median(told[kind])) for kind in ("tuner", "none"))
        yield (
            f"Host: a call takes {with_us:.0f} ns with the plugin, {without:.0f} without (medians of "
            f"{len(told['tuner'])} and {len(told['none'])} batches in turn)"
        )
