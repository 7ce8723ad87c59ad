"""What does a search still find under a small budget? The LSTM on the boards' jobs, beside its filed entry of 5 %.

  python tests/tools/budget.py play ROWS.csv [--budget 0.01]
  python tests/tools/budget.py show|page ROWS.csv

Jobs and noise are those of the boards (``envs/results/board_*.json``), step by step, so the rows pair with them.
``play`` appends a row per job, in parts that go round over the suites, and goes on where it stopped. ``show`` compares
suite by suite, ``page`` prints the cells of docs/evidence.md. Intervals are 95 %, bootstrapped over jobs. All of it is
simulated.
"""

import argparse
import json
from importlib import resources
from pathlib import Path

import numpy as np
from dynamiccl.agent.policies.choosing import DEFAULT, make_chooser
from dynamiccl.envs import bench
from dynamiccl.envs.bench.job_arena import AccountedWindows, play
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.scores import HARM, LossAccount, Scores, bootstrap
from dynamiccl.envs.bench.strata import SUITES, filed
from dynamiccl.envs.bench.submissions import rows_of
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch
from rows import append, read

FIELDS = ("suite", "job", "budget", "lost", "verdict", "gain", "best", "harsh", "slower")
#: Those of README's figures.
BOARDS = ("standard", "held-out", "unseen", "mpi-headroom")
#: How a job can end, beside the default.
HOW = ("end faster", "at the default", "slower")
#: Jobs that are played side by side.
PART = 20


def played(suite, rows, budget):
    """Scores of the default policy on the jobs at ``rows`` of a suite."""
    jobs = suite.jobs.take(rows)
    ledger = LossAccount(jobs, suite.best_us[rows])
    windows = AccountedWindows(jobs, NoiseStream(0, suite.numbers[rows], jobs.width), ledger)
    return play(
        make_chooser(DEFAULT), SimSearch(windows, Prior.load(), SearchConfig(budget=budget)), ledger
    ).scores


def entry(name):
    """The filed entry of the default policy, with the budget that ``tune`` has without the option."""
    return next(s for s in filed(name)["submissions"] if s["entrant"] == DEFAULT)


def play_all(path, budget):
    """Append the rows that are missing."""
    suites = {name: JobSuite.load(name) for name in BOARDS}
    wanted = {name: rows_of(suite, entry(name)["jobs"]) for name, suite in suites.items()}
    most = max(map(len, wanted.values())) // PART
    for k in range(most):
        for name, suite in suites.items():
            done = {int(r["job"]) for r in read(path) if r["suite"] == name}
            parts = max(len(wanted[name]) // PART, 1)
            rows = np.array([r for r in wanted[name][k::parts] if k < parts and int(r) not in done], int)
            if len(rows):
                append(path, FIELDS, lines_of(name, rows, budget, played(suite, rows, budget)))
                print(f"{name}: part {k + 1} of {parts}", flush=True)


def lines_of(name, rows, budget, scores):
    """The rows of the file for these jobs."""
    for k, row in enumerate(rows):
        figures = [scores.lost[k], scores.verdict[k], scores.gain[k], scores.oracle_gain[k]]
        flags = int(scores.is_harsh[k]), int(scores.is_harmed[k])
        yield [name, int(row), budget, *(f"{v:.5f}" for v in figures), *flags]


def pairs(rows, name):
    """Arrays by name of the jobs played: of these rows, and of the filed entry, in the same order."""
    mine = [r for r in rows if r["suite"] == name]
    submission = entry(name)
    n_jobs = len(json.loads((resources.files(bench) / SUITES[name]).read_text("utf-8"))["gain"])
    places = {int(row): k for k, row in enumerate(rows_of(range(n_jobs), submission["jobs"]))}
    scores = Scores.of(submission["scores"]).take(np.array([places[int(r["job"])] for r in mine], int))
    here = {key: np.array([float(r[key]) for r in mine]) for key in FIELDS[3:]}
    there = {
        "lost": scores.lost,
        "verdict": scores.verdict,
        "gain": scores.gain,
        "best": scores.oracle_gain,
        "harsh": scores.is_harsh.astype(float),
        "slower": scores.is_harmed.astype(float),
    }
    return here, there


def ends(found):
    """Shares of jobs that end under a faster table, at the default, and over HARM slower."""
    faster, slower = (found["gain"] > 0).mean(), (found["gain"] < -HARM).mean()
    return faster, 1 - faster - slower, slower


def figures(rows, names=BOARDS):
    """Of all jobs of these suites together: what each budget comes to, and their difference."""
    both = [pairs(rows, name) for name in names if any(r["suite"] == name for r in rows)]
    here, there = ({key: np.concatenate([b[k][key] for b in both]) for key in FIELDS[3:]} for k in (0, 1))
    told = {"jobs": len(here["lost"])}
    for budget, found in ("small", here), ("usual", there):
        told[budget] = {
            "ends": ends(found),
            "gain": found["gain"].sum() / found["best"].sum(),
            "gain_ci95": bootstrap(found["gain"], over=found["best"]),
            "lost": found["lost"].mean(),
            "harsh": found["harsh"].mean(),
            "verdict": np.nanmedian(found["verdict"]),
        }
    gap = here["lost"] - there["lost"]
    return told | {"more": gap.mean(), "more_ci95": bootstrap(gap)}


def percent(share):
    """``78 %``; below 1 % with a decimal: 0.5 % is not 0."""
    told = f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
    return told.replace("%", " %")


def ended(one):
    """``78 % end faster, 21 % at the default, 1 % slower``."""
    return ", ".join(f"{percent(share)} {how}" for share, how in zip(one["ends"], HOW, strict=True))


def cells(told):
    """Claim and figure of the row of docs/evidence.md."""
    small, usual = told["small"], told["usual"]
    low, high = told["more_ci95"]
    found = [
        f"{one['gain']:.0%} [{one['gain_ci95'][0]:.0%}, {one['gain_ci95'][1]:.0%}]" for one in (small, usual)
    ]
    return (
        "what `--budget 0.01` still finds",
        f"{told['jobs']:,} jobs of the boards, LSTM, the same noise, 1 % and 5 %: {ended(small)}, and {ended(usual)}; "
        f"of the gain {found[0]} and {found[1]} delivered; a step above 1.5 times the default in "
        f"{percent(small['harsh'])} and {percent(usual['harsh'])}; "
        f"loses {told['more']:.0f} [{low:.0f}, {high:.0f}] of 20,000 steps more",
    )


def line(title, told):
    parts = [f"{title:12} {told['jobs']:4} jobs"]
    for budget in ("small", "usual"):
        one = told[budget]
        ends_of = "/".join(f"{share:.1%}" for share in one["ends"])
        low, high = one["gain_ci95"]
        parts.append(
            f"{budget}: faster/default/slower {ends_of}, gain {one['gain']:.0%} [{low:.0%}, {high:.0%}], "
            f"lost {one['lost']:.0f}, harsh {one['harsh']:.0%}, verdict {one['verdict']:.0f}"
        )
    low, high = told["more_ci95"]
    return "  ".join([*parts, f"loses {told['more']:+.0f} [{low:.0f}, {high:.0f}] more"])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("play", "show", "page"))
    parser.add_argument("rows", type=Path)
    parser.add_argument("--budget", type=float, default=0.01)
    args = parser.parse_args()
    if args.what == "play":
        play_all(args.rows, args.budget)
    rows = read(args.rows)
    if args.what == "page":
        print(" | ".join(cells(figures(rows))))
        return
    for name in dict.fromkeys(r["suite"] for r in rows):
        print(line(name, figures(rows, (name,))))
    print(line("all", figures(rows)))


if __name__ == "__main__":
    main()
