"""Import of nccl-tests results: the JSON of ``-J FILE``, the text on standard output, or a CSV table.

Each row becomes one event (one a measured iteration, where the file has them), out of place before in place, laid end
to end: nccl-tests tells averages, not when a call ran. The algorithm is known only where the environment forced it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import TraceError
from .importers_common import Imported, algo_of, comm_id_of, dtype_of, func_of, proto_of
from .json_stream import Source, loads

_CURE = "give the file of -J, what the test printed, or a CSV with the columns collective, size_bytes and time_us"
#: Names that a CSV's columns go by.
_COLUMNS = {
    "func": ("collective", "func", "coll"),
    "size": ("size_bytes", "size", "bytes", "n_bytes"),
    "type": ("type", "dtype"),
    "n_ranks": ("n_ranks", "nranks", "ranks"),
    "out": ("time_us", "oop_time_us", "out_of_place_time_us", "time"),
    "in": ("ip_time_us", "in_place_time_us"),
}


class _Rows:
    """Rows of one file, laid end to end."""

    def __init__(self, found: Imported, name: str) -> None:
        self.found, self.name, self.now = found, name, 0

    def add(self, func: str, n_bytes: int, dtype: str, times_us: list[float], **more: Any) -> None:
        """One event per time in microseconds; the others hold for all of them."""
        n_ranks = int(more.get("n_ranks") or 0)
        row = {"comm_id": comm_id_of(self.name, n_ranks), "rank": 0, "func": func, "n_bytes": n_bytes}
        row |= {"dtype": dtype_of(dtype), **more}
        for us in times_us:
            start, self.now = self.now, self.now + max(1, round(us * 1000))
            self.found.events.append({**row, "enqueue_ns": start, "start_ns": start, "end_ns": self.now})


def read(paths: list[Path], on_bytes: Callable[[int], None] = lambda n: None) -> Imported:
    """Read results. Raises TraceError for files that hold none, and where the collective cannot be told."""
    found = Imported()
    for path in paths:
        with Source(path, on_bytes) as source:
            text = source.read_all().decode("utf-8", errors="replace")
        n_before = len(found.events)
        rows = _Rows(found, path.stem)
        try:
            if text.lstrip().startswith("{"):
                _read_json(path, text, rows)
            elif re.search(r"^#", text, flags=re.M):
                _read_text(path, text, rows)
            else:
                _read_csv(text, rows)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{path} holds no nccl-tests results ({error!r}): {_CURE}") from None
        if len(found.events) == n_before:
            raise TraceError(f"{path} holds no nccl-tests results: {_CURE}")
    found.notes.append("nccl-tests tells averages: starts are laid end to end, there are no optimizer steps")
    return found


def _read_json(path: Path, text: str, rows: _Rows) -> None:
    document = loads(path, text)
    arguments = [str(a) for a in document.get("args") or []]
    func = _func(Path(arguments[0]).name if arguments else "", path)
    config = document.get("config") or {}
    devices = config.get("devices") or document.get("devices") or []
    # Without MPI the list names the first device only.
    n_ranks = max(len(devices), int(config.get("nthreads") or 1) * int(config.get("ngpus") or 1))
    forced = dict(v.split("=", 1) for v in document.get("env") or [] if v.startswith("NCCL_") and "=" in v)
    place: dict[str, Any] = {"n_ranks": n_ranks, "n_nodes": len({d.get("hostname") for d in devices}) or 1}
    place |= {"algo": algo_of(forced.get("NCCL_ALGO")), "proto": proto_of(forced.get("NCCL_PROTO"))}
    if version := document.get("nccl_version"):
        rows.found.header["nccl"] = _version(int(version))
    rows.found.header["job"] = " ".join(arguments)
    if devices and devices[0].get("hostname"):
        rows.found.header["host"] = devices[0]["hostname"]
    for result in document["results"]:
        for kind in ("out_of_place", "in_place"):
            measured = result.get(kind) or {}
            times = (result.get(f"{kind}_per_iter") or {}).get("times_us")
            if not times and (mean := measured.get("time", measured.get("cpu_time"))) is not None:
                times = [mean]
            rows.add(func, int(result["size"]), str(result.get("type", "")), [float(t) for t in times or []], **place)


def _read_text(path: Path, text: str, rows: _Rows) -> None:
    """Lines under a head that names their columns: size, count, type ..., and ``time`` out of place and in place."""
    started = re.search(r"Collective test starting: (\S+)", text) or re.search(r"(\w+_perf)\b", text)
    func = _func(started[1] if started else "", path)
    hosts = re.findall(r"^#\s+Rank\s+\d+ .*?\bon\s+(\S+)\s+device", text, flags=re.M)
    place = {"n_ranks": len(hosts), "n_nodes": len(set(hosts))}
    if hosts:
        rows.found.header["host"] = hosts[0]
    if version := re.search(r"nccl-library=(\d+)", text):
        rows.found.header["nccl"] = _version(int(version[1]))
    head = re.search(r"^#\s+(size\s+count\s.*)$", text, flags=re.M)
    columns = head[1].split() if head else []
    at = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    for line in text.splitlines():
        words = line.split()
        if not at or len(words) <= at[0] or not (words[0].isdigit() and words[1].isdigit()):
            continue
        times = [float(words[i]) for i in at if len(words) > i and re.fullmatch(r"[\d.]+(e\+?\d+)?", words[i])]
        rows.add(func, int(words[0]), words[2], times, **place)


def _read_csv(text: str, rows: _Rows) -> None:
    reader = csv.DictReader(text.splitlines())
    names = {n.strip().lower(): n for n in reader.fieldnames or []}
    column = {key: next((names[a] for a in aliases if a in names), "") for key, aliases in _COLUMNS.items()}
    if not (column["func"] and column["size"] and (column["out"] or column["in"])):
        raise ValueError(f"columns {', '.join(names) or 'none'}")
    for line in reader:
        func = func_of(line[column["func"]] or "")
        if func is None:
            continue
        times = [float(line[column[k]]) for k in ("out", "in") if column[k] and line[column[k]]]
        n_ranks = int(line[column["n_ranks"]] or 0) if column["n_ranks"] else 0
        dtype = line[column["type"]] if column["type"] else ""
        rows.add(func, int(line[column["size"]]), dtype or "", times, n_ranks=n_ranks)


def _func(program: str, path: Path) -> str:
    """The collective that a program such as ``all_gather_perf`` runs; a file named after it will do."""
    func = func_of(program) or func_of(path.stem)
    if func is None:
        raise TraceError(f"{path} does not tell which collective it is of: name it like all_gather.txt")
    return func


def _version(code: int) -> str:
    """NCCL's version number, 22809 -> 2.28.9."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
