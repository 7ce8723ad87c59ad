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

from ...envs.bench.job_suites import JobSuite
from ...envs.bench.scores import HORIZONS, Scores, bootstrap, by_stratum, difference, ranks, summary
from ...envs.bench.strata import SUITES
from ...envs.bench.submissions import claimed, replay, rows_of
from ..policies.choosing import DEFAULT
from .run import UNRANKED, entrants

Array = np.ndarray[Any, Any]

#: What a row says beside the entrant's name.
REMARKS = {
    "lstm": "(ours)",
    "expected-improvement": "(rule on the belief)",
    "thompson-sampling": "(rule on the belief)",
    "aa": "(expected-improvement again, other noise: A/A)",
    "static-best": "(each collective's quickest config alone; the sweep is not counted)",
    "coordinate-descent": "(as AutoCCL)",
    "sweep": "(as FlagCX)",
    "tpe": "(Optuna)",
    "oracle": "(knows the truth)",
}
#: Where results lie in a checkout, and in the package.
RESULTS = "results"
NOTHING = "Nothing is on record yet: `make bench`.\n"


def _between(interval: Sequence[float], form: str = ",.0f") -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _steps(spread: Sequence[float] | None) -> str:
    return "never" if spread is None else f"{spread[1]:,.0f}, {spread[2]:,.0f}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _who(row: Mapping[str, Any]) -> str:
    text = f"{row['entrant']} {REMARKS.get(row['entrant'], '')}".strip()
    return f"{text}, {row['jobs']} jobs" if row["jobs"] < row["of"] else text


#: Columns of the table: heading, how a row says it.
COLUMNS = (
    ("", lambda row: row["place"]),
    ("policy", _who),
    *(
        (
            f"default steps lost in {h:,} [95 %]",
            lambda row, h=h: f"{row[f'lost_{h}']:,.0f} {_between(row[f'lost_{h}_ci95'])}",
        )
        for h in HORIZONS
    ),
    (
        "gain delivered, of the oracle's [95 %]",
        lambda row: f"{row['gain_delivered']:.0%} {_between(row['gain_delivered_ci95'], '.0%')}",
    ),
    ("steps to the first confirmed gain (median, p90)", lambda row: _steps(row["steps_to_first_gain"])),
    ("steps to the verdict (median, p90)", lambda row: _steps(row["steps_to_verdict"])),
    (
        "later steps at the default",
        lambda row: "" if row["default_share_after"] is None else f"{row['default_share_after']:.1%}",
    ),
    ("jobs with a step above 1.5 x", lambda row: f"{row['harsh']:.0%}"),
    ("jobs that end slower", lambda row: f"{row['slower']:.1%}"),
    ("us a decision", lambda row: f"{row['decision_us']:,.0f}"),
)


#: Those that a terminal has room for, and their heads there.
BRIEF = {0: "", 1: "policy", 2: "lost of 20,000 steps", 4: "of the gain", 6: "steps to verdict (median, p90)"}


class Board:
    """Judges submissions on one suite and keeps those that hold. What reads the truth is on it from the start."""

    def __init__(self, suite: JobSuite) -> None:
        self.suite = suite
        self.scores: dict[str, Scores] = dict(suite.told())
        self.figures: dict[str, Mapping[str, Any]] = {
            name: summary(scores) | {"decision_us": 0.0} for name, scores in self.scores.items()
        }
        self.rows_of = {name: np.arange(len(suite)) for name in self.scores}  # the jobs that each played
        self.refused: dict[str, str] = {}

    def judge(self, submission: Any, check: int | None = 0) -> str:
        """'' when a submission agrees with itself and with what its decisions give in ``check`` jobs (None: all; 0:
        none, where we have just played it ourselves), else the reason it is refused."""
        if not isinstance(submission, Mapping):
            submission = {"failed": "not a submission: no JSON object"}
        name = str(submission.get("entrant", "nameless"))
        try:
            if "failed" in submission:
                raise ValueError(submission["failed"])
            if name in self.scores:
                raise ValueError("there is one of that name already")
            scores = claimed(submission, self.suite) if check == 0 else replay(submission, self.suite, check)
        except ValueError as error:
            self.refused[name] = str(error)
            return str(error)
        self.scores[name], self.figures[name] = scores, submission["figures"]
        self.rows_of[name] = rows_of(self.suite, int(submission["jobs"]))
        return ""

    def against(self, name: str, other: str) -> dict[str, Any]:
        """``scores.difference`` of two entrants on the jobs that both played."""
        _, a, b = np.intersect1d(self.rows_of[name], self.rows_of[other], return_indices=True)
        return difference(self.scores[name].take(a), self.scores[other].take(b))

    def rows(self) -> list[dict[str, Any]]:
        """One row an entrant, least time lost first. Entrants that cannot be told apart share a rank (``place`` =1)."""
        self._equal_jobs()
        rank = self._ranks()
        shared = list(rank.values())
        found = []
        for name, figures in self.figures.items():
            place = f"{'=' if shared.count(rank[name]) > 1 else ''}{rank[name]}" if name in rank else "-"
            head = {"rank": rank.get(name), "place": place, "entrant": name, "of": len(self.suite)}
            row: dict[str, Any] = {**head, **figures}
            row["by_stratum"] = by_stratum(self.scores[name], self.suite.strata[self.rows_of[name]])
            row["by_slots"] = self.by_slots(name)
            if name == "aa" and DEFAULT in self.scores:
                row["difference"] = self.against("aa", DEFAULT)
            found.append(row)
        return sorted(found, key=lambda row: (float(row[f"lost_{HORIZONS[0]}"]), row["entrant"]))

    def _ranks(self) -> dict[str, int]:
        """Of those that search, {name: rank}."""
        searching = {name: scores for name, scores in self.scores.items() if name not in UNRANKED and len(scores.gain)}
        most = max((len(scores.gain) for scores in searching.values()), default=0)
        full = {name: scores for name, scores in searching.items() if len(scores.gain) == most}
        rank = ranks(full) if full else {}
        for name in searching.keys() - full.keys():  # those with fewer jobs: behind all that are surely better
            rank[name] = 1 + sum(self.against(name, other)["steps_ci95"][0] > 0 for other in full)
        return rank

    def _equal_jobs(self) -> None:
        """Where all entrants played the same part of the suite, those that read the truth are judged on it too."""
        told = self.suite.told()
        played = {tuple(rows) for name, rows in self.rows_of.items() if name not in told}
        if len(played) == 1:
            rows = np.array(played.pop())
            self.rows_of |= dict.fromkeys(told, rows)
            self.scores |= {name: scores.take(rows) for name, scores in told.items()}
            self.figures |= {name: summary(self.scores[name]) | {"decision_us": 0.0} for name in told}

    def brief(self) -> tuple[list[str], list[list[str]]]:
        """Five columns: their heads, and a row an entrant."""
        return list(BRIEF.values()), [[COLUMNS[i][1](row) for i in BRIEF] for row in self.rows()]

    def by_slots(self, name: str) -> dict[str, dict[str, Any]]:
        """Gain delivered and time lost by the number of slots of a job."""
        scores, slots = self.scores[name], np.asarray(self.suite.jobs.n_slots)[self.rows_of[name]]
        found = {}
        for said, low, high in (("2-4", 0, 4), ("5-7", 5, 7), ("8-10", 8, 99)):
            part = scores.take(np.flatnonzero((slots >= low) & (slots <= high)))
            if len(part.gain):
                over = part.oracle_gain
                found[said] = {
                    "jobs": len(over),
                    "gain_delivered": round(float(part.gain.sum() / max(float(over.sum()), 1e-9)), 4),
                    "gain_delivered_ci95": bootstrap(part.gain, over=over),
                    "lost": round(float(part.lost[:, 0].mean()), 1),
                }
        return found

    def markdown(self) -> str:
        """The table, as it stands in the README."""
        lines = ["| " + " | ".join(head for head, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(_cell(say(row)) for _, say in COLUMNS) + " |" for row in self.rows()]
        for name, why in self.refused.items():
            lines.append(f"| | {_cell(name)} | refused: {_cell(why)} |" + " |" * (len(COLUMNS) - 3))
        return "\n".join(lines) + "\n"


def filed_results(suite: str, root: Path | None = None) -> dict[str, Any]:
    """What is on record of a suite by its name: the day, and the submissions. Raises ValueError when nothing is."""
    try:
        folder = resources.files("dynamiccl.envs") if root is None else root / "envs"
        found: dict[str, Any] = json.loads(folder.joinpath(RESULTS, _file_of(suite)).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"no results of suite {suite} are on record ({error}): make bench") from error
    return found


def put_on_record(suite: str, submissions: Sequence[Mapping[str, Any]], root: Path | None = None) -> list[Path]:
    """Write a suite's results to ``envs/results/`` and all suites' tables into ``envs/README.md``; returns the files.

    Entrants on record that were not played now stay, as long as they are of the same jobs. ``root`` is the checkout.
    Raises ValueError when the suite is not a shipped one.
    """
    if suite not in SUITES:
        raise ValueError(f"only the results of {', '.join(SUITES)} go on record, not those of {suite}")
    root = root or Path(__file__).resolve().parents[2]
    file, readme = root / "envs" / RESULTS / _file_of(suite), root / "envs" / "README.md"
    played = {str(s["entrant"]): s for s in submissions}
    try:
        old = filed_results(suite, root)["submissions"]
    except ValueError:
        old = []
    digests = {s["digest"] for s in submissions}
    kept = {str(s["entrant"]): s for s in old if s["digest"] in digests} | played
    order = {name: i for i, name in enumerate(entrants())}
    lines = [json.dumps(kept[name]) for name in sorted(kept, key=lambda name: (order.get(name, 99), name))]
    head = {"made_by": "make bench", "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "suite": suite}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(head)[:-1] + ', "submissions": [\n' + ",\n".join(lines) + "\n]}\n")
    if not readme.exists():
        return [file]
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), tables(root)), encoding="utf-8")
    return [file, readme]


def tables(root: Path | None = None, check: int | None = 0) -> str:
    """The tables of ``envs/README.md``, from the results on record, of which ``check`` jobs of each entrant are played
    again. Raises ValueError when one does not hold."""
    parts = []
    for name in SUITES:
        try:
            found = filed_results(name, root)
        except ValueError:
            continue
        board = Board(JobSuite.load(name))
        for submission in found["submissions"]:
            reason = board.judge(submission, check)
            if reason:
                raise ValueError(f"{name}: {submission.get('entrant')}: {reason}")
        played = max(int(submission["jobs"]) for submission in found["submissions"])
        of = f"{played} of {len(board.suite)} jobs" if played < len(board.suite) else f"{played} jobs"
        parts.append(f"Suite `{name}`, {of}, {found['date']}, simulated:\n\n{board.markdown()}")
    return "\n".join(parts) or NOTHING


def with_tables(readme: str, text: str, mark: str = "board") -> str:
    """The README with ``text`` between its marks. Raises ValueError when it has none."""
    new, n = re.subn(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: f"{m[1]}{text}{m[2]}", readme, flags=re.DOTALL
    )
    if n != 1:
        raise ValueError(f"the README needs one <!-- {mark} --> and one <!-- /{mark} --> on lines of their own")
    return new


def _file_of(suite: str) -> str:
    return f"board_{suite.replace('-', '_')}.json"
