"""Make ``envs/sim/streams.csv`` anew: ``python tests/make_streams.py`` (a few minutes).

Dry runs of public models under our ZeRO engine and PyTorch's FSDP2: every call of one step, counted. The rows of
aliyun/aicb's public recordings are kept as they are.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

from dynamiccl.zero_workload.dryrun import dry_run
from dynamiccl.zero_workload.dryrun_models import PRESETS

FILE = Path(__file__).parents[1] / "envs" / "sim" / "streams.csv"
HEAD = """\
# Collectives of one training step, from real streams; made by tests/make_streams.py.
# aicb-*: aliyun/aicb (23eec3c, Apache-2.0), Llama-7B under DeepSpeed ZeRO-2 and ZeRO-3, 128 ranks.
# The others: dry runs of our ZeRO engine (zero-*) and of PyTorch's FSDP2 (fsdp2-*), bf16 messages.
"""
MIB = 2**20
VARIANTS = [
    ("zero", 3, {}),
    ("zero", 3, {"unit": "layer"}),
    ("zero", 2, {"bucket_bytes": 25 * MIB}),
    ("zero", 2, {"bucket_bytes": 100 * MIB}),
    ("zero", 2, {"bucket_bytes": 500_000_000}),
    ("zero", 1, {"bucket_bytes": 250 * MIB}),
    ("fsdp2", 3, {}),
    ("fsdp2", 2, {}),
]
#: The largest models only through the variants that people use them with.
PLAN = [
    *(("gpt2", 16, variant) for variant in VARIANTS),
    *(("llama-7b", 16, VARIANTS[k]) for k in (0, 3, 4, 6, 1, 7)),
    ("llama-13b", 64, VARIANTS[0]),
    ("gpt2-xl", 16, VARIANTS[0]),
    ("gpt2-xl", 16, VARIANTS[3]),
]


def label(model, ranks, engine, stage, settings):
    """``llama-7b zero-3 unit=layer, 16 ranks``."""
    extra = "".join(f" {k}={v}" for k, v in settings.items())
    return f"{model} {engine}-{stage}{extra}, {ranks} ranks"


def stream(model, ranks, variant):
    """Rows (name, func, n_bytes, calls) of one dry run."""
    engine, stage, settings = variant
    calls, _ = dry_run(PRESETS[model], ranks=ranks, stage=stage, engine=engine, **settings)
    counted = Counter((c.func, c.n_bytes) for c in calls if c.func in ("all_gather", "reduce_scatter"))
    return [(label(model, ranks, *variant), *key, n) for key, n in sorted(counted.items())]


def main():
    """Complete the file; remove rows from it to have them made anew."""
    with FILE.open(newline="") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))[1:]
    for plan in PLAN:
        if label(*plan[:2], *plan[2]) not in {row[0] for row in rows}:
            rows += stream(*plan)
            print(rows[-1][0], file=sys.stderr, flush=True)
        with FILE.open("w", newline="") as file:
            file.write(HEAD)
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["stream", "func", "n_bytes", "calls"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
