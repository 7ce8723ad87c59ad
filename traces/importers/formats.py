"""The formats of other tools' files: each is recognised by the first bytes of a file, not by its name."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..files import TraceError
from . import flight, inspector, kineto, nccl_log, nsys
from .found import Found
from .json_stream import GZIP

#: Bytes of a file that are looked at: a log's first lines may be of the job.
HEAD_BYTES = 1 << 20


class Format(NamedTuple):
    """One format: a reader, or the cure where it cannot be read."""

    name: str
    text: str  # for people
    sign: re.Pattern[bytes]  # found in the first bytes of such a file
    read: Callable[[list[Path], Found], None] | None = None
    cure: str = ""


def _sign(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)


KINETO = Format(
    "kineto",
    "a profile of PyTorch",
    _sign(rb'"(traceEvents|deviceProperties|baseTimeNanoseconds)"\s*:|\A\s*\[\s*\{\s*"ph"'),
    kineto.read,
)
#: In this order: an earlier format's sign is looked for first. Signs at a file's begin come first: a file that packs
#: others holds their signs too.
FORMATS = (
    Format("nsys", "an export of Nsight Systems", _sign(rb"\ASQLite format 3\x00"), nsys.read),
    Format("flight-recorder", "a dump of the Flight Recorder", _sign(rb"\A\x80[\x02-\x05]"), flight.read),
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
        flight.read,
    ),
    Format(
        "inspector",
        "a log of NCCL's Inspector",
        _sign(rb'"(inspector_output_format_version|coll_perf|coll_sn)"\s*:'),
        inspector.read,
    ),
    Format(
        "nccl-tests",
        "a result of nccl-tests",
        _sign(rb'Collective test starting|# nThread|#\s+size\s+count\s+\(?(type|elements)|"out_of_place"'),
        cure="it measures an idle network, not a job: record a profile of the job",
    ),
    Format("nccl-log", "a log of NCCL", _sign(rb"NCCL (INFO|WARN|TRACE) |NCCL version \d"), nccl_log.read),
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
    head = first_bytes(file)
    return next((known for known in FORMATS if known.sign.search(head)), None)


def first_bytes(file: Path) -> bytes:
    """The first bytes of a file, unpacked where gzip packed it. Raises TraceError where it cannot be read."""
    try:
        with file.open("rb") as raw:
            packed = raw.peek(2)[:2] == GZIP
            source = gzip.GzipFile(fileobj=raw) if packed else raw
            return source.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {file} ({error}): is it a whole file?") from None


def refusal(file: Path, known: Format | None) -> str:
    """Why a file cannot be read, in one line."""
    if known is None:
        return f"{file} is no recording that we know: give {readable()}"
    return f"{file} is {known.text}: {known.cure}"


def readable() -> str:
    """The formats that are read, for people."""
    texts = list(dict.fromkeys(known.text for known in FORMATS if known.read))
    return ", ".join(texts[:-1]) + " or " + texts[-1]
