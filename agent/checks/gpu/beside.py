"""A rank's program of two parts of the check, under torchrun:

python -m dynamiccl.agent.checks.gpu.beside contention FOLDER SECONDS   compute alone, and beside a collective
python -m dynamiccl.agent.checks.gpu.beside kernels FOLDER SECONDS      which kernels a table makes NCCL launch

Rank 0 adds rows to FOLDER/contention.csv or kernels.csv as they come.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ....traces.records import AUTO, Decision, decision_from
from ..sweep.rank import Cell, Plan, Rank

#: Sides of the square matrices, one with few tiles (128 of 128 x 256 on 132 SMs) and one with many; bytes of the
#: collective; by whether there is a GPU.
GEMMS = {True: (2048, 4096), False: (128,)}
BYTES = {True: 2**24, False: 2**20}
#: The compute lasts so many times as long as the collective alone.
LONGER = 1.5
#: Measurements of each setting, in turn alone and beside.
CALLS = 6
SETTINGS = (
    AUTO,
    *(Decision("ring", "simple", n) for n in (1, 2, 4, 8, 16, 24, 32)),
    *(Decision("ring", proto, 8) for proto in ("ll", "ll128")),
)
CONTENTION = ("size", "sms", "func", "n_bytes", "asked", "ran", "calls", "alone_us", "beside_us", "total_us")
KERNELS = ("func", "n_bytes", "asked", "ran", "kernel", "grid", "calls")


def agreed(rank: Rank, value: float) -> float:
    """The largest of all ranks."""
    return max(rank.gather(value))


def contention(rank: Rank, write: Callable[..., None], has_time: Callable[[], bool]) -> None:
    """Rows of contention.csv until all is measured or the time is over."""
    has_gpu = rank.device.type == "cuda"
    dtype = torch.bfloat16 if has_gpu else torch.float32
    sms = torch.cuda.get_device_properties(rank.device).multi_processor_count if has_gpu else 0
    for side in GEMMS[has_gpu]:
        a = torch.ones((side, side), dtype=dtype, device=rank.device)
        b = torch.empty_like(a)
        for cell in rank.plan.cells:
            for asked in SETTINGS:
                if not has_time():
                    return
                visit, _ = rank.visit(cell, asked, 3)
                if not _is_as_asked(asked, visit.ran):
                    continue
                pieces = _pieces(rank, a, b, visit.us)
                alone, beside, total = _measured(rank, a, b, cell, pieces)
                write(
                    side,
                    sms,
                    *cell,
                    asked,
                    visit.ran[0],
                    CALLS,
                    f"{alone:.2f}",
                    f"{beside:.2f}",
                    f"{total:.2f}",
                )


def _pieces(rank: Rank, a: torch.Tensor, b: torch.Tensor, us: float) -> int:
    """Products that take longer than the collective, on every rank."""
    torch.mm(a, a, out=b)
    rank.finish()
    begin = rank.mark()
    torch.mm(a, a, out=b)
    end = rank.mark()
    rank.finish()
    return round(agreed(rank, max(1.0, LONGER * us / max(rank.us(begin, end), 1e-3))))


def _measured(
    rank: Rank, a: torch.Tensor, b: torch.Tensor, cell: Cell, pieces: int
) -> tuple[float, float, float]:
    """Microseconds of the compute alone, beside the collective, and until both ended: medians, maxima over ranks.

    On an emulated cluster compute learns of what it lost when the collective is waited for: there only the last figure
    shows it.
    """
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(CALLS):
        for has_collective in (False, True):
            dist.barrier(group=rank.control)
            rank.fill(cell)
            begin = rank.mark()
            work = rank.call(cell, later=True) if has_collective else None
            for _ in range(pieces):
                torch.mm(a, a, out=b)
            computed = rank.mark()
            if work is not None:
                work.wait()
            end = rank.mark()
            rank.finish()
            told = rank.gather((rank.us(begin, computed), rank.us(begin, end)))
            found[has_collective].append((max(one[0] for one in told), max(one[1] for one in told)))
    alone = statistics.median(one[0] for one in found[False])
    beside, total = (statistics.median(one[place] for one in found[True]) for place in (0, 1))
    return alone, beside, total


def kernels(rank: Rank, write: Callable[..., None], has_time: Callable[[], bool]) -> None:
    """Rows of kernels.csv: names and grids of NCCL's kernels under each setting, from torch.profiler."""
    from torch.profiler import ProfilerActivity, profile

    for cell in rank.plan.cells:
        for asked in SETTINGS:
            if not has_time():
                return
            activities = [ProfilerActivity.CUDA] if rank.device.type == "cuda" else [ProfilerActivity.CPU]
            with profile(activities=activities) as prof:
                visit, _ = rank.visit(cell, asked, 3)
            if not _is_as_asked(asked, visit.ran):
                continue
            seen = _launched(prof) if rank.device.type == "cuda" else {}
            for (kernel, grid), count in (seen or {("", ""): 0}).items():
                write(*cell, asked, visit.ran[0], kernel, grid, count)


def _launched(prof: Any) -> dict[tuple[str, str], int]:
    """How often each of NCCL's kernels was launched, by its name and grid."""
    found: dict[tuple[str, str], int] = {}
    with tempfile.TemporaryDirectory(prefix="dynamiccl-check-") as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        for event in json.loads(path.read_text())["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" in event.get("name", "").lower():
                grid = "x".join(map(str, event.get("args", {}).get("grid", ())))
                key = event["name"].partition("(")[0], grid
                found[key] = found.get(key, 0) + 1
    return found


def _is_as_asked(asked: Decision, ran: list[str]) -> bool:
    """Whether a setting is offered here: else NCCL ran its own."""
    if len(ran) != 1:
        return False
    did = decision_from(ran[0])
    return asked.is_auto or (did.algo, did.proto) == (asked.algo, asked.proto)


@contextlib.contextmanager
def rows(path: Path, columns: tuple[str, ...], is_first: bool) -> Iterator[Callable[..., None]]:
    """Adds rows to a table as they come; on rank 0."""
    if not is_first:
        yield lambda *_: None
        return
    with path.open("w", newline="", buffering=1) as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        yield lambda *row: out.writerow(row)


def main() -> None:
    """One rank."""
    what, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    ends = time.monotonic() + seconds
    emulated = bool(os.environ.get("DYNAMICCL_CLUSTER"))
    cells = tuple(Cell(func, BYTES[not emulated]) for func in ("all_gather", "reduce_scatter"))
    rank = Rank(Plan(cells, 0, "emulated" if emulated else "nccl"))
    rank.connect()
    part, columns = {"contention": (contention, CONTENTION), "kernels": (kernels, KERNELS)}[what]
    with rows(folder / f"{what}.csv", columns, rank.number == 0) as write:
        part(rank, write, lambda: agreed(rank, time.monotonic() - ends) < 0)
    rank.gather(None)
    rank.close()
    os._exit(0)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()
