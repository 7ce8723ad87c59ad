"""What each part of the policy is worth: ``python tests/make_ablation.py [FOLDER]`` (about a quarter of an hour).

Trains the policy whole and without each part, all on the same, smaller budget and seed, and plays both suites. Writes
``agent/ablation.json`` and the README's table; training can be cut short and goes on where it was.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy

from dynamiccl.agent.board import with_tables
from dynamiccl.agent.policy import PARTS
from dynamiccl.agent.stopping import Stopping
from dynamiccl.agent.train import Settings, Training, simulator
from dynamiccl.envs.arena import SUITES, Arena, Suite, play
from dynamiccl.envs.leaderboard import bootstrap, per_task, summary

ROOT = Path(__file__).parents[1]
FILE, README = ROOT / "agent" / "ablation.json", ROOT / "README.md"
BUDGET = Settings(prior=1_048_576, steps=1_048_576)
VARIANTS = {
    "whole": BUDGET,
    **{f"without {part}": dataclasses.replace(BUDGET, without=(part,)) for part in PARTS},
    "one cluster": dataclasses.replace(BUDGET, one_cluster=True),
}
REPEATS = 4


def trained(name: str, settings: Settings, folder: Path) -> Training:
    """The variant, trained to the end."""
    checkpoint = folder / (name.replace(" ", "-") + ".checkpoint")
    training = Training(settings, simulator(settings), lambda policy: {}, checkpoint)
    if checkpoint.exists():
        training.resume()
    training.run(lambda done, total, row: print(f"{name}: {done / total:.0%}", file=sys.stderr, flush=True))
    return training


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, Any]] = {}
    whole: dict[str, Any] = {}
    for name, settings in VARIANTS.items():
        policy = Stopping(trained(name, settings, folder).light())
        rows[name] = {}
        for suite in SUITES:
            tasks = Suite.load(suite)
            played = play(policy, Arena(tasks, REPEATS))
            # Runs of one task are not independent of each other: intervals are over tasks.
            regret = per_task(played)["regret"].reshape(REPEATS, len(tasks)).mean(axis=0)
            whole.setdefault(suite, regret)
            figures = summary(played)
            rows[name][suite] = {
                "regret": figures["regret"],
                "more_than_whole": round(float((regret - whole[suite]).mean()), 3),
                "more_than_whole_ci95": bootstrap(regret - whole[suite]),
                "share_of_gain": figures["share_of_gain"]["64"],
                "share_of_gain_4": figures["share_of_gain"]["4"],
            }
        print(name, json.dumps(rows[name]), flush=True)
    settings = {k: v for k, v in dataclasses.asdict(BUDGET).items() if k not in ("without", "one_cluster")}
    found = {"settings": settings, "repeats": REPEATS, "variants": rows}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    README.write_text(with_tables(README.read_text(), table(found), "ablation"))


def table(found: dict[str, Any]) -> str:
    """The README's table of ``ablation.json``."""
    lines = [
        "| trained | " + " | ".join(f"{suite}: regret | more than whole | gain at 4, at 64" for suite in SUITES) + " |"
    ]
    lines.append("|---|" + "---|" * 3 * len(SUITES))
    for name, by_suite in found["variants"].items():
        cells = [name]
        for row in (by_suite[suite] for suite in SUITES):
            low, high = row["more_than_whole_ci95"]
            more = "" if name == "whole" else f"{row['more_than_whole']:+.3f} [{low:+.3f}, {high:+.3f}]"
            cells += [f"{row['regret']:.3f}", more, f"{row['share_of_gain_4']:.0%}, {row['share_of_gain']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/ablation"))
