"""What ``dynamiccl tune`` shows: one line a window, a progress bar, and the result as tables."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ...traces.reasons import RunEnds
from ..report.summary import RunSummary
from ..report.terminal import grid, terminal
from ..report.texts import DECISIONS, NUMBERS, decision_rows, emulation_text
from .tuner import WindowLine

_COLOURS = {"kept": "bold green", "rolled back": "yellow", "given up": "yellow"}

#: What to do about a run that came to nothing, by the name of its reason.
_CURES = {
    "other-backend": "Run the job on NCCL, or try it on the emulated cluster: dynamiccl tune --cluster dgx-h100-2x8",
    "no-step": "A step is a step of an optimizer: where none steps, as in inference, nothing is tuned.",
}
_TOO_SHORT = "It was too short for a verdict: let it take more steps, or run it where less runs beside it."


class LiveView:
    """Prints lines on stderr, above a progress bar where it has the terminal for itself (``alone``)."""

    def __init__(self, total: int, quiet: bool = False, alone: bool = True) -> None:
        self.console = terminal(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} windows"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not alone or not self.console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("starting", total=total)

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=text)
        if self._progress.disable:
            self.console.print(f"dynamiccl: {text}", markup=False)

    def window(self, line: WindowLine) -> None:
        """One window was measured."""
        self._progress.update(self._task, completed=line.index, description=line.phase)
        self.console.print(str(line), style=_COLOURS.get(line.verdict, ""), markup=False)


def show_summary(console: Console, s: RunSummary) -> None:
    """The result, for people."""
    console.print()
    if s.emulated:
        console.print(f"{emulation_text(vars(s))}: these are not GPU times", style="yellow")
    if s.speedup is None:
        console.print(f"no result: {s.ended}. What was seen is kept in {s.trace}", style="bold")
        for name in s.reasons["ended"]:
            if name in _CURES:
                console.print(_CURES[name], markup=False)
        if s.reasons["ended"] == ["job-status"] and s.job_status == 0 and (s.windows or s.decisions):
            console.print(_TOO_SHORT, markup=False)
    else:
        console.print(f"{s.speedup_text()}  step {s.default_step_ms:.0f} -> {s.tuned_step_ms:.0f} ms", style="bold")
        if s.family:
            console.print(
                f"of random jobs of the emulated family {s.family['less']:.0%} have less to gain than this one; "
                f"their median has {s.family['median']:.1%}",
                style="yellow",
            )
        if s.memory and s.memory.get("jobs"):
            console.print(f"memory: {s.memory['text']}", markup=False)
        console.print("the table stays in force" if s.kept else s.dropped or RunEnds.NO_GAIN(), markup=False)
    if s.failure:
        console.print(f"FAILURE: {s.failure}", style="bold red", markup=False)
    for text in s.not_obeyed:
        console.print(text, style="yellow", markup=False)
    if s.decisions:
        console.print(grid(DECISIONS, decision_rows(s), NUMBERS, title="decisions"))
    calls, bad = s.consistency["calls_checked"], s.consistency["mismatches"]
    console.print(f"{calls} collectives checked across ranks, {bad} mismatches")
    if s.records_lost:
        console.print(f"{s.records_lost} records were lost: the tuner could not keep up", style="yellow")
    console.print(f"trace   {s.trace}\nreport  {s.report}")
    if s.table:
        console.print(f"again, without a tuner: dynamiccl apply {s.table} -- COMMAND", markup=False)
