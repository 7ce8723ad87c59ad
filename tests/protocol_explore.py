"""Explores every state of the model in protocol_model.py: ``python tests/protocol_explore.py`` or ``make model-check``.

Without options the whole scope, in minutes and on one core. Prints the number of states, or the way to a violation.
"""

from __future__ import annotations

import argparse
import marshal
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from protocol_model import DEAD, PASSED, STOPPED, Explorer, Scope, World


@dataclass(frozen=True)
class Result:
    """What an exploration found, and the shortest way to a violation if there is one."""

    states: int
    transitions: int
    depth: int
    switched: int  # states in which some rank runs under a table
    ends: frozenset[tuple[Any, ...]] = frozenset()  # of each state in which all live ranks have stopped: their tables
    violation: tuple[str, ...] = ()

    def story(self) -> str:
        """The violation, a line a step."""
        return "\n".join(f"{i:3}. {step}" for i, step in enumerate(self.violation, 1))


def explore(scope: Scope, progress: bool = False) -> Result:
    """Breadth first, every state once: a violation is reached by a shortest story.

    A state is kept as its 128-bit hash, with that of the state it was reached from: among n states the odds that two
    share one are below n^2 / 2^129, that is 2e-24 for 30 million.
    """
    explorer = Explorer(scope)
    start = explorer.start()
    came_from: dict[bytes, bytes] = {digest(start): b""}
    frontier, transitions, depth, switched = [start], 0, 0, 0
    ends = set()
    while frontier:
        level, frontier = frontier, []
        for world in level:
            here = digest(world)
            steps = 0
            for what, after, wrong in explorer.moves(world):
                steps += what.startswith("rank") and not what.endswith("dies")
                transitions += 1
                if wrong:
                    story, world = retold(explorer, came_from, here)
                    what, wrong = next((what, wrong) for what, _, wrong in explorer.moves(world) if wrong)
                    told = (*story, what, wrong)
                    return Result(len(came_from), transitions, depth, switched, frozenset(ends), told)
                if scope.reduce:
                    after = explorer.canonical(after)
                key = digest(after)
                if key not in came_from:
                    came_from[key] = here
                    frontier.append(after)
            live = [explorer.fields[m] for m, _ in world.ranks if m != DEAD]
            if not steps and any(fields[1] not in PASSED for fields in live):
                told = (*retold(explorer, came_from, here)[0], "nobody can go on: the ranks wait for ever")
                return Result(len(came_from), transitions, depth, switched, frozenset(ends), told)
            switched += any(fields[3] for fields in live)
            if live and all(fields[1] == STOPPED for fields in live):
                ends.add(tuple(sorted((fields[0], fields[3]) for fields in live)))
        depth += 1
        if progress:
            print(f"depth {depth}: {len(came_from)} states, {transitions} transitions", flush=True)
    return Result(len(came_from), transitions, depth, switched, frozenset(ends))


def digest(world: World) -> bytes:
    """Identity of a world, 16 bytes."""
    return blake2b(marshal.dumps(tuple(world), 2), digest_size=16).digest()


def retold(explorer: Explorer, came_from: dict[bytes, bytes], at: bytes) -> tuple[list[str], World]:
    """The steps from the start to the state with this digest, and that state, with ranks and numbers as they were."""
    path = [at]
    while came_from[path[0]]:
        path.insert(0, came_from[path[0]])
    world, story = explorer.start(), []
    for wanted in path[1:]:
        for what, after, _ in explorer.moves(world):
            if digest(explorer.canonical(after) if explorer.scope.reduce else after) == wanted:
                world = after
                story.append(what)
                break
        else:
            raise AssertionError(f"merged with {world}, but without its future")
    return story, world


def main() -> int:
    """Explore the whole scope, or the one given; 1 if there is a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ranks", "generations", "deaths", "faults", "restarts", "skew"):
        field = "n_ranks" if name == "ranks" else name
        parser.add_argument(f"--{name}", dest=field, type=int, default=getattr(Scope(), field))
    scope = Scope(**vars(parser.parse_args()))
    began = time.monotonic()
    found = explore(scope, progress=True)
    print(scope)
    print(
        f"{found.states} states, {found.transitions} transitions, depth {found.depth}, {found.switched} states under a "
        f"table, {time.monotonic() - began:.0f} s: "
        + (f"VIOLATION\n{found.story()}" if found.violation else "no violation")
    )
    return int(bool(found.violation))


if __name__ == "__main__":
    raise SystemExit(main())
