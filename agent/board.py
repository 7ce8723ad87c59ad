"""The board: entrants that were judged on one suite, as rows and as a table; and the results on record."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.arena import SUITES, WINDOWS, Played, Suite
from ..envs.leaderboard import HARSH, NEAR, bootstrap, by_task, per_task, ranks, replay
from .bench import UNRANKED, entrants

Array = np.ndarray[Any, Any]

#: What a row says beside the entrant's name.
REMARKS = {
    "lstm": "(ours)",
    "aa": "(ours again, other noise: A/A)",
    "static-best": "(offline sweep of each collective alone; the sweep is not counted)",
    "coordinate-descent": "(as AutoCCL)",
    "exhaustive": "(as FlagCX)",
    "tpe": "(Optuna)",
    "oracle": "(knows the truth)",
}


def _between(interval: Sequence[float], form: str = ".2f") -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _trials(value: float) -> str:
    return f"{value:.0f}" if value <= WINDOWS else "never"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


#: Columns of the table: heading, how a row says it.
COLUMNS = (
    ("", lambda row: row["place"]),
    ("policy", lambda row: f"{row['entrant']} {REMARKS.get(row['entrant'], '')}".strip()),
    (f"regret over {WINDOWS} windows [95 %]", lambda row: f"{row['regret']:.2f} {_between(row['regret_ci95'])}"),
    (
        "share of the oracle's gain [95 %]",
        lambda row: f"{row['share_of_gain'][str(WINDOWS)]:.0%} {_between(row['share_of_gain_ci95'], '.0%')}",
    ),
    ("after 4 trials", lambda row: f"{row['share_of_gain']['4']:.0%}"),
    (
        f"trials to {NEAR:.0%} of the oracle (median, p90)",
        lambda row: ", ".join(map(_trials, row["trials_until_near"][1:])),
    ),
    (
        "speed-up at the end (p10, median, p90)",
        lambda row: f"{row['speedup']:.3f} ({', '.join(f'{q:.2f}' for q in row['speedup_percentiles'])})",
    ),
    ("worst window (p90)", lambda row: f"{row['worst_window']:.2f} x ({row['worst_window_percentiles'][2]:.2f})"),
    (f"runs with one above {HARSH:.1f} x", lambda row: f"{row['harsh']:.1%}"),
    ("runs that end slower", lambda row: f"{row['slower']:.1%}"),
    ("us a decision", lambda row: f"{row['decision_us']:.0f}"),
)


class Board:
    """Judges submissions on one suite and keeps those that reproduce."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.played: dict[str, Played] = {}
        self.figures: dict[str, Mapping[str, Any]] = {}
        self.refused: dict[str, str] = {}

    def judge(self, submission: Any) -> str:
        """Replay a submission's decisions; '' when they give the figures it claims, else the reason it is refused."""
        if not isinstance(submission, Mapping):
            submission = {"failed": "not a submission: no JSON object"}
        name = str(submission.get("entrant", "nameless"))
        try:
            if "failed" in submission:
                raise ValueError(submission["failed"])
            self.played[name] = replay(submission, self.suite)
            self.figures[name] = submission["figures"]
        except ValueError as error:
            self.refused[name] = str(error)
        return self.refused.get(name, "")

    def regrets(self) -> dict[str, Array]:
        """Regret of each entrant by task, see ``leaderboard.by_task``."""
        return {n: by_task(per_task(p)["regret"], len(self.suite)) for n, p in self.played.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One row an entrant, best first. Entrants that cannot be told apart share a rank (``place`` is then =1)."""
        regrets = self.regrets()
        ranked = {name: regret for name, regret in regrets.items() if name not in UNRANKED}
        same = len({len(regret) for regret in ranked.values()}) <= 1  # paired differences need the same tasks
        rank = ranks(ranked) if same else {}
        shared = list(rank.values())
        rows = []
        for name, figures in self.figures.items():
            place = f"{'=' if shared.count(rank[name]) > 1 else ''}{rank[name]}" if name in rank else "-"
            row = {"rank": rank.get(name), "place": place, "entrant": name, **figures}
            if name == "aa" and "lstm" in regrets:
                row["difference_ci95"] = bootstrap(regrets["aa"] - regrets["lstm"])
            rows.append(row)
        return sorted(rows, key=lambda row: (float(row["regret"]), row["entrant"]))

    def markdown(self) -> str:
        """The table, as it stands in the README."""
        lines = ["| " + " | ".join(head for head, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(_cell(say(row)) for _, say in COLUMNS) + " |" for row in self.rows()]
        for name, why in self.refused.items():
            lines.append(f"| | {_cell(name)} | refused: {_cell(why)} |" + " |" * (len(COLUMNS) - 3))
        return "\n".join(lines) + "\n"

    def page(self) -> str:
        """One HTML file, plotly inside, nothing loaded from elsewhere."""
        from .board_page import page  # plotly: a second to import

        return page(self)


def filed_results(suite: str) -> list[dict[str, Any]]:
    """The submissions on record of a suite by its name (``standard-2``). Raises ValueError when there are none."""
    try:
        found = json.loads(resources.files("dynamiccl.traces").joinpath(_file_of(suite)).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"no results of suite {suite} are on record ({error}): make bench") from error
    return list(found["submissions"])


def put_on_record(suite: str, submissions: Sequence[Mapping[str, Any]], root: Path | None = None) -> list[Path]:
    """Write a suite's results to ``traces/`` and both suites' tables into ``envs/README.md``; returns the files.

    ``root`` is the checkout. Raises ValueError when the suite is not a shipped one.
    """
    if suite not in {Suite.load(name).name for name in SUITES}:
        raise ValueError(f"only the results of {' and '.join(SUITES)} go on record, not those of {suite}")
    root = root or Path(__file__).resolve().parents[1]
    file, readme = root / "traces" / _file_of(suite), root / "envs" / "README.md"
    order = {name: i for i, name in enumerate(entrants())}
    lines = [json.dumps(s) for s in sorted(submissions, key=lambda s: (order.get(s["entrant"], 99), s["entrant"]))]
    head = {"made_by": "make bench", "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "suite": suite}
    text = json.dumps(head)[:-1] + ', "submissions": [\n' + ",\n".join(lines) + "\n]}\n"
    file.write_text(text)
    if not readme.exists():
        return [file]
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), tables(root / "traces")), encoding="utf-8")
    return [file, readme]


def tables(folder: Path) -> str:
    """The tables of ``envs/README.md``, from the results on record in ``folder``: every decision is replayed.

    Raises ValueError when one does not reproduce.
    """
    parts = []
    for name in SUITES:
        suite = Suite.load(name)
        file = folder / _file_of(suite.name)
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        board = Board(suite)
        for submission in found["submissions"]:
            reason = board.judge(submission)
            if reason:
                raise ValueError(f"{file.name}: {submission.get('entrant')}: {reason}")
        parts.append(f"Suite `{suite.name}`, {len(suite)} tasks, {found['date']}, emulated:\n\n{board.markdown()}")
    return "\n".join(parts)


def with_tables(readme: str, text: str, mark: str = "board") -> str:
    """The README with ``text`` between its marks. Raises ValueError when it has none."""
    new, n = re.subn(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: f"{m[1]}{text}{m[2]}", readme, flags=re.DOTALL
    )
    if n != 1:
        raise ValueError(f"the README needs one <!-- {mark} --> and one <!-- /{mark} --> on lines of their own")
    return new


def _file_of(suite: str) -> str:
    return f"board_{re.sub(r'-[0-9]+$', '', suite).replace('-', '_')}.json"
