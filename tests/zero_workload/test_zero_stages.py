"""The traffic of a step tells the ZeRO stages apart without labels: by its collectives, their sizes and their groups.

``PYTHONPATH=tests/helpers:tests/tools python tests/zero_workload/test_zero_stages.py`` prints the table of cases.
"""

from __future__ import annotations

from typing import Any

import make_stages
import pandas as pd
import pytest
import torch
from dry_run import CollectiveLog, dry_steps
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.stage import Stage, looks_like
from paths import ROOT
from public_models import Shape

SMALL = Shape(layers=4, width=256, heads=4, seq=64, vocab=1024)
TWO_BLOCKS = Shape(layers=2, width=256, heads=4, seq=64, vocab=1024)
FP32 = {"reduce_dtype": torch.float32}
FSDP2 = {"engine": "fsdp2"}
PLAIN, CLASSIC = "data parallel (DDP, ZeRO-0)", "ZeRO-1 by all-reduce"
ONE_OR_TWO, TWO, THREE = "ZeRO-1 or 2", "ZeRO-2", "ZeRO-3"
HSDP = "HSDP over 4 ranks, "
#: Those that are compared, and the first and the last, which may not be whole.
STEPS = 5

#: The job -> its settings, the names that are right, and whether the query is to be sure of one; None: it may be.
CASES: dict[str, tuple[dict[str, Any], set[str], bool | None]] = {
    "stage 0": ({"stage": 0}, {PLAIN}, True),
    "stage 0, float32 reduction": ({"stage": 0, **FP32}, {PLAIN}, True),
    "stage 1 by all-reduce": ({"stage": 1, "classic": True}, {CLASSIC}, True),
    "stage 1 by all-reduce, float32 reduction": ({"stage": 1, "classic": True, **FP32}, {CLASSIC}, True),
    "stage 1": ({"stage": 1}, {ONE_OR_TWO}, True),
    "stage 1, float32 reduction": ({"stage": 1, **FP32}, {ONE_OR_TWO}, True),
    "stage 1, 2 micro-batches": ({"stage": 1, "gradient_accumulation": 2}, {ONE_OR_TWO}, True),
    "stage 2": ({"stage": 2}, {ONE_OR_TWO, TWO}, True),
    "stage 2, float32 reduction": ({"stage": 2, **FP32}, {ONE_OR_TWO, TWO}, True),
    "stage 2, 2 micro-batches": ({"stage": 2, "gradient_accumulation": 2}, {TWO}, True),
    "stage 2, one bucket": ({"stage": 2, "bucket_bytes": 2**25}, {ONE_OR_TWO, TWO}, False),
    "stage 3": ({"stage": 3}, {THREE}, True),
    "stage 3, float32 reduction": ({"stage": 3, **FP32}, {THREE}, True),
    "stage 3, float32 parameters": ({"stage": 3, "param_dtype": torch.float32}, {THREE}, True),
    "stage 3, 2 micro-batches": ({"stage": 3, "gradient_accumulation": 2}, {THREE}, True),
    "stage 3, keep_last=False": ({"stage": 3, "keep_last": False}, {THREE}, True),
    "stage 3 by layer": ({"stage": 3, "unit": "layer"}, {THREE}, True),
    "stage 3, reductions on a communicator of their own": ({"stage": 3, "apart": True}, {THREE}, True),
    "stage 3 of two blocks, which it keeps": ({"stage": 3, "shape": TWO_BLOCKS}, {THREE}, False),
    "stage 3, small units whole (hybrid)": ({"stage": 3, "hybrid": 300_000, "min_unit": 1}, {THREE}, None),
    "HSDP, stage 2": ({"stage": 2, "shard": 4}, {HSDP + ONE_OR_TWO, HSDP + TWO}, True),
    "HSDP, stage 3": ({"stage": 3, "shard": 4}, {HSDP + THREE}, True),
    "HSDP, stage 3, float32 reduction": ({"stage": 3, "shard": 4, **FP32}, {HSDP + THREE}, True),
    "FSDP2": ({"stage": 3, **FSDP2}, {THREE}, True),
    "FSDP2, float32 reduction": ({"stage": 3, **FSDP2, **FP32}, {THREE}, True),
    "FSDP2 that keeps gathered parameters": ({"stage": 2, **FSDP2}, {ONE_OR_TWO, TWO}, None),
}


def events_of(logs: list[CollectiveLog], rank: int = 0) -> pd.DataFrame:
    """A trace's events: as NCCL tells them, all-gathers are of bytes, whatever their dtype."""
    rows = []
    for step, log in enumerate(logs):
        for call, at in zip(log.calls, log.times_ns, strict=True):
            dtype = "int8" if call.func == "all_gather" else call.dtype
            comm = abs(hash(call.group)) % 2**60
            row = {"func": call.func, "n_bytes": call.n_bytes, "dtype": dtype, "comm_id": comm}
            rows.append(
                {**row, "n_ranks": call.n_ranks, "enqueue_ns": at, "step": step, "pid": 7, "rank": rank}
            )
    return pd.DataFrame(rows)


def seen(settings: dict[str, Any]) -> Stage:
    given: dict[str, Any] = {"ranks": 8, **settings}
    shape = given.pop("shape", SMALL)
    if given.get("engine") != "fsdp2":
        given.setdefault("bucket_bytes", 2**19)
    return looks_like(events_of(dry_steps(shape, STEPS, fake=False, **given)[0]))


@pytest.mark.parametrize("case", CASES)
def test_the_stage_is_read_off_the_stream(case: str) -> None:
    settings, names, is_sure = CASES[case]
    stage = seen(settings)
    assert stage.name in (names if is_sure else {None, *names}), stage
    assert is_sure is None or (stage.name is not None) == is_sure, stage


def test_the_stage_is_read_off_a_recording() -> None:
    folder = ROOT / "tests" / "data" / "recordings"
    assert looks_like(Trace.read(folder / "demo").events).name == THREE


def test_what_is_no_zero_job_is_not_sure() -> None:
    logs = dry_steps(SMALL, STEPS, ranks=8, stage=2, bucket_bytes=2**20, fake=False)[0]
    events = events_of(logs)
    assert (
        "0 whole steps" in looks_like(events[:0]).why
        and "1 whole steps" in looks_like(events[events.step < 3]).why
    )
    no_gathers = looks_like(events[events["func"] != "all_gather"])
    assert no_gathers.name is None and "gathers nothing" in no_gathers.why
    other = events.copy()
    other.loc[other["func"] == "all_gather", "n_bytes"] *= 3
    assert looks_like(other).name is None and "same buckets" in looks_like(other).why
    tensor = events[events["func"] == "reduce_scatter"].assign(func="all_reduce", comm_id=99)
    mixed = looks_like(pd.concat([events, tensor], ignore_index=True))
    assert mixed.name is None and "not those of replicas" in mixed.why
    assert str(mixed).startswith("ZeRO stage: not sure (")


@pytest.mark.slow
def test_distances_alone_separate_the_stages() -> None:
    """The runs of the page's picture: one group for each stream, whatever the model and its ranks."""
    points = [make_stages.fingerprint(*run) for run in make_stages.every_run()]
    found = make_stages.groups(points)
    pairs = set(zip(found, (point.stage for point in points), strict=True))
    assert len(pairs) == len(set(found)) == len({point.stage for point in points}) == 4


def test_the_picture_shows_four_groups() -> None:
    """The committed picture is that of the command's runs."""
    picture = make_stages.OUT.read_text(encoding="utf-8")
    assert f"{len(make_stages.every_run())} dry runs: 4 groups" in picture
    for stage in dict.fromkeys(stage for _, stage, _ in make_stages.STAGES):
        assert f": {stage}</text>" in picture  # alone in its group


if __name__ == "__main__":
    print("| job | answer | |\n|---|---|---|")
    for label, (settings, names, _) in CASES.items():
        stage = seen(settings)
        outcome = "not sure" if stage.name is None else "right" if stage.name in names else "WRONG"
        print(f"| {label} | {stage.name or stage.why} | {outcome} |")
