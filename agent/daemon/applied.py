"""A job under a fixed table: its step times beside some of NCCL's default, and what takes the table back.

For ``dynamiccl apply``. Turns of a window each, in the order table, default, default, table, so that steady drift
favours neither. If this watch dies, the job runs on as the ranks agreed last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from ...envs.nccl.run_folder import STOP
from ...envs.nccl.shm import RunFolder
from ...envs.nccl.site_switch import switched_off
from ...traces.reasons import RunEnds, Why
from ...traces.records import STEP, STEP_DTYPE, Table

#: Steps of a turn that count; those before them that do not: of a job that warms up, and after a change of tables.
TURN_STEPS, WARM_UP, DISCARD = 20, 5, 2
#: Whether the table is in force, turn by turn; after the last turn it stays.
TURNS = (True, False, False, True)
#: Seconds between two looks, while steps are counted and later. The ring of a rank holds far more.
EVERY_S, LATER_S = 0.2, 1.0


class Watch:
    """Looks after the job of one run folder, whose table is published already."""

    def __init__(self, run: RunFolder, table: Table, note: str, say: Callable[[str | Why], None]) -> None:
        """``note``: what is to be said of all times, '' for nothing."""
        self.told = ""  # the step times, once they are measured
        self._run, self._note, self._say = run, note, say
        ceilings = tuple(rule for rule in table.rules if rule.threads)
        self._rules = {True: table.rules, False: ceilings}
        self._generation = table.generation
        self._turn, self._left_out = 0, WARM_UP
        self._ms: dict[bool, list[float]] = {True: [], False: []}
        self._is_over = threading.Event()

    def run(self) -> None:
        """Look until :meth:`end`, or until the table is taken back."""
        try:
            while not self._is_over.wait(LATER_S if self.told else EVERY_S):
                if self._is_taken_back():
                    return
                if not self.told:
                    self._count()
        except (OSError, ValueError) as error:  # somebody has cleaned up /dev/shm, or the ring is damaged
            self._say(f"the table stays as it is, and nothing is measured any more: {error}")

    def end(self) -> None:
        """The job is over."""
        self._is_over.set()

    def _is_taken_back(self) -> bool:
        if (self._run.path / STOP).exists():  # who made it withdraws the table
            self._say(RunEnds.STOPPED())
            return True
        if why := switched_off():
            self._publish(False)
            self._say(f"{RunEnds.SWITCHED_OFF(why=why)}: all ranks go back to NCCL's default")
            return True
        return False

    def _publish(self, has_table: bool) -> None:
        self._generation = self._run.table.generation() + 1
        self._run.table.publish(Table(self._generation, self._rules[has_table]))
        self._left_out = DISCARD

    def _count(self) -> None:
        for ring in self._run.rings():
            records = ring.drain()
            steps = records[records["kind"] == STEP].view(STEP_DTYPE)
            for step in steps[steps["rank"] == 0]:  # of other ranks the node of rank 0 decides
                if step["generation"] == self._generation and not self.told:
                    self._take(float(step["duration_ns"]) / 1e6)

    def _take(self, step_ms: float) -> None:
        """One step that ran under the table of the present turn."""
        if self._left_out:
            self._left_out -= 1
            return
        has_table = TURNS[self._turn]
        self._ms[has_table].append(step_ms)
        if len(self._ms[has_table]) < TURN_STEPS * TURNS[: self._turn + 1].count(has_table):
            return
        self._turn += 1
        if self._turn == len(TURNS):
            self.told = self._text()
            self._say(self.told)
        elif TURNS[self._turn] != has_table:
            self._publish(TURNS[self._turn])

    def _text(self) -> str:
        table, default = (_times(self._ms[has_table]) for has_table in (True, False))
        n_steps = len(self._ms[True])
        told = (
            f"a step takes {table} under the table, {default} under NCCL's default ({n_steps} steps of each"
        )
        return f"{told}, half of them within these limits{self._note})"


def _times(ms: list[float]) -> str:
    """The median, and the limits of the middle half."""
    low, middle, high = np.quantile(ms, [0.25, 0.5, 0.75])
    return f"{middle:.4g} ms ({low:.4g} to {high:.4g})"
