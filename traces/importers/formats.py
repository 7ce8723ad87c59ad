"""The formats of other tools' files: each is recognised by the first bytes of a file, not by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..outside import first_bytes
from . import flight, inspector, kineto, nccl_log, nsys
from .found import Gaps, Reader

#: Bytes of a file that are looked at: a log's first lines may be of the job.
HEAD_BYTES = 1 << 20


class Format(NamedTuple):
    """One format: a reader, or the cure where it cannot be read."""

    name: str
    text: str  # for people
    sign: re.Pattern[bytes]  # found in the first bytes of such a file
    reader: Callable[[], Reader] | None = None  # makes what reads the files of one job
    gaps: Gaps = Gaps()
    cure: str = ""


def _sign(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)


KINETO = Format(
    "kineto",
    "a profile of PyTorch",
    _sign(rb'"(traceEvents|deviceProperties|baseTimeNanoseconds)"\s*:|\A\s*\[\s*\{\s*"ph"'),
    lambda: kineto.read,
    kineto.GAPS,
)
#: In this order: an earlier format's sign is looked for first. Signs at a file's begin come first: a file that packs
#: others holds their signs too.
FORMATS = (
    Format(
        "nsys", "an export of Nsight Systems", _sign(rb"\ASQLite format 3\x00"), lambda: nsys.read, nsys.GAPS
    ),
    Format(
        "flight-recorder",
        "a dump of the Flight Recorder",
        _sign(rb"\A\x80[\x02-\x05]"),
        lambda: flight.read,
        flight.GAPS,
    ),
    Format("zip", "a zip archive", _sign(rb"\APK\x03\x04"), cure="unpack it and give the files in it"),
    Format(
        "packed",
        "packed by another program than gzip",
        _sign(rb"\A(\x28\xb5\x2f\xfd|\xfd7zXZ\x00|BZh\d)"),
        cure="unpack it first",
    ),
    Format(
        "execution-trace",
        "an execution trace of PyTorch",
        _sign(rb'\A\s*\{\s*"schema"\s*:\s*"\d'),
        cure="it has no GPU times: export a profile with torch.profiler's export_chrome_trace",
    ),
    KINETO,
    Format(
        "flight-recorder",
        "a dump of the Flight Recorder",
        _sign(rb'\A\s*\{[\s\S]*"(collective_seq_id|pg_status|nccl_comm_state|comm_lib_version)"\s*:'),
        lambda: flight.read,
        flight.GAPS,
    ),
    Format(
        "inspector",
        "a log of NCCL's Inspector",
        _sign(rb'"(inspector_output_format_version|coll_perf|coll_sn)"\s*:'),
        inspector.Logs,
        inspector.GAPS,
    ),
    Format(
        "nccl-tests",
        "a result of nccl-tests",
        _sign(rb'Collective test starting|# nThread|#\s+size\s+count\s+\(?(type|elements)|"out_of_place"'),
        cure="it measures an idle network, not a job: record a profile of the job",
    ),
    Format(
        "nccl-log",
        "a log of NCCL",
        _sign(rb"NCCL (INFO|WARN|TRACE) |NCCL version \d"),
        nccl_log.Logs,
        nccl_log.GAPS,
    ),
    Format(
        "deepspeed-log",
        "a log of DeepSpeed's communication",
        _sign(rb"Comm\. Op\s+Message Size"),
        cure="it has sums only: record a profile with torch.profiler",
    ),
)
#: Reports of Nsight Systems have no public format: they are recognised by their names.
NSYS_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
NSYS_REPORT = Format(
    "nsys-report",
    "a report of Nsight Systems",
    _sign(rb"\A(?!)"),
    cure="export it first: nsys export --type sqlite --include-json true FILE",
)


def detect(file: Path) -> Format | None:
    """The format of a file; None where its first bytes tell none. Raises TraceError where it cannot be read."""
    if file.name.endswith(NSYS_REPORTS):
        return NSYS_REPORT
    head = first_bytes(file, HEAD_BYTES)
    return next((known for known in FORMATS if known.sign.search(head)), None)


def refusal(file: Path, known: Format | None) -> str:
    """Why a file cannot be read, in one line."""
    if known is None:
        return f"{file} is no recording that we know: give {readable()}"
    return f"{file} is {known.text}: {known.cure}"


def readable() -> str:
    """The formats that are read, for people."""
    texts = list(dict.fromkeys(known.text for known in FORMATS if known.reader))
    return ", ".join(texts[:-1]) + " or " + texts[-1]
