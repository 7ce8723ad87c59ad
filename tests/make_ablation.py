"""What each part of the policy is worth: ``python tests/make_ablation.py [FOLDER]`` (about half an hour).

Trains the policy whole and without each part, all on the same, smaller budget and seed, and plays both suites; what the
shipped weights owe to their memory is asked at their own budget. Writes ``agent/ablation.json`` and the table in
``agent/README.md``; training can be cut short and goes on where it was.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy

from dynamiccl.agent.board import with_tables
from dynamiccl.agent.policy import PARTS, LstmPolicy
from dynamiccl.agent.stopping import Stopping
from dynamiccl.agent.train import Settings, Training, simulator
from dynamiccl.envs.arena import SUITES, Arena, Suite, play
from dynamiccl.envs.leaderboard import bootstrap, per_task, summary

ROOT = Path(__file__).parents[1]
FILE, README = ROOT / "agent" / "ablation.json", ROOT / "agent" / "README.md"
BUDGET = Settings(prior=1_048_576, steps=1_048_576)
#: Without statistics (there is no belief then) only memory tells what was measured; the last has not even that.
WITHOUT = [*((part,) for part in PARTS), ("statistics", "memory")]
#: The first of each group is what its others are compared with.
GROUPS: list[dict[str, Settings]] = [
    {
        "whole": BUDGET,
        **{f"without {', '.join(parts)}": dataclasses.replace(BUDGET, without=parts) for parts in WITHOUT},
        "one cluster": dataclasses.replace(BUDGET, one_cluster=True),
    },
    {"shipped": Settings(), "shipped, without memory": Settings(without=("memory",))},
]
REPEATS = 4

Rows = dict[str, dict[str, dict[str, Any]]]


def trained(name: str, settings: Settings, folder: Path) -> LstmPolicy:
    """The variant, trained to the end."""
    if name == "shipped":
        return LstmPolicy.load()
    checkpoint = folder / (name.replace(", ", "-").replace(" ", "-") + ".checkpoint")
    training = Training(settings, simulator(settings), lambda policy: {}, checkpoint)
    if checkpoint.exists():
        training.resume()
    training.run(lambda done, total, row: print(f"{name}: {done / total:.0%}", file=sys.stderr, flush=True))
    return training.light()


def judged(group: dict[str, Settings], folder: Path) -> Rows:
    """The figures of each policy of the group on each suite."""
    rows: Rows = {}
    first: dict[str, Any] = {}
    for name, settings in group.items():
        policy = Stopping(trained(name, settings, folder))
        rows[name] = {}
        for suite in SUITES:
            tasks = Suite.load(suite)
            played = play(policy, Arena(tasks, REPEATS))
            # Runs of one task are not independent of each other: intervals are over tasks.
            regret = per_task(played)["regret"].reshape(REPEATS, len(tasks)).mean(axis=0)
            more = regret - first.setdefault(suite, regret)
            figures = summary(played)
            rows[name][suite] = {
                "regret": figures["regret"],
                "more": round(float(more.mean()), 3),
                "more_ci95": bootstrap(more),
                "share_of_gain": figures["share_of_gain"]["64"],
                "share_of_gain_4": figures["share_of_gain"]["4"],
            }
        print(name, json.dumps(rows[name]), flush=True)
    return rows


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in dataclasses.asdict(BUDGET).items() if k not in ("without", "one_cluster")}
    groups = [judged(group, folder) for group in GROUPS]
    found = {"settings": settings, "repeats": REPEATS, "groups": groups}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    README.write_text(with_tables(README.read_text(), table(found), "ablation"))


def table(found: dict[str, Any]) -> str:
    """The README's table of ``ablation.json``."""
    lines = ["| trained | " + " | ".join(f"{s}: regret | more | gain after 4, 64 windows" for s in SUITES) + " |"]
    lines.append("|---|" + "---|" * 3 * len(SUITES))
    for group in found["groups"]:
        for i, (name, by_suite) in enumerate(group.items()):
            cells = [name]
            for row in (by_suite[suite] for suite in SUITES):
                low, high = row["more_ci95"]
                more = f"{row['more']:+.3f} [{low:+.3f}, {high:+.3f}]" if i else ""
                cells += [f"{row['regret']:.3f}", more, f"{row['share_of_gain_4']:.0%}, {row['share_of_gain']:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/ablation"))
