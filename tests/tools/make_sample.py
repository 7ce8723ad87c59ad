"""Makes a small sample of a run: ``python tests/tools/make_sample.py RUN OUT "what it is"``.

The parts of each table become one file, and names of this machine go. What was measured stays as it was.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: Of a header and a summary: what a sample says in place of this machine's names.
NAMES = {"host": "sample", "run": "sample", "run_id": "sample", "kernel": None, "log": None, "report": None}
IN_PARTS = ("events", "steps", "waits")


def without_names(told, job):
    """A header or a summary without this machine's names."""
    named = {key: value for key, value in NAMES.items() if told.get(key) is not None}
    named |= {key: job for key in ("job", "command") if told.get(key) is not None}
    named |= {"trace": "trace"} if told.get("trace") else {}
    named |= {"table": None} if told.get("table") else {}
    return {key: value for key, value in (told | named).items() if value is not None}


def one_file_a_table(source, out):
    """Copies the tables of a trace, each in one file."""
    for path in sorted(source.glob("segment-*.json")):
        told = json.loads(path.read_text())
        for kind in IN_PARTS:
            parts = sorted(source.glob(f"{kind}-{told['name']}-*.parquet"))
            if parts:
                whole = pa.concat_tables([pq.read_table(part) for part in parts])
                pq.write_table(whole, out / parts[0].name, compression="zstd", compression_level=19)
                told["parts"][kind] = 1
        (out / path.name).write_text(json.dumps(told))
    for path in [*source.glob("comms-*"), *source.glob("offers-*")]:
        pq.write_table(pq.read_table(path), out / path.name, compression="zstd", compression_level=19)


def main(run, out, what, job):
    source, made = Path(run) / "trace", Path(out) / "trace"
    shutil.rmtree(out, ignore_errors=True)
    made.mkdir(parents=True)
    one_file_a_table(source, made)
    (made / "windows.jsonl").write_text((source / "windows.jsonl").read_text())
    header = {"sample": what, **without_names(json.loads((source / "header.json").read_text()), job)}
    (made / "header.json").write_text(json.dumps(header, indent=2) + "\n")
    summary = json.loads((Path(run) / "summary.json").read_text())
    if summary.get("speedup") is not None:  # else it is a recording of the default, and no run
        told = without_names(summary, job)
        (Path(out) / "summary.json").write_text(json.dumps(told, indent=2) + "\n")
    for path in Path(out).rglob("*.json*"):
        assert not re.search(r'"/(?!s)', path.read_text()), f"{path} names a folder of this machine"


if __name__ == "__main__":
    main(*sys.argv[1:])
