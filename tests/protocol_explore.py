"""Explores every state of the model in protocol_model.py: ``python tests/protocol_explore.py`` or ``make model-check``.

Without options the whole list of scopes, on two cores. Prints the number of states, or the way to a violation. A state
that was met before is known by 64 bits of it: of ten million states one is taken for another with a chance of 3 in a
million. Ranks above 0 are interchangeable, and so are states that differ only in which of them is which.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass

from protocol_model import Model
from protocol_world import Scope, World, fingerprint

#: What `make model-check` explores: every kind of bad luck, and those that may meet. The longest first.
WHOLE = {
    "two lost attempts": Scope(steps=3, attempts=2),
    "two tables": Scope(steps=2, tables=2, attempts=2),
    "a skipped step": Scope(steps=3, skips=1),
    "two skipped steps": Scope(steps=3, skips=2, attempts=2),
    "a pass of its own": Scope(steps=3, extras=1, attempts=2),
    # Both at once, without a profiler, is what the protocol cannot undo (see its docstring): the table stays.
    "no profiler, a skipped step": Scope(steps=2, skips=1, profiler=False),
    "no profiler, a pass of its own": Scope(steps=2, extras=1, profiler=False),
    "a broken network": Scope(steps=3, breaks=1, attempts=1),
    "a skipped step and a broken network": Scope(steps=2, skips=1, breaks=1, attempts=1),
    "a death, a broken network, a closing": Scope(steps=2, deaths=1, breaks=1, closes=True, attempts=1),
    "a daemon that dies and comes back": Scope(steps=2, daemon_deaths=1, attempts=2),
    "a daemon that dies, a skipped step": Scope(steps=2, daemon_deaths=1, skips=1, attempts=2),
    "far ahead": Scope(steps=3, skew=2, attempts=1),
    "three ranks, a skipped step": Scope(n_ranks=3, steps=1, skips=1, attempts=1),
    "three ranks, a death": Scope(n_ranks=3, steps=1, deaths=1, attempts=1),
    "three ranks, a broken network": Scope(n_ranks=3, steps=1, breaks=1, attempts=1),
    "three ranks": Scope(n_ranks=3, steps=1, attempts=1),
}


@dataclass(frozen=True)
class Result:
    """What an exploration found, and the shortest way to a violation if there is one."""

    states: int
    transitions: int
    switched: int  # states in which some rank runs under a table
    depth: int  # moves from the start to the farthest of them
    whole: bool = True  # there are no others
    violation: tuple[str, ...] = ()

    def story(self) -> str:
        """The violation, a line a step."""
        return "\n".join(f"{i:3}. {step}" for i, step in enumerate(self.violation, 1))


def explore(scope: Scope, most_states: int | None = None, progress: bool = False) -> Result:
    """Breadth first, every state once: a violation is reached by a shortest story.

    ``most_states`` ends it with the level in which there are so many.
    """
    model = Model(scope)
    start = model.start()
    first = fingerprint(start)
    came_from: dict[int, int] = {first: first}
    settled: set[int] = set()
    level, transitions, switched, depth = [start], 0, 0, 0

    def result(mark: int, *end: str) -> Result:
        way = [mark]
        while way[0] != first:
            way.insert(0, came_from[way[0]])
        story, world = list[str](), start
        for mark in way[1:]:
            moves = ((what, after) for what, after, _ in model.moves(world) if fingerprint(after) == mark)
            what, world = next(moves)
            story.append(what)
        return Result(len(came_from), transitions, switched, depth, False, (*story, *end))

    def known(world: World) -> bool:
        return fingerprint(world) in settled

    while level and (most_states is None or len(came_from) < most_states):
        following = []
        for world in level:
            mark = fingerprint(world)
            switched += any(rank is not None and rank.table for rank in world.ranks)
            if stuck := model.is_stuck(world):
                return result(mark, stuck)
            path, wrong = model.settles(world, known)
            if wrong:
                return result(mark, "from here on all goes well", wrong)
            settled.update(map(fingerprint, path))
            for what, after, wrong in model.moves(world):
                transitions += 1
                if wrong:
                    return result(mark, what, wrong)
                if (then := fingerprint(after)) not in came_from:
                    came_from[then] = mark
                    following.append(after)
        level = following
        depth += 1
        if progress:
            print(f"depth {depth}: {len(came_from)} states, {transitions} transitions", flush=True)
    return Result(len(came_from), transitions, switched, depth, not level)


def _explored(name: str, most_states: int | None = None) -> tuple[str, Result, float]:
    began = time.process_time()
    return name, explore(WHOLE[name], most_states), time.process_time() - began


def main() -> int:
    """Explore the whole list; 1 if there is a violation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scopes", nargs="*", metavar="SCOPE", help=f"some of: {'; '.join(WHOLE)}")
    parser.add_argument("--most-states", type=int, help="end each scope after so many states")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    began, bad = time.monotonic(), 0
    work = [(name, options.most_states) for name in options.scopes or WHOLE]
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        for n, (name, found, took) in enumerate(pool.imap_unordered(_apply, work, chunksize=1), 1):
            bad += bool(found.violation)
            extent = "all" if found.whole else f"the first {found.depth} moves of all"
            print(
                f"[{n}/{len(work)}, {time.monotonic() - began:.0f} s] {name}: {extent} {found.states} states, "
                f"{found.transitions} transitions, {found.switched} under a table, {took:.0f} s of a core: "
                + (f"VIOLATION\n{found.story()}" if found.violation else "no violation"),
                flush=True,
            )
    return int(bool(bad))


def _apply(work: tuple[str, int | None]) -> tuple[str, Result, float]:
    return _explored(*work)


if __name__ == "__main__":
    raise SystemExit(main())
