"""Explores every state of the model in protocol_model.py: ``python tests/protocol_explore.py`` or ``make model-check``.

Without options the whole list of scopes, in minutes and on one core. Prints the number of states, or the way to a
violation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from protocol_model import Model
from protocol_world import Scope, World

#: What `make model-check` explores: every kind of bad luck, and those that may meet.
WHOLE = {
    "two lost attempts": Scope(steps=3, attempts=2),
    "two tables": Scope(steps=2, tables=2, attempts=2),
    "a skipped step": Scope(steps=3, skips=1),
    "two skipped steps": Scope(steps=3, skips=2, attempts=2),
    "a pass of its own": Scope(steps=3, extras=1, attempts=2),
    "no profiler, a skipped step and a pass of its own": Scope(steps=2, skips=1, extras=1, profiler=False),
    "a broken network": Scope(steps=3, breaks=1, attempts=1),
    "a skipped step and a broken network": Scope(steps=2, skips=1, breaks=1, attempts=1),
    "a death, a broken network, a closing": Scope(steps=2, deaths=1, breaks=1, closes=True, attempts=1),
    "far ahead": Scope(steps=3, skew=2, attempts=1),
    "three ranks": Scope(n_ranks=3, steps=1, attempts=1),
}


@dataclass(frozen=True)
class Result:
    """What an exploration found, and the shortest way to a violation if there is one."""

    states: int
    transitions: int
    switched: int  # states in which some rank runs under a table
    violation: tuple[str, ...] = ()

    def story(self) -> str:
        """The violation, a line a step."""
        return "\n".join(f"{i:3}. {step}" for i, step in enumerate(self.violation, 1))


def explore(scope: Scope, progress: bool = False) -> Result:
    """Breadth first, every state once: a violation is reached by a shortest story."""
    model = Model(scope)
    start = model.start()
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    settled: set[World] = set()
    frontier, transitions, switched, depth = [start], 0, 0, 0

    def result(world: World, *end: str) -> Result:
        story = list(end)
        while (step := came_from[world]) is not None:
            world, what = step
            story.insert(0, what)
        return Result(len(came_from), transitions, switched, tuple(story))

    while frontier:
        level, frontier = frontier, []
        for world in level:
            switched += any(rank is not None and rank.table for rank in world.ranks)
            if stuck := model.is_stuck(world):
                return result(world, stuck)
            path, wrong = model.settles(world, settled.__contains__)
            if wrong:
                return result(world, "from here on all goes well", wrong)
            settled.update(path)
            for what, after, wrong in model.moves(world):
                transitions += 1
                if wrong:
                    return result(world, what, wrong)
                if after not in came_from:
                    came_from[after] = (world, what)
                    frontier.append(after)
        depth += 1
        if progress:
            print(f"depth {depth}: {len(came_from)} states, {transitions} transitions", flush=True)
    return Result(len(came_from), transitions, switched)


def main() -> int:
    """Explore the whole list; 1 if there is a violation."""
    bad = 0
    for name, scope in WHOLE.items():
        began = time.monotonic()
        found = explore(scope)
        bad += bool(found.violation)
        print(
            f"{name}: {found.states} states, {found.transitions} transitions, {found.switched} under a table, "
            f"{time.monotonic() - began:.0f} s: "
            + (f"VIOLATION\n{found.story()}" if found.violation else "no violation"),
            flush=True,
        )
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
