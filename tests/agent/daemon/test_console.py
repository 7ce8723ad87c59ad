"""The output of a tuner while it runs: who reads it may be gone long before the job ends."""

import contextlib
import errno
import io
import os
import sys
import time

import pytest
from dynamiccl.agent.daemon.console import LiveView, show_summary
from dynamiccl.agent.daemon.tuner import WindowLine
from dynamiccl.agent.report.summary import RunSummary


class Gone(io.StringIO):
    """A terminal that takes no more since ``error`` is set."""

    error = 0

    def write(self, text):
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)

    def isatty(self):
        return True


@contextlib.contextmanager
def pipe_without_reader():
    """As after ``2>&1 | tee log``, and ``tee`` dies."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as file:
        yield file
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # it can be closed then


@pytest.fixture(params=["a pipe without reader", "a full disk", "a terminal that is gone"])
def stderr(request, monkeypatch):
    """A function that makes such an error of stderr, which is one already if it is no terminal."""
    with contextlib.ExitStack() as stack:
        if request.param == "a pipe without reader":
            file = stack.enter_context(pipe_without_reader())
        elif request.param == "a full disk":
            file = Gone()
            file.error, file.isatty = errno.ENOSPC, lambda: False
        else:
            file = Gone()
            monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", file)
        yield lambda: setattr(file, "error", errno.EIO)
        monkeypatch.undo()


def line(step):
    """A window's line of this last step."""
    texts = {
        "phase": "search",
        "table": "A",
        "in_force": "default",
        "decision": "auto",
        "verdict": "measured",
    }
    times = {"step_ms": 10.0, "default_ms": 10.0, "cost_s": 1.0, "budget_s": 2.0}
    steps = {"index": step, "generation": 3, "first_step": step - 5, "last_step": step}
    return WindowLine(**texts, **times, **steps, events=("seen",), best=None)


def test_a_stderr_that_is_gone_ends_nothing(stderr, capfd):
    """Before: a broken pipe raised SystemExit, past the summary and the watch over the kept table, and closed stdout.
    A terminal that was gone was taken for results that cannot be written, and ended tuning."""
    before = os.fstat(1)
    with LiveView(0.05) as view:
        view.say("heard")
        stderr()
        for step in (10, 20):
            view.say("nobody hears this")
            view.window(line(step))
            time.sleep(0.3 if view._live else 0)  # the block draws itself four times a second
        if view._live:
            assert view._live._refresh_thread.is_alive()
    show_summary(view.console, RunSummary())
    assert os.path.samestat(before, os.fstat(1)), "stdout is for the summary as JSON"


def test_what_comes_after_an_error_is_read_again(monkeypatch):
    """A disk may be full for a minute of a week."""
    file = Gone()
    file.isatty = lambda: False
    monkeypatch.setattr(sys, "stderr", file)
    view = LiveView(0.05)
    file.error = errno.EDQUOT
    view.say("lost")
    file.error = 0
    view.say("heard")
    assert file.getvalue() == "heard\n"


def test_a_process_without_stderr_has_a_view(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    LiveView(0.05).say("nobody hears this")
