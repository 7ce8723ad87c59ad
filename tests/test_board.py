"""The board: ranks, ties, the page, and a README whose tables are what the results on record say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import make_ablation
import numpy as np
import pytest
from dynamiccl.agent.bench import Entry, enter
from dynamiccl.agent.board import Board, filed_results, put_on_record, tables, with_tables
from dynamiccl.envs.arena import SUITES, Suite
from dynamiccl.envs.leaderboard import replay
from standin import HiddenKind

Array = np.ndarray[Any, Any]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def suite() -> Suite:
    batch = HiddenKind(12, 5, 0.1)
    batch.reset()
    return Suite.of("hidden kind", batch)


@pytest.fixture(scope="module")
def submission(suite: Suite) -> dict[str, Any]:
    return dict(json.loads(json.dumps(enter(Entry("coordinate-descent", suite, repeats=2)))))


def test_board_page_and_table(suite: Suite, submission: dict[str, Any]) -> None:
    board = Board(suite)
    assert board.judge(submission) == ""
    assert board.judge({"entrant": "guest", "failed": "a decision took <too> long"})
    page, table = board.page(), board.markdown()
    assert "coordinate-descent" in page and "a decision took &lt;too&gt; long" in page
    outside = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=['"]?(https?:)?//""", outside)
    lines = table.splitlines()
    assert lines[2].startswith("| 1 | coordinate-descent (as AutoCCL) |") and "refused" in lines[3]
    assert len({line.count("|") for line in lines}) == 1
    assert board.rows()[0]["regret"] == submission["figures"]["regret"]


def told(suite: Suite) -> Suite:
    """The suite with a drift, and with configs that are best alone but not for the step."""
    later, at = np.roll(suite.truth, 1, axis=0), np.full(12, 10)
    alone = np.sort(np.where(suite.allowed, suite.truth, -9), axis=1)[:, -2, None]
    second = (np.where(suite.allowed, suite.truth, -9) == alone).argmax(axis=1)
    return Suite("t", *(vars(suite)[k] for k in KEYS), later, at, second)


KEYS = ("features", "mask", "truth", "share", "noise", "label")


def test_the_oracle_and_the_offline_sweep_play_what_the_suite_says(suite: Suite) -> None:
    tasks = told(suite)
    oracle = enter(Entry("oracle", tasks, 2))
    assert oracle["figures"]["regret"] == 0 and oracle["figures"]["share_of_gain"]["64"] == 1
    sweep = enter(Entry("static-best", tasks, 2))
    played = replay(sweep, tasks)
    assert (played.configs == np.tile(tasks.alone, 2)).all() and sweep["figures"]["regret"] > 0
    # It keeps what it plays, whatever was measured of it.
    np.testing.assert_allclose(played.best[-1], tasks.truth_at(63)[np.arange(24) % 12, played.configs[-1]])
    with pytest.raises(ValueError, match="does not say"):
        enter(Entry("static-best", suite))


@pytest.mark.parametrize(
    "change", [{"figures": 3}, {"figures": {}}, {"decisions": 7}, {"repeats": "x"}, {"seed": None}]
)
def test_hostile_submissions_are_refused(suite: Suite, submission: dict[str, Any], change: dict[str, Any]) -> None:
    board = Board(suite)
    assert board.judge(submission | change) and not board.played
    assert board.judge([submission]) == "not a submission: no JSON object"


def test_names_from_outside_cannot_become_markup(suite: Suite, submission: dict[str, Any]) -> None:
    board, evil = Board(suite), "</script><script>alert(1)</script>|\n| 1"
    assert board.judge(submission | {"entrant": evil}) == ""
    assert "<script>alert" not in board.page()
    assert len(board.markdown().splitlines()) == 3 and len({n.count("|") for n in board.markdown().splitlines()}) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_draws_in_a_browser_without_an_error(suite: Suite, submission: dict[str, Any], tmp_path: Path) -> None:
    board = Board(suite)
    board.judge(submission)
    (tmp_path / "b.html").write_text(board.page(), encoding="utf-8")
    args = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    args += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=6000", "--dump-dom"]
    args += ["--host-resolver-rules=MAP * ~NOTFOUND", f"file://{tmp_path / 'b.html'}"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('class="plot-container') == 4


def test_the_board_ranks_ties_and_what_has_no_rank(suite: Suite) -> None:
    tasks, board = told(suite), Board(told(suite))
    for name in ("oracle", "static-best", "default", "random"):
        assert board.judge(enter(Entry(name, tasks, 2))) == ""
    twin = enter(Entry("default", tasks, 2)) | {"entrant": "test_leaderboard:Twin"}
    assert board.judge(twin) == ""
    rows = {row["entrant"]: row for row in board.rows()}
    assert rows["oracle"]["place"] == "-" and rows["oracle"]["rank"] is None
    assert rows["default"]["place"] == rows["test_leaderboard:Twin"]["place"] == f"={rows['default']['rank']}"
    assert board.rows()[0]["entrant"] == "oracle" and "Regret by cluster" in board.page()


def test_results_go_on_record_and_into_the_readme(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "README.md").write_text("before\n<!-- board -->\nold\n<!-- /board -->\nafter\n")
    suite = Suite.load("standard")
    made = [enter(Entry(name, suite, 1)) for name in ("random", "default")]
    files = put_on_record(suite.name, made, tmp_path)
    assert [f.name for f in files] == ["board_standard.json", "README.md"]
    text = files[1].read_text()
    assert text.startswith("before\n<!-- board -->\nSuite `standard-") and text.endswith("<!-- /board -->\nafter\n")
    assert "| =1 | random |" in text or "| 1 | random |" in text
    filed = json.loads(files[0].read_text())
    filed["submissions"][0]["figures"]["regret"] = 0.01
    files[0].write_text(json.dumps(filed))
    with pytest.raises(ValueError, match="its decisions give regret"):
        tables(tmp_path / "traces")
    with pytest.raises(ValueError, match="go on record"):
        put_on_record("hidden kind", made, tmp_path)
    with pytest.raises(ValueError, match="needs one"):
        with_tables("no marks", "x")


def test_the_readme_says_what_the_filed_results_say() -> None:
    """Every filed decision is replayed; the README's tables are made from them and from nothing else."""
    root = Path(__file__).resolve().parents[1]
    readme = (root / "envs" / "README.md").read_text(encoding="utf-8")
    assert with_tables(readme, tables(root / "traces")) == readme
    for name in SUITES:
        names = {s["entrant"] for s in filed_results(Suite.load(name).name)}
        assert {"lstm", "aa", "static-best", "coordinate-descent", "gp", "thompson", "oracle"} <= names


def test_the_readme_says_what_the_ablation_on_record_says() -> None:
    found, readme = json.loads(make_ablation.FILE.read_text()), make_ablation.README.read_text(encoding="utf-8")
    assert [list(group) for group in found["groups"]] == [list(group) for group in make_ablation.GROUPS]
    assert with_tables(readme, make_ablation.table(found), "ablation") == readme
