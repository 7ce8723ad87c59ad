"""The output of ``dynamiccl tune``: a live block on a terminal, with events above it; elsewhere one line per event.

At the end it prints the verdict and its evidence.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
import sys
import textwrap
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...envs.bench.strata import steps_to_verdict
from ...envs.live.job_ends import FEWEST_STEPS
from ...envs.sim.emulated.settings import Emulated
from ...traces.reasons import NotTuning, RunEnds
from ..policies.choosing import DEFAULT as POLICY
from ..report.summary import RunSummary
from ..report.terminal import BARS, terminal
from ..report.texts import consistency_text, emulation_text, result_lines
from ..report.verdict import DEFAULT, OWN, PHASES, change, ms, seconds, side, verdict
from .tuner import WindowLine

#: Cures for a run without result, by its reason.
_CURES = {
    NotTuning.OTHER_BACKEND: "Run the job on NCCL, or try it on the emulated cluster: "
    "dynamiccl tune --cluster dgx-h100-2x8",
    NotTuning.NOTHING: "Tuned are all_gather and reduce_scatter, and with --all-reduce DDP's all_reduce: the last bits "
    "of its sums change. Or shard the model: FSDP2 (fully_shard), DeepSpeed ZeRO, or FSDP of Accelerate or Lightning.",
    NotTuning.TOO_FEW_STEPS: f"Give the job at least {FEWEST_STEPS} steps: fewer seldom reach a verdict.",
    NotTuning.NO_STEP: "A step is a step of a PyTorch optimizer. A job without one, such as inference, is not tuned.",
}
#: Columns of a line without a terminal, and seconds between its progress lines.
WIDTH, EVERY_S = 80, 60.0
_BAR = 36


class Expected:
    """Steps that the default policy needs to its verdict, from the filed results of the standard suite, if any."""

    def __init__(self) -> None:
        self.steps = steps_to_verdict(POLICY)

    def after(self, now: int) -> int | None:
        """Median step of the verdict over jobs without one at step ``now``; None if no job took so long."""
        left = self.steps[bisect.bisect_right(self.steps, now) :]
        return int(statistics.median(left)) if left else None

    def told(self, budget: float) -> str:
        """The expected steps and cost of a run, before it starts."""
        n, told = len(self.steps), f"A search may cost up to {budget:.0%} of the job's time."
        if not n:
            return told
        low, middle, high = (self.steps[int(part * (n - 1))] for part in (0.1, 0.5, 0.9))
        return (
            f"{told} Its verdict takes {middle} steps in half of simulated jobs, {low} to {high} in 8 of 10."
        )


class _Unread:
    """A stream whose reader may go before the tuner does: what it does not take is lost, and no error comes of it.

    A pipe whose reader has died, a terminal that is gone and a full disk would otherwise end the tuner.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self.encoding, self.isatty = file, file.encoding, file.isatty

    def write(self, text: str) -> int:
        """All of it, as far as anybody can see."""
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """What can be written."""
        with contextlib.suppress(OSError):
            self._file.flush()


class LiveView:
    """Prints on stderr. ``alone``: no other program uses the terminal; ``quiet``: print nothing before the verdict."""

    def __init__(self, budget: float, quiet: bool = False, alone: bool = True) -> None:
        stderr = sys.stderr and _Unread(sys.stderr)  # None of a process that was started without one
        self.console = terminal(stderr=True, file=stderr, quiet=quiet, highlight=False, soft_wrap=True)
        self._is_live = alone and self.console.is_terminal and not quiet
        self._live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if self._is_live else None
        )
        self._expected, self._budget = Expected(), budget
        self._prefix, self._heard = "" if alone else "dynamiccl: ", time.monotonic()
        self._before: tuple[int, float] | None = None  # a window's last step, and when it came
        self._step_s, self._in_force = 0.0, DEFAULT
        self._recent: deque[tuple[float, bool]] = deque(maxlen=60)  # step times, and whether of the default

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        self.say(self._expected.told(self._budget))
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def window(self, line: WindowLine) -> None:
        """One window was measured."""
        now = time.monotonic()
        if self._before and line.last_step > self._before[0]:
            self._step_s = (now - self._before[1]) / (line.last_step - self._before[0])
        self._before = line.last_step, now
        self._recent.append((line.step_ms, line.table == DEFAULT))
        for text in line.events:
            self.say(f"step {line.last_step}: {text}")
        if self._live:
            self._live.update(self._block(line))
        elif now - self._heard > EVERY_S and line.phase in ("search", "verify"):
            self.say(f"step {line.last_step}: {'; '.join(self._parts(line))}")

    def say(self, text: str) -> None:
        """Print a line of the tuner."""
        self._heard = time.monotonic()
        text = f"{self._prefix}{text}"
        lines = (
            [text]
            if self._live
            else textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
        )
        self.console.print("\n".join(lines), markup=False)

    def _parts(self, line: WindowLine) -> list[str]:
        """The state of the run, in short."""
        best = (
            f"best so far {line.best[0]}, {change(1 / line.best[1])} in one window"
            if line.best
            else "no better table yet"
        )
        end = self._expected.after(line.last_step)
        left = (
            f"verdict in about {end - line.last_step} steps" if end else "the time of the verdict is unknown"
        )
        in_time = f" ({seconds((end - line.last_step) * self._step_s)})" if end and self._step_s else ""
        spent = f"cost {seconds(max(line.cost_s, 0))} of {seconds(line.budget_s)} allowed"
        return [PHASES.get(line.phase, line.phase), best, left + in_time, spent]

    def _block(self, line: WindowLine) -> Group:
        """The live block."""
        phase, best, left, spent = self._parts(line)
        is_over = line.phase in ("refine", "watch")
        on_trial = "none" if line.table in (DEFAULT, line.in_force, self._in_force) else line.table
        self._in_force = line.in_force
        head = (
            f"{phase}   current table: {side(line.in_force)}   on trial: {on_trial}   step {line.last_step}"
        )
        end = self._expected.after(line.last_step)
        done = round(_BAR * line.last_step / end) if end else 0
        bar = f"{'━' * done}{'─' * (_BAR - done)} " if end else ""
        rows = [Text(head, "bold"), *([] if is_over else [Text(bar + left)]), self._sparkline(line)]
        return Group(*rows, Text(best), Text(spent))

    def _sparkline(self, line: WindowLine) -> Text:
        """Step times of the last windows; those within the range of the default are dim."""
        times = [value for value, _ in self._recent]
        default = [value for value, is_default in self._recent if is_default] or [line.default_ms]
        low, high = min(times), max(times)
        text = Text("step ")
        for value in times:
            height = BARS[min(int(8 * (value - low) / max(high - low, 1e-9)), 7)]
            text.append(
                height, "green" if value < min(default) else "yellow" if value > max(default) else "dim"
            )
        band = f"{ms(min(default))} to {ms(max(default))}" if max(default) > min(default) else ms(default[0])
        return text.append(f" {ms(line.step_ms)}; {OWN} {band}")


def show_summary(console: Console, s: RunSummary, quiet: bool = False) -> None:
    """Print the result for people, the verdict first. ``quiet``: only the verdict."""
    width = min(console.width, WIDTH) if console.is_terminal else WIDTH

    def say(text: str, style: str = "") -> None:
        lines = textwrap.wrap(
            text, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)

    def lead(name: str, text: str) -> None:
        console.print(f"{name:7} {text}", markup=False, soft_wrap=True)  # paths and commands stay whole

    console.print()
    failed = bool(s.failure) or s.job_failed
    say(verdict(s), "bold red" if failed else "bold green" if s.kept else "bold")
    if s.table and not s.job_failed:
        lead("again", f"dynamiccl apply {s.table}{_emulation(s)} -- COMMAND")
    for text in _cures(s):
        say(text)
    if quiet:
        return
    for text, style in _evidence(s):
        say(text, style)
    lead("more", f"dynamiccl show {Path(str(s.trace)).parent}")
    lead("report", str(s.report))


def _evidence(s: RunSummary) -> list[tuple[str, str]]:
    """What stands below the verdict: texts, each with its style."""
    told = []
    if s.emulated:
        told.append((emulation_text(vars(s)), "yellow"))
    told += [(text, "") for text in result_lines(s)[1:]]
    if s.memory and s.memory.get("jobs"):
        told.append((f"memory: {s.memory['why']}", ""))
    told += [(str(why), "yellow") for why in s.not_obeyed]
    if s.records_lost:
        told.append((f"{s.records_lost} records were lost: the tuner could not keep up", "yellow"))
    told.append((consistency_text(s.consistency), ""))
    return told


def _emulation(s: RunSummary) -> str:
    """The options that repeat an emulated run on the same cluster."""
    if not s.emulated:
        return ""
    usual = Emulated()
    scales = (("bytes", s.bytes_scale, usual.bytes_scale), ("compute", s.compute_scale, usual.compute_scale))
    return f" --cluster {s.cluster}" + "".join(
        f" --{name}-scale {x:g}" for name, x, y in scales if x and x != y
    )


def _cures(s: RunSummary) -> list[str]:
    """Advice for a run without result."""
    if s.job_failed:
        return ["Fix the job first: the times of a failed job say nothing about its tables."]
    if s.is_decided:
        in_vain = not s.kept and not s.dropped and s.budget_s != 0
        return (
            ["Try more steps, or nodes with fewer other jobs. The job may also have little to gain."]
            if in_vain
            else []
        )
    return _cures_of_end(s)


def _cures_of_end(s: RunSummary) -> list[str]:
    """Advice for a run that ended before its verdict."""
    ended = list(s.ended or ())
    if ended == [RunEnds.JOB_STATUS] and s.job_status == 0 and (s.windows or s.decisions):
        return [
            f"The job was too short for a verdict: give it at least {FEWEST_STEPS} steps. {Expected().told(0.05)}"
        ]
    return [_CURES[reason] for reason in ended if reason in _CURES]
