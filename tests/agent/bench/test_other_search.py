"""Submissions that were made with another search: what the judge says of them, and which of them stay on record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from dynamiccl.agent.bench.board import Board
from dynamiccl.agent.bench.run import enter_one
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import Scores, summary
from dynamiccl.envs.bench.sources import SOURCES, search_digest
from dynamiccl.envs.bench.submissions import replay
from dynamiccl.envs.sim.jobs import STANDARD
from make_board import still_valid
from make_job_suites import draw_suite
from paths import ROOT


@pytest.fixture(scope="module")
def suite() -> JobSuite:
    return draw_suite("small", STANDARD.only("plain"), 6, 2)


@pytest.fixture(scope="module")
def honest(suite: JobSuite) -> dict[str, Any]:
    """The submission of one entrant, as it comes out of a file."""
    read: dict[str, Any] = json.loads(json.dumps(enter_one("default", suite)))
    return read


@pytest.fixture(scope="module")
def outdated(honest: dict[str, Any]) -> dict[str, Any]:
    """The same decisions as an older search would have scored them."""
    scores = json.loads(json.dumps(honest["scores"]))
    scores["lost"][1] -= 5
    figures = summary(Scores.of(scores)) | {"decision_us": 1.0}
    return honest | {"scores": scores, "figures": figures, "search": "0" * 12}


def test_a_refusal_names_another_search(
    suite: JobSuite, honest: dict[str, Any], outdated: dict[str, Any]
) -> None:
    """Before: no result named its search. An old one, which does not, is still read."""
    this, unnamed = search_digest(), {key: honest[key] for key in honest if key != "search"}
    assert re.fullmatch("[0-9a-f]{12}", this) and honest["search"] == this
    for held in (unnamed, honest | {"search": "0" * 12}):
        assert replay(held, suite).lost == pytest.approx(honest["scores"]["lost"])
    board = Board(suite)
    for other, told in (("0" * 12, f"search {'0' * 12}"), (None, "a search that it does not name")):
        said = board.judge(outdated | {"search": other}, None)
        assert said.startswith("its decisions give lost")
        assert said.endswith(f" (made with {told}, this is search {this}: play its policy again)")
    assert "search" not in board.judge(outdated | {"search": this}, None)


def test_results_of_another_search_stay_on_record_only_if_they_hold(
    suite: JobSuite, honest: dict[str, Any], outdated: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: an entry stayed by its digest and its number of jobs alone."""
    others = {
        "same search": {},
        "replaced": {},
        "other jobs": {"jobs": 9},
        "holds": {"search": "1" * 12},
        "unnamed": {"search": None},
    }
    old = [honest | change | {"entrant": name} for name, change in others.items()]
    del old[-1]["search"]
    old.append(outdated | {"entrant": "outdated"})
    new = [honest, honest | {"entrant": "replaced"}]
    kept = [entry["entrant"] for entry in still_valid(old, new, suite)]
    assert kept == ["same search", "holds", "unnamed"]
    said = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert set(said) == {"holds", "unnamed", "outdated"}
    assert said["outdated"].startswith("dropped: its decisions give lost")


def is_of_sources(path: str) -> bool:
    """Whether a file is one of SOURCES, or lies in a folder of them."""
    return any(path == source or path.startswith(f"{source}/") for source in SOURCES)


def test_a_file_beside_a_folder_of_sources_is_none_of_them() -> None:
    """Before: envs/search_env.py passed for one of envs/search, because its name begins alike."""
    assert is_of_sources("envs/search/config.py") and is_of_sources("traces/names.py")
    assert not is_of_sources("envs/search_env.py") and not is_of_sources("traces/names.pyi")


def test_the_digest_has_every_source_that_playing_reads() -> None:
    """But for what only finds, packs and compiles."""
    names = "import sys, dynamiccl.envs.bench.submissions; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True)
    read = {name.removeprefix("dynamiccl.") for name in done.stdout.split() if name.startswith("dynamiccl.")}
    files = {f"{name.replace('.', '/')}.py" for name in read}
    free = {path for path in files if (ROOT / path).is_file() and not is_of_sources(path)}
    assert free == {
        "envs/registration.py",
        "envs/bench/sources.py",
        "envs/bench/strata.py",
        "envs/bench/submissions.py",
        "envs/nccl/plugin/build.py",
        "traces/outside.py",
    }
    assert {"envs/search/config.py", "envs/sim/step.py", "envs/nccl_model/arms.py"} < files
