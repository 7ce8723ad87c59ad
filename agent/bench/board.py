"""The board: entrants that were judged on the same jobs of one suite, as rows and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...envs.bench.job_suites import JobSuite
from ...envs.bench.scores import Scores, bootstrap, by_stratum, ranks, summary
from ...envs.bench.submissions import AGAIN, claimed, replay, rows_of
from ...envs.search.config import HORIZON
from .run import READERS, UNRANKED

#: World of which most steps are not played but extrapolated: a table may be lost and found again in them.
MOVING = "moving"
#: A row of the board, see :meth:`Board.rows`.
Row = Mapping[str, Any]
#: What a row says beside the entrant's name.
REMARKS = {
    "lstm": "(ours)",
    "expected-improvement": "(rule on the belief)",
    AGAIN: "(expected-improvement again, other noise: A/A)",
    "static-best": "(each collective's quickest config alone; the sweep is not counted)",
    "random": "(random settings)",
    "coordinate-descent": "(as AutoCCL)",
    "nvidia-price": "(NCCL's own price of an SM)",
    "thompson": "(a small search: Thompson sampling on the belief)",
    "sweep": "(as FlagCX)",
    "oracle": "(knows the truth)",
}


def _between(interval: Sequence[float], form: str = ",.0f") -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def _steps(spread: Sequence[float | None] | None) -> str:
    """Median and p90; an event that too few jobs saw for it is told as never."""
    if spread is None:
        return "-"
    return ", ".join("never" if value is None else f"{value:,.0f}" for value in spread[1:])


def _of_search(row: Row, key: str) -> str:
    """Steps to an event of the search; an entrant that searches nothing has none, an old submission may not tell."""
    return "-" if row["entrant"] in READERS else _steps(row.get(key))


def _name(row: Row) -> str:
    name = row["entrant"]
    remark = REMARKS.get(name, "")
    return f"{name} {remark}".strip()


def _entrant(row: Row) -> str:
    return str(row["entrant"])


def legend() -> str:
    """Who the entrants are, once for all tables of a page."""
    return ", ".join(f"`{name}` {remark}" for name, remark in REMARKS.items()) + "."


def _lost(row: Row) -> str:
    interval = _between(row["lost_ci95"])
    return f"{row['lost']:,.0f} {interval}"


def _calm(row: Row) -> str:
    if row["calm"] is None:
        return "-"
    mean, interval = row["calm"]
    return f"{mean:,.0f} {_between(interval)}"


def _gain(row: Row) -> str:
    interval = _between(row["gain_delivered_ci95"], ".0%")
    return f"{row['gain_delivered']:.0%} {interval}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


#: Columns of the table: heading, how a row says it, what it means.
COLUMNS: tuple[tuple[str, Callable[[Row], str], str], ...] = (
    (
        "",
        lambda row: row["place"],
        "the rank; = marks entrants that are statistically tied, - those without a rank",
    ),
    ("policy", _name, "its name as `bench --policy` takes it"),
    (
        "steps lost [95 %]",
        _lost,
        f"what a job of {HORIZON:,} steps lost, in default steps, compared with the best table from the start; "
        "100 are 0.5 %",
    ),
    (
        f"without `{MOVING}`",
        _calm,
        f"the same of all other worlds: in `{MOVING}` the steps that are not played decide, and they scatter most",
    ),
    ("gain delivered [95 %]", _gain, "the final tables' share of the gain that the best tables have"),
    (
        "to the first gain",
        lambda row: _of_search(row, "steps_to_first_gain"),
        "steps until the first table was kept, in jobs that can gain 1 %",
    ),
    (
        "to the verdict",
        lambda row: _of_search(row, "steps_to_verdict"),
        "steps until the search ended; nine of ten jobs need fewer than the second number",
    ),
    (
        "until nothing is tried",
        lambda row: _of_search(row, "steps_to_quiet"),
        "steps until the policy has tried the last table, trials after the verdict included",
    ),
    (
        "a step above 1.5 x",
        lambda row: f"{row['harsh']:.0%}",
        "jobs in which a setting that was tried made a step take more than 1.5 default steps",
    ),
    (
        "end slower",
        lambda row: f"{row['slower']:.1%}",
        "jobs whose final table is slower than the default, by the simulator's truth",
    ),
)


#: Columns that a terminal has room for, and their heads there.
BRIEF = {0: "", 1: "policy", 2: "lost of 20,000 steps", 4: "of the gain", 6: "steps to verdict (median, p90)"}


def meanings(places: Iterable[int]) -> list[str]:
    """One line for each of these columns: its heading and its meaning."""
    found = []
    for place in places:
        head, _, meaning = COLUMNS[place]
        found.append(f"{BRIEF.get(place) or head or 'rank'}: {meaning}")
    return found


class Board:
    """Judges submissions on ``jobs`` jobs of one suite (all), evenly over it, and keeps those that hold. What reads the
    truth is on it from the start."""

    def __init__(self, suite: JobSuite, jobs: int | None = None) -> None:
        self.suite, rows = suite, rows_of(suite, jobs)
        self.strata = suite.strata[rows]
        self.scores: dict[str, Scores] = {name: scores.take(rows) for name, scores in suite.told().items()}
        self.figures: dict[str, Mapping[str, Any]] = {
            name: summary(scores) | {"decision_us": 0.0} for name, scores in self.scores.items()
        }
        self.refused: dict[str, str] = {}

    @property
    def n_jobs(self) -> int:
        """Jobs that each entrant plays."""
        return len(self.strata)

    @property
    def title(self) -> str:
        """Which jobs of which suite."""
        n, of = len(self.strata), len(self.suite)
        return (
            f"Suite `{self.suite.name}`, {n} of {of} jobs"
            if n < of
            else f"Suite `{self.suite.name}`, {n} jobs"
        )

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
            if len(scores.gain) != len(self.strata):
                raise ValueError(f"it played {len(scores.gain)} jobs, this board is of {len(self.strata)}")
        except ValueError as error:
            self.refused[name] = str(error)
            return str(error)
        # Only these figures were checked: it may have more, which are not to be believed.
        told = {"decision_us": submission["figures"]["decision_us"]}
        self.scores[name], self.figures[name] = scores, summary(scores) | told
        return ""

    def rows(self) -> list[dict[str, Any]]:
        """One row an entrant, least time lost first. Entrants that cannot be told apart share a rank (``place`` =1)."""
        rank = ranks({name: scores for name, scores in self.scores.items() if name not in UNRANKED})
        shared = list(rank.values())
        found = []
        for name, figures in self.figures.items():
            place = f"{'=' if shared.count(rank[name]) > 1 else ''}{rank[name]}" if name in rank else "-"
            row: dict[str, Any] = {"rank": rank.get(name), "place": place, "entrant": name, **figures}
            row["by_stratum"] = by_stratum(self.scores[name], self.strata)
            calm = self.scores[name].lost[self.strata != MOVING]
            is_other = 0 < len(calm) < self.n_jobs
            row["calm"] = (float(calm.mean()), bootstrap(calm)) if is_other else None
            found.append(row)
        return sorted(found, key=lambda row: (float(row["lost"]), row["entrant"]))

    def brief(self) -> tuple[list[str], list[list[str]]]:
        """Five columns: their heads, and a row an entrant."""
        return list(BRIEF.values()), [[COLUMNS[i][1](row) for i in BRIEF] for row in self.rows()]

    def markdown(self) -> str:
        """The table, as it stands in the README; :func:`legend` says who the entrants are."""
        says = [_entrant if say is _name else say for _, say, _ in COLUMNS]
        lines = ["| " + " | ".join(head for head, *_ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(_cell(say(row)) for say in says) + " |" for row in self.rows()]
        for name, why in self.refused.items():
            lines.append(f"| | {_cell(name)} | refused: {_cell(why)} |" + " |" * (len(COLUMNS) - 3))
        return "\n".join(lines) + "\n"
