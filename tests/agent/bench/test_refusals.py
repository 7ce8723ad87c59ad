"""What the bench and its judge refuse, and that nothing of it gets onto the board."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from command import invoke
from dynamiccl.agent.bench.board import Board
from dynamiccl.agent.bench.run import _attempt, enter_one
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.sim.jobs import STANDARD
from handlers import hide_handler_of_c_code
from make_job_suites import draw_suite, save


@pytest.fixture(scope="module")
def suite() -> JobSuite:
    return draw_suite("few", STANDARD, 6, 1)


class Quits:
    def predict(self, *observation: Any, **rest: Any) -> Any:
        sys.exit("bye")


def test_a_policy_that_ends_python_is_refused(suite: JobSuite, tmp_path: Path) -> None:
    """Before: the whole bench ended with its words, and no board was written."""
    save(suite, tmp_path / "s.json")
    found = _attempt("test_refusals:Quits", str(tmp_path / "s.json"), [0], 600)
    assert isinstance(found, str) and found.startswith(
        "SystemExit: bye ("
    )  # a hook of a library may be its place


def test_a_handler_that_c_code_had_set_does_not_end_the_bench(
    suite: JobSuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: TypeError as Python's None was to be set again."""
    save(suite, tmp_path / "s.json")
    hide_handler_of_c_code(monkeypatch, signal.SIGALRM)
    assert "SystemExit" in str(_attempt("test_refusals:Quits", str(tmp_path / "s.json"), [0], 600))


def test_a_submission_names_neither_its_rank_nor_its_name_among_its_figures(suite: JobSuite) -> None:
    """Before: keys that the judge did not know replaced the board's own."""
    honest = json.loads(json.dumps(enter_one("default", suite, 2)))
    lies = {"rank": 1, "place": "1", "entrant": "oracle", "mood": "good"}
    board = Board(suite, 2)
    assert board.judge(honest | {"entrant": "mine", "figures": honest["figures"] | lies}, None) == ""
    rows = {row["entrant"]: row for row in board.rows()}
    assert rows.keys() == {"oracle", "static-best", "mine"} and "mood" not in rows["mine"]
    assert rows["oracle"]["rank"] is None and rows["mine"]["lost"] == honest["figures"]["lost"]


def test_refused_submissions_of_one_name_leave_no_board(suite: JobSuite, tmp_path: Path) -> None:
    """Before: the two counted as one, and a board of those that read the truth came out."""
    save(suite, tmp_path / "s.json")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text('{"entrant": "nameless"}')
    words = [word for file in files for word in ("--submission", str(file))]
    done = invoke(["bench", "--suite", str(tmp_path / "s.json"), "--out", str(tmp_path / "out"), *words])
    assert done.exit_code == 2 and "no entrant finished: nameless: " in done.stderr
