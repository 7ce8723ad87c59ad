"""Puts the results of ``dynamiccl bench`` on record: ``python tests/tools/make_board.py SUITE [FOLDER]``
(``make bench``).

Writes the submissions of ``FOLDER`` (runs/bench/SUITE) to ``envs/results/``, and all suites' tables into
``envs/README.md``. Entrants on record that were not played now stay, as long as they are of the same jobs and of this
search: if they name another one, all their decisions are played again. Those that name none stay, and are printed.
"""

import datetime
import json
import re
import sys
from pathlib import Path

from dynamiccl.agent.bench.board import Board, legend
from dynamiccl.agent.bench.run import ENTRANTS
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.sources import search_digest
from dynamiccl.envs.bench.strata import SUITES, filed
from dynamiccl.envs.bench.submissions import replay

ROOT = Path(__file__).resolve().parents[2]


def put_on_record(suite, submissions, envs=ROOT / "envs"):
    """Write a suite's results and the README's tables; returns the files. Raises ValueError when the suite is not a
    shipped one, or when a result of another search does not hold in this one."""
    if suite not in SUITES:
        raise ValueError(f"only the results of {', '.join(SUITES)} go on record, not those of {suite}")
    try:
        old = filed(suite, envs)["submissions"]
    except ValueError:
        old = []
    jobs = JobSuite.load(suite)
    for one in submissions:
        if one.get("search") != search_digest():
            replay(one, jobs)
    kept = {s["entrant"]: s for s in [*still_valid(old, submissions, jobs), *submissions]}
    order = {name: i for i, name in enumerate(ENTRANTS)}
    lines = [json.dumps(kept[name]) for name in sorted(kept, key=lambda name: (order.get(name, 99), name))]
    head = {
        "made_by": "make bench",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "suite": suite,
    }
    file, readme = envs / "results" / f"board_{suite.replace('-', '_')}.json", envs / "README.md"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(head)[:-1] + ', "submissions": [\n' + ",\n".join(lines) + "\n]}\n")
    readme.write_text(with_tables(readme.read_text(encoding="utf-8"), tables(envs)), encoding="utf-8")
    return [file, readme]


def still_valid(old, submissions, suite):
    """The entries on record that stay beside new ones; prints those that were checked or could not be."""
    same = {(s["digest"], s["jobs"]) for s in submissions}
    again = {s["entrant"] for s in submissions}
    for entry in old:
        name = entry["entrant"]
        if name in again or (entry["digest"], entry["jobs"]) not in same:
            continue
        if "search" not in entry:
            print(
                f"{name}: kept, though it does not name its search: bench --filed plays its decisions again"
            )
        elif entry["search"] != search_digest():
            try:
                replay(entry, suite)
            except ValueError as error:
                print(f"{name}: dropped: {error}")
                continue
            print(
                f"{name}: kept: made with search {entry['search']}, its decisions give the same in this one"
            )
        yield entry


def tables(envs=ROOT / "envs", check=0):
    """The tables of ``envs/README.md``, from the results on record, of which ``check`` jobs of each entrant are played
    again. Raises ValueError when one does not hold."""
    parts = []
    for name in SUITES:
        try:
            found = filed(name, envs)
        except ValueError:
            continue
        jobs = max(int(submission["jobs"]) for submission in found["submissions"])
        board = Board(JobSuite.load(name), jobs)
        for submission in found["submissions"]:
            if reason := board.judge(submission, check):
                raise ValueError(f"{name}: {submission.get('entrant')}: {reason}")
        parts.append(f"{board.title}, {found['date']}, simulated:\n\n{board.markdown()}")
    return "\n".join([*parts, f"{legend()}\n"])


def with_tables(readme, text):
    """The README with ``text`` between its marks. Raises ValueError when it has none."""
    marks = r"(<!-- board -->\n).*?(<!-- /board -->)"
    new, n = re.subn(marks, lambda m: f"{m[1]}{text}{m[2]}", readme, flags=re.DOTALL)
    if n != 1:
        raise ValueError("the README needs one <!-- board --> and one <!-- /board --> on lines of their own")
    return new


if __name__ == "__main__":
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else f"runs/bench/{sys.argv[1]}")
    results = [
        json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != "board.json"
    ]
    print("written:", *put_on_record(sys.argv[1], results))
