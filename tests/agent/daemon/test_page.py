"""The report is drawn beside the job: in time, not too often, and by a process of its own."""

import subprocess
import sys

import pytest
from dynamiccl.agent.daemon import summarise
from dynamiccl.agent.daemon.summarise import BREAK, EVERY_S, ReportPage
from dynamiccl.agent.report.summary import RunSummary

#: What a tuner must not import unless it is asked to.
LOGGERS = ("matplotlib", "tensorboard", "wandb", "mlflow", "PIL")


class Clock:
    """Stands in for the time and for the process that draws."""

    def __init__(self, takes_s):
        self.now, self.takes_s, self.begun = 100.0, takes_s, []

    def monotonic(self):
        return self.now

    def popen(self, *args, **options):
        self.begun.append(self.now)
        begun = self.now
        drawing = type("Drawing", (), {})()
        drawing.poll = lambda: 0 if self.now >= begun + self.takes_s else None
        drawing.wait = lambda: 0
        drawing.kill = lambda: drawing.poll() is None and pytest.fail("a drawing was cut off")
        return drawing


@pytest.mark.parametrize(("takes_s", "every_s"), [(1.0, EVERY_S), (10.0, 10 * BREAK)])
def test_the_report_is_drawn_again_every_half_minute_and_less_often_if_it_takes_long(
    monkeypatch, tmp_path, takes_s, every_s
):
    clock = Clock(takes_s)
    monkeypatch.setattr(summarise.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(summarise.subprocess, "Popen", clock.popen)
    page = ReportPage(tmp_path)
    for _ in range(10 * int(every_s)):
        page.keep_up(RunSummary)
        clock.now += 1
    gaps = [b - a for a, b in zip(clock.begun, clock.begun[1:], strict=False)]
    assert clock.begun[0] == 100 + EVERY_S and len(gaps) > 5
    assert all(every_s <= gap <= every_s + takes_s + 2 for gap in gaps)


def test_a_tuner_imports_nothing_that_draws_or_logs():
    code = "import sys; from dynamiccl.agent.daemon import console, daemon; "
    code += f"print([name for name in {LOGGERS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
