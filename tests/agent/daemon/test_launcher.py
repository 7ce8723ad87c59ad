"""The launcher: what a scheduler sees of a job that has a tuner beside it is what it would see of the job alone."""

import ast
import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from dynamiccl.agent.daemon import launcher
from dynamiccl.agent.daemon.launcher import PLAN, STATUS, Plan

IDLE = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
BRIEF = [sys.executable, "-S", "-c", "pass"]
#: A job that notes each signal on stdout, says when it is ready, and saves a checkpoint for a second on SIGTERM.
JOB = """
import os, signal, sys, time
def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        time.sleep(1.0)
        print("checkpoint written", flush=True)
        sys.exit(77)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH", "SIGALRM"):
    signal.signal(getattr(signal, name), note)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def start(tmp_path, command, tuner=BRIEF, **options):
    options = {"log": str(tmp_path / "job.log")} | options
    Plan(list(command), list(tuner), str(tmp_path), **options).write()
    words = [sys.executable, "-I", "-S", launcher.__file__, str(tmp_path)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE)


def python(program):
    return [sys.executable, "-S", "-u", "-c", program]


def wait_for(path, text, seconds=60):
    end = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {path.read_text() if path.exists() else path}"
        time.sleep(0.02)


def wait_for_end(pid):
    """Of a process whose status nobody may have asked for."""
    end = time.monotonic() + 30
    with contextlib.suppress(OSError):
        while "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
            assert time.monotonic() < end, f"process {pid} lives on"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(77)", 77),
        ("raise SystemExit(2)", 2),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 11)", 139),
    ],
)
def test_the_exit_status_is_the_jobs_whatever_the_tuners(tmp_path, program, status):
    """Before: 0 became 2, 77 and a signal became 1.

    Seen at 679c0ae, exit 0 becomes 2, 77 becomes 1: 2 for 0, 1 for 77, 1 for a job that signal 9 ended.
    """
    for tuner in (BRIEF, python("raise SystemExit(2)"), ["/nonexistent"]):
        process = start(tmp_path, python(program), tuner)
        process.communicate(timeout=60)
        assert process.returncode == status
        assert int((tmp_path / STATUS).read_text()) == status


def test_a_job_that_cannot_be_started(tmp_path):
    process = start(tmp_path, ["/nonexistent/program"], IDLE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 127 and b"cannot start" in err


def test_signals_reach_the_job_and_it_has_the_time_that_it_needs(tmp_path):
    """Before: SIGUSR1 killed the tuner and orphaned the job; SIGTERM was followed by SIGKILL.

    Seen at 679c0ae, SIGKILL 10 s after SIGTERM: a checkpoint that takes 15 s is never written.
    Seen at 679c0ae, SIGUSR1: ``tune`` ends with 138, the job hears nothing and runs on without a parent.
    """
    process = start(tmp_path, python(JOB), IDLE)
    log = tmp_path / "job.log"
    wait_for(log, "ready")
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGCONT", "SIGWINCH", "SIGALRM"):
        process.send_signal(getattr(signal, name))
        wait_for(log, f"got {name}")
    tuner = int(
        subprocess.run(["pgrep", "-P", str(process.pid), "-f", "time.sleep.600"], capture_output=True).stdout
    )
    os.kill(tuner, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 77 and out.endswith(b"checkpoint written\n")
    # Before: "NO VERDICT: the job failed with status 77", of a job that its scheduler had told to end.
    assert int((tmp_path / STATUS).read_text()) == 128 + signal.SIGTERM
    assert b"status 137; the job goes on" in err
    assert log.read_bytes() == out


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_step_does_not_end_the_tuner(tmp_path, number):
    """Slurm's proctrack/linuxproc sends `sbatch --signal` to each process. Before: it ended the tuner, not the job."""
    tuner = (
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(f'{{os.getpid()}} ')"
    )
    process = start(tmp_path, python(JOB), python(f"{tuner}; time.sleep(600)"))
    wait_for(tmp_path / "job.log", "ready")
    wait_for(tmp_path / "pid", " ")
    tuner = int((tmp_path / "pid").read_text())
    os.kill(tuner, number)
    process.send_signal(number)
    wait_for(tmp_path / "job.log", f"got {number.name}")
    time.sleep(0.3)
    assert Path(f"/proc/{tuner}/cmdline").read_bytes()  # empty of a process that has ended
    os.kill(tuner, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 77


def test_a_kill_timer_only_where_asked_for(tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready'); time.sleep(600)"
    process = start(tmp_path, python(stubborn), BRIEF, kill_after=0.3)
    wait_for(tmp_path / "job.log", "ready")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137 and b"it is killed" in err


def test_the_kill_timer_ends_all_processes_of_the_job(tmp_path):
    """torchrun starts each worker in a session of its own. Before: torchrun was killed, and the workers lived on."""
    worker = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    agent = (
        "import subprocess, sys, signal, time; signal.signal(15, signal.SIG_IGN);"
        f"worker = subprocess.Popen([sys.executable, '-S', '-c', {worker!r}], start_new_session=True);"
        "print('worker', worker.pid, '.', flush=True); time.sleep(600)"
    )
    process = start(tmp_path, python(agent), BRIEF, kill_after=0.3)
    log = tmp_path / "job.log"
    for text in ("ready", " ."):
        wait_for(log, text)
    worker = int(log.read_text().partition("worker ")[2].split()[0])
    try:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 137
        wait_for_end(worker)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_hangup_under_nohup_starts_no_kill_timer(tmp_path, handler):
    """The launcher blocks signals, and Linux keeps a blocked signal that is ignored. Before: a job with --kill-after
    was killed after its user's logout."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        one = launcher.Launcher(Plan(BRIEF, [], str(tmp_path), "", kill_after=60), print)
    finally:
        signal.signal(signal.SIGHUP, before)
    job = SimpleNamespace(pid=0, returncode=0)
    one._hand_on(job, signal.SIGHUP, to_all=False)
    is_ignored = handler == signal.SIG_IGN
    assert (one.kill_at == math.inf) == is_ignored
    assert (not one._hurried_at) == is_ignored, "nor is its tuner in a hurry"
    one._note(1)
    assert int((tmp_path / STATUS).read_text()) == (1 if is_ignored else 129), "its status is its own"
    one._hand_on(job, signal.SIGTERM, to_all=False)
    assert one.kill_at < math.inf


@pytest.mark.parametrize(("age_s", "noted"), [(1, 143), (300, 143), (2 * 86400, 1)])
def test_a_signal_of_days_ago_does_not_hide_that_the_job_failed(tmp_path, monkeypatch, age_s, noted):
    """Before: a job that had survived a SIGTERM, and crashed two days later, had a verdict. One that saves a checkpoint
    for minutes before it ends has been told to end."""
    clock = [0.0]
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock[0])
    one = launcher.Launcher(Plan(BRIEF, [], str(tmp_path), ""), print)
    one._hand_on(SimpleNamespace(pid=0, returncode=0), signal.SIGTERM, to_all=False)
    clock[0] += age_s
    one._note(1)
    assert int((tmp_path / STATUS).read_text()) == noted


def test_output_is_passed_through_and_kept(tmp_path):
    """Seen at 679c0ae, output only in a file: a line of the job is in ``job.log`` and not on stdout."""
    program = "import sys; print('out'); print(sys.stdin.read()); print('err', file=sys.stderr); print('x' * 300000)"
    process = start(tmp_path, python(program))
    out, err = process.communicate(b"given", timeout=60)
    assert out == b"out\ngiven\n" + b"x" * 300000 + b"\n"
    assert [line for line in err.splitlines() if not line.startswith(b"dynamiccl:")] == [b"err"]
    kept = (tmp_path / "job.log").read_bytes()
    assert len(kept) == len(out) + 4 and b"err" in kept
    mixed = start(tmp_path, python(program), mixed=True)
    out, err = mixed.communicate(b"", timeout=60)
    assert out == b"" and b"out" in err
    silent = start(tmp_path, python(program), silent=True)
    out, _ = silent.communicate(b"", timeout=60)
    assert out == b""


def test_output_is_kept_nowhere_where_no_log_is_wanted(tmp_path):
    process = start(tmp_path, python("import sys; print('out'); print('err', file=sys.stderr)"), log="")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out == b"out\n" and b"err" in err
    assert {path.name for path in tmp_path.iterdir()} == {PLAN, STATUS}


def test_neither_a_full_disk_nor_a_reader_that_is_gone_reaches_the_job(tmp_path):
    """The copy is lost, and the job ends as it would."""
    (tmp_path / "job.log").symlink_to("/dev/full")
    process = start(tmp_path, python("print('x' * 200000); print('whole')"))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.endswith(b"whole\n")
    process = start(
        tmp_path, python("import time; time.sleep(0.5); print('x' * 200000); raise SystemExit(5)")
    )
    process.stdout.close()
    assert process.wait(60) == 5


@pytest.mark.parametrize(
    ("error", "seen"), [(errno.EDQUOT, "ac"), (errno.EIO, "ac"), (errno.EPIPE, "a"), (errno.EBADF, "a")]
)
def test_output_passes_again_after_a_minute_without_room(monkeypatch, error, seen):
    """Before: one write that failed, of a full quota for one, and no later line of the job reached `slurm-N.out`."""
    chunks, written, kept = iter([b"a", b"b", b"c", b""]), [], []

    def write(_, data):
        if bytes(data) == b"b":
            raise OSError(error, os.strerror(error))
        written.append(bytes(data))
        return len(data)

    monkeypatch.setattr(launcher, "os", SimpleNamespace(read=lambda *_: next(chunks), write=write))
    launcher._pass_on(0, 1, SimpleNamespace(add=kept.append))
    assert b"".join(written).decode() == seen and kept == [b"a", b"b", b"c"]


def test_output_waits_for_a_slow_reader_of_a_pipe_that_does_not_block():
    """A process that shares the pipe may set O_NONBLOCK. Before: the first full pipe ended the output."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb") as slow, ThreadPoolExecutor(1) as thread:
        done = thread.submit(launcher._write, writer, b"x" * 300_000)
        assert len(slow.read(300_000)) == 300_000
        done.result()
    os.close(writer)


def test_a_job_does_not_outlive_a_launcher_that_was_killed(tmp_path):
    """It is told to end as a scheduler would: nobody could tell of its end any more, and it would hold its GPUs."""
    process = start(tmp_path, python(JOB), BRIEF)
    wait_for(tmp_path / "job.log", "ready")
    (job,) = map(
        int, subprocess.run(["pgrep", "-o", "-P", str(process.pid)], capture_output=True).stdout.split()
    )
    process.kill()
    process.wait()
    wait_for_end(job)


def test_a_tuner_that_does_not_end_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_TUNER_S", 0.2)
    said = []
    plan = Plan(BRIEF, IDLE, str(tmp_path), str(tmp_path / "job.log"))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        assert launcher.Launcher(plan, said.append).run() == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    assert "killed" in said[-1]


@pytest.mark.parametrize(
    ("job", "status", "told"), [(JOB, 77, "ready"), ("print('the job is over')", 0, "the job is over")]
)
def test_after_a_schedulers_signal_the_tuner_gets_seconds(tmp_path, job, status, told):
    """Before: 60 s, also if the signal came after the job's end. SIGKILL comes 30 s after it: the status was lost."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    ready = f"open({str(tmp_path / 'deaf')!r}, 'w').write('ready')"
    process = start(tmp_path, python(job), python(f"{deaf}; {ready}; time.sleep(600)"))
    wait_for(tmp_path / "job.log", told)
    wait_for(tmp_path / "deaf", "ready")
    if status == 0:
        wait_for(tmp_path / STATUS, "0")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status and b"it is killed" in err
    assert time.monotonic() - began < 20


def test_the_kill_timer_is_the_jobs_and_not_the_tuners(tmp_path):
    """Before: after the job's end a signal killed the tuner, and said that the job had not ended."""
    slow = (
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN);"
        f"pathlib.Path({str(tmp_path / 'deaf')!r}).touch();"
        f"time.sleep(1.5); pathlib.Path({str(tmp_path / 'summed')!r}).write_text('up')"
    )
    process = start(tmp_path, python("print('the job is over')"), python(slow), kill_after=0.2)
    wait_for(tmp_path / STATUS, "0")
    while not (tmp_path / "deaf").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and b"has not ended" not in err
    assert (tmp_path / "summed").read_text() == "up"


def test_ctrl_c_in_a_terminal_leaves_the_tuner_its_minute(tmp_path, monkeypatch):
    """No SIGKILL follows it, and whoever pressed it waits for the verdict."""
    monkeypatch.setattr(
        launcher.signal, "getsignal", lambda number: signal.SIG_DFL
    )  # also if tests ignore SIGINT
    one = launcher.Launcher(Plan(BRIEF, [], str(tmp_path), str(tmp_path / "job.log")), print)
    with subprocess.Popen(BRIEF, start_new_session=True) as job:
        one._hand_on(job, signal.SIGINT, to_all=True)
        assert one._hurried_at == []
        one._hand_on(job, signal.SIGINT, to_all=False)
        assert len(one._hurried_at) == 1


@pytest.mark.parametrize(
    ("ages_s", "wait_s"),
    [((), 60), ((7200,), 60), ((61,), 60), ((59,), 5), ((90, 20), 5), ((-2,), 7), ((7200, -2), 7)],
)
def test_a_signal_that_the_job_survived_leaves_the_tuner_its_minute(tmp_path, monkeypatch, ages_s, wait_s):
    """Before: a SIGHUP of hours ago cut it to 5 s. ``ages_s``: seconds from each signal to the job's end."""
    clock, ended = [0.0], 10_000.0
    monkeypatch.setattr(launcher.time, "monotonic", lambda: clock[0])
    said = []
    one = launcher.Launcher(Plan(BRIEF, [], str(tmp_path), ""), said.append)
    one.tuner = SimpleNamespace(poll=lambda: None, kill=lambda: None, wait=lambda: None)
    job = SimpleNamespace(pid=0, returncode=0)
    for age in sorted(ages_s, reverse=True):
        clock[0] = ended - age
        one._hand_on(job, signal.SIGTERM, to_all=False)

    def wait(process, limit_s):
        clock[0] += limit_s

    monkeypatch.setattr(one, "_wait", wait)
    clock[0] = max(clock[0], ended)
    one._await_tuner(ended)
    assert said == [f"the tuner has not summed up within {wait_s} s: it is killed"]
    assert len(one._hurried_at) <= 2, "it keeps no list of all signals of a long job"


def test_files_of_the_jobs_folder_are_no_modules_of_the_tuner(tmp_path, monkeypatch):
    """Before: a ``queue.py`` beside the training script ended the tuner. The job finds its modules as without us."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')\n")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "said.py").write_text("import sys, queue\nprint(queue.Queue, file=sys.stderr)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    job = [sys.executable, "-S", "-m", "queue"]
    _, err = start(tmp_path, job, [sys.executable, "-S", "-m", "said"]).communicate(timeout=60)
    assert b"<class 'queue.Queue'>" in err and err.count(b"not this one") == 1
    assert launcher._tuners_env() == {"PYTHONSAFEPATH": "1"}
    monkeypatch.chdir(Path(launcher.__file__).parents[3])
    assert launcher._tuners_env() == {}, "there it would not find this package"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert launcher._tuners_env() == {"PYTHONSAFEPATH": "1"}


def test_it_needs_the_standard_library_alone():
    tree = ast.parse(Path(launcher.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
