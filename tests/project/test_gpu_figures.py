"""Every figure of a GPU in the documents is recomputed from what is on file."""

import json
import re

import pytest
from paths import ROOT

FILED = ROOT / "envs" / "results"
H100 = sorted(FILED.glob("2026-11-26_nvidia_h100_*"))
PAGES = ("README.md", "OPERATING.md", "agent/README.md", "envs/README.md", "envs/nccl/README.md")
DOCUMENTS = [*(ROOT / page for page in PAGES), *sorted((ROOT / "docs").glob("*.md")), *FILED.glob("**/*.md")]


def sweeps():
    """Of each folder: its head, and its rows."""
    for folder in H100:
        head, *rows = map(json.loads, (folder / "sweep.jsonl").read_text().splitlines())
        yield folder, head, rows


def summaries():
    """Of each tuned job on file."""
    for path in sorted(FILED.glob("2026-11-26_nvidia_h100_*/*.json")):
        told = json.loads(path.read_text())
        yield told["parts"]["zero3"]["summary"] if path.name == "check.json" else told


@pytest.fixture(scope="module")
def figures():
    """What the documents may say of that H100, by name."""
    requests, plans, forced = [], set(), set()
    for folder, _, rows in sweeps():
        asked = [row for row in rows if row["decision"] != "auto"]
        requests.append(len(asked))
        plans |= {(folder, row["func"], row["n_bytes"], *row["ran"]) for row in asked}
        forced |= {row["ran"][2] for row in rows if row["decision"] == "auto"}
    found = list(summaries())
    return {
        "configs of 2.28.9": requests[0],
        "configs of 2.30.7": requests[1],
        "configs": sum(requests),
        "distinct plans": len(plans),
        "channels that we had forced": max(forced),
        "collectives compared": sum(one["consistency"]["calls_checked"] for one in found),
        "mismatches": sum(one["consistency"]["mismatches"] for one in found),
    }


def test_every_config_was_obeyed_on_an_h100():
    """By NCCL 2.28.9, whose ranks talk through sockets, and 2.30.7, through the GPU's memory."""
    tuners = []
    for folder, head, rows in sweeps():
        check = json.loads((folder / "check.json").read_text())
        assert check["label"] == "measured" and check["ok"] and head["loaded"] and head["kernel_times"]
        tuners.append([rank["tuner"] for rank in head["ranks"]])
        assert all(row["right"] and row["obeyed"] and row["ranks_agree"] for row in rows)
    assert tuners == [[5, 5], [6, 6]]


def test_fewer_channels_were_faster_than_those_that_we_had_forced(figures):
    """What the only kept tables on file did: take channels away."""
    kept = 0
    for summary in summaries():
        if not summary["kept"]:
            continue
        rows = summary["tables"][summary["in_force"]]
        channels = [row["n_channels"] for row in rows if row["n_channels"]]
        assert channels and max(channels) < figures["channels that we had forced"]
        kept += 1
    assert kept == 2


#: Numbers that are no figures of a measurement: releases, dates, names, and the time that the script plans.
NO_FIGURES = re.compile(
    r"\b2\.\d+\.\d+\b|\b26 November\b|2026-11-26\S*|H100|NCCL_(MIN|MAX)_CTAS=\d+|\b8\.5 minutes|`[^`]*`"
)


def statements(text):
    """Parts of a page that speak of a measured H100: table rows, list items, paragraphs."""
    parts = re.split(r"\n(?=[|*#-])|\n\n", text)
    about = [part for part in parts if re.search(r"\b(one|the same|an|that) H100|H100 has run", part, re.I)]
    return [re.sub(r"\s+", " ", part) for part in about]


def test_every_figure_of_a_gpu_in_the_documents_is_one_of_these(figures):
    allowed = {f"{value:,}" for value in figures.values()}
    seen = set()
    for path in DOCUMENTS:
        for part in statements(path.read_text("utf-8")):
            numbers = set(re.findall(r"\d[\d,]*(?:\.\d+)?", NO_FIGURES.sub("", part)))
            numbers = {number.rstrip(",") for number in numbers}
            assert numbers <= allowed, f"{path.name}: {numbers - allowed} is not on file: {part}"
            seen |= numbers
    assert seen == allowed  # each is said somewhere, so the search above found what it should


def test_no_gain_on_a_gpu_is_claimed_that_the_rules_refuse():
    """No document has a speed-up of that H100. What gpu-check says is in the README, see test_gpu_check.py."""
    for path in DOCUMENTS:
        for part in statements(path.read_text("utf-8")):
            assert not re.search(r"\d %|speed-up \d|\d times faster", part), part


def test_notes_lie_beside_what_was_filed():
    for folder in H100:
        note = (folder / "NOTE.md").read_text()
        assert "not compared with untouched NCCL" in note
