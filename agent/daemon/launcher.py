"""The launcher: starts a job with a tuner beside it, and is to the job's scheduler what the job alone would be.

``dynamiccl tune`` *becomes* this process. Standard library only. It runs the job in its own session, hands on signals
and output, and exits with the job's status. The tuner is another process, which may die.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: What the launcher is asked to do, and the job's exit status once it has ended, in the run folder.
PLAN, STATUS = "launch.json", "status"
#: Signals of a fault of our own, and those that mean something to the launcher alone.
_OURS = (
    *("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"),
    *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGPIPE"),
)
#: Slurm may send these to every process of a step (``sbatch --signal``). They are meant for the job, not for the tuner.
_NOT_THE_TUNERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_SI_KERNEL = 0x80  # siginfo: a terminal's Ctrl-C, which goes to all processes in the foreground
_PR_SET_PDEATHSIG = 1
_CHUNK = 65536
_BEHIND = 256  # chunks that the copy of the output may lie behind before parts of it are left out
#: After the job's end: for output of processes that it left behind, and for the tuner to sum up.
_LINGER_S, _TUNER_S = 2.0, 60.0
#: For the tuner, once a scheduler has told the job to end. SIGKILL follows 30 s after that signal (the defaults of
#: Slurm's KillWait and of Kubernetes' grace period), and would lose the exit status. The job needs most of this time.
_HURRIED_S = 5.0
#: The job ended by such a signal only if it came at most so long before the end. A job may survive one for hours: after
#: a terminal's SIGHUP, or a warning that a scheduler has withdrawn, no SIGKILL follows.
_SURVIVED_S = 60.0
#: Signals that tell a job to end.
_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
#: The status of a job is no failure if such a signal came at most so long before its end: it may write a checkpoint for
#: minutes.
_SAVING_S = 600.0


@dataclass(frozen=True)
class Plan:
    """What to run and where. ``env`` is added to the job's environment; ``tuner`` is the tuner's command, or empty.

    ``log`` keeps the job's output; empty: no file. The output also passes through; to stderr alone (``mixed``), where
    stdout is wanted for something else; or not (``silent``). ``locks``: file descriptors held to the end.
    """

    command: list[str]
    tuner: list[str]
    run: str
    log: str
    env: dict[str, str] = field(default_factory=dict)
    mixed: bool = False
    silent: bool = False
    kill_after: float | None = None
    locks: list[int] = field(default_factory=list)

    def write(self) -> None:
        """Leave the plan in the run folder. Raises OSError."""
        path = Path(self.run, PLAN)
        path.write_text(json.dumps(asdict(self)))
        path.chmod(0o600)

    def become(self) -> None:
        """Replace this process by the launcher; does not return. Raises OSError."""
        self.write()
        for fd in self.locks:
            os.set_inheritable(fd, True)
        sys.stdout.flush()
        sys.stderr.flush()
        # Isolated and without site-packages: nothing that is installed beside us can break or slow the launcher.
        os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, self.run])

    @classmethod
    def read(cls, run: str) -> Plan:
        """The plan of a run folder. Raises OSError, ValueError."""
        return cls(**json.loads(Path(run, PLAN).read_text()))


class Copy:
    """Keeps a copy of the output, from a thread of its own: a full disk or a hung file system costs the copy only."""

    def __init__(self, path: str) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    def add(self, data: bytes) -> None:
        """Never blocks; what the file system does not take in time is left out, and the file says how much."""
        if self._queue.qsize() < _BEHIND:
            self._queue.put(data)
        else:
            self._left_out += len(data)

    def _run(self, path: str) -> None:
        file = -1
        while (data := self._queue.get()) is not None:
            try:
                if file < 0:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                if self._left_out:
                    left_out, self._left_out = self._left_out, 0
                    data += b"[dynamiccl: %d bytes of output are not kept here]\n" % left_out
                _write(file, data)
            except OSError:
                self._left_out += len(data)

    def close(self) -> None:
        """Wait a moment for what is still to be written."""
        self._queue.put(None)
        self._thread.join(_LINGER_S)


class Launcher:
    """One job and its tuner."""

    def __init__(
        self, plan: Plan, say: Callable[[str], None], beside: Callable[[], None] | None = None
    ) -> None:
        """``beside`` runs in a thread of its own while the job runs."""
        self.plan, self.say, self.beside = plan, say, beside
        self.job: subprocess.Popen[bytes] | None = None
        self.tuner: subprocess.Popen[bytes] | None = None
        self.kill_at = math.inf
        self._told_to_end = 0, -math.inf  # the signal by which the job was told so last, and when
        self._hurried_at = list[float]()  # when a process, and not a terminal, sent such signals lately
        self._signals = {s for s in signal.valid_signals() if getattr(s, "name", "") not in _OURS}
        # As under nohup. They reach the job, which inherits this, but are no wish that it ends.
        self._ignored = {s for s in self._signals if signal.getsignal(s) == signal.SIG_IGN}
        self._of_children = signal.getsignal(signal.SIGCHLD)

    def run(self) -> int:
        """Start both, see the job through to its end; its status, 128 + n where signal n ended it."""
        plan = self.plan
        # Blocked, not handled: a signal waits until the main thread takes it, so none is lost while the job starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals | {signal.SIGCHLD})
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the reader of our output may go: the copy goes on
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the kernel tells of no child's end or status
        try:
            self.job = self._start(plan.command, plan.env, before, piped=True)
        except OSError as error:
            self.say(f"cannot start {plan.command[0]!r}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        try:
            if plan.tuner:
                self.tuner = self._start(plan.tuner, _tuners_env(), before, piped=False)
        except OSError as error:
            self.say(f"the tuner cannot be started ({error.strerror}); the job runs without it")
        copy = Copy(plan.log) if plan.log else None  # threads from here on: there is no more fork
        readers = self._read(self.job, copy)
        if self.beside:
            threading.Thread(target=self.beside, daemon=True).start()
        while self.job.poll() is None:
            self._wait(self.job)
        ended = time.monotonic()
        status = _shell(self.job.returncode)
        self._note(status)
        for reader in readers:  # processes that the job left behind may hold its output open for ever
            reader.join(_LINGER_S)
        if copy:
            copy.close()
        self._await_tuner(ended)
        return status

    def _start(
        self, command: Sequence[str], env: dict[str, str], mask: set[signal.Signals | int], piped: bool
    ) -> subprocess.Popen[bytes]:
        parent, libc = os.getpid(), ctypes.CDLL(None)

        def child() -> None:  # between fork and exec
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            for number in () if piped else _NOT_THE_TUNERS:
                signal.signal(number, signal.SIG_IGN)
            if piped:
                signal.signal(signal.SIGCHLD, self._of_children)  # as the job alone would have it
                # If the launcher is killed outright, the job is told to end: nobody would reap it or read it.
                libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)

        pipe = subprocess.PIPE if piped else None
        return subprocess.Popen(
            list(command),
            env={**os.environ, **env},
            stdin=None if piped and not os.isatty(0) else subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=child,
        )

    def _read(self, job: subprocess.Popen[bytes], copy: Copy | None) -> list[threading.Thread]:
        assert job.stdout is not None and job.stderr is not None
        targets = (None, None) if self.plan.silent else (2 if self.plan.mixed else 1, 2)
        readers = [
            threading.Thread(target=_pass_on, args=(stream.fileno(), target, copy), daemon=True)
            for stream, target in zip((job.stdout, job.stderr), targets, strict=True)
        ]
        for reader in readers:
            reader.start()
        return readers

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float = 3600.0) -> None:
        """Until a child ends, a signal comes (which is handed on) or the time is over."""
        limit_s = min(limit_s, max(0.0, self.kill_at - time.monotonic()))
        info = signal.sigtimedwait(self._signals | {signal.SIGCHLD}, limit_s)
        if self.kill_at <= time.monotonic():
            self.kill_at = math.inf
            self.say(f"the job has not ended {self.plan.kill_after:g} s after it was told to: it is killed")
            self._told_to_end = self._told_to_end[0], time.monotonic()
            kill_family(process.pid)
        if info is None:
            return
        if info.si_signo == signal.SIGCHLD:
            if (
                self.tuner
                and self.tuner.poll() is not None
                and process is self.job
                and process.poll() is None
            ):
                self._tuner_is_gone()
            return
        self._hand_on(process, info.si_signo, info.si_code == _SI_KERNEL)

    def _hand_on(self, process: subprocess.Popen[bytes], number: int, to_all: bool) -> None:
        """To the process that we started, as if it had been ours; a terminal's to all processes of its session."""
        if to_all:
            _send(os.killpg, process.pid, number)
        elif process.returncode is None:
            _send(os.kill, process.pid, number)
        # What was ignored when we started (SIGHUP under nohup) the job ignores too.
        if number not in _TO_END or number in self._ignored:
            return
        now = time.monotonic()
        self._told_to_end = number, now
        if not to_all:
            self._hurried_at = [*_since(now - _SURVIVED_S, self._hurried_at), now]
        if process is self.tuner:  # after the job's end: it has a limit of its own
            return
        if self.plan.kill_after is not None and self.kill_at == math.inf:
            self.kill_at = now + self.plan.kill_after

    def _tuner_is_gone(self) -> None:
        assert self.tuner is not None
        status, self.tuner = _shell(self.tuner.returncode), None
        again = f" under the table that was confirmed last; dynamiccl tune --attach {self.plan.run} starts it again"
        self.say(
            f"the tuner has ended with status {status}; the job goes on{again if status not in (0, 2) else ''}"
        )

    def _await_tuner(self, ended: float) -> None:
        """The job is over: let the tuner sum up. Signals are now the tuner's; the status is the job's all the same.

        ``ended``: when the job ended. The wait counts from there, or from a later signal to end. A signal that the job
        had survived by then does not count.
        """
        self.kill_at = math.inf
        while self.tuner and self.tuner.poll() is None:
            hurried_at = min(_since(ended - _SURVIVED_S, self._hurried_at), default=math.inf)
            end = min(ended + _TUNER_S, max(ended, hurried_at) + _HURRIED_S)
            now = time.monotonic()
            if now > end:
                self.say(f"the tuner has not summed up within {now - ended:.0f} s: it is killed")
                self.tuner.kill()
                self.tuner.wait()
                return
            self._wait(self.tuner, end - now + 0.01)

    def _note(self, status: int) -> None:
        """The job's status for the tuner, which is not its parent. Nobody's status depends on it.

        A job that a signal has told to end did not fail, whatever status it ends with: torchrun's is 1. A signal of
        hours before, which the job had survived, does not count.
        """
        number, at = self._told_to_end
        if status != 0 and time.monotonic() - at <= _SAVING_S:
            status = 128 + number
        with contextlib.suppress(OSError):
            draft = Path(self.plan.run, STATUS + ".tmp")
            draft.write_text(f"{status}\n")
            draft.replace(Path(self.plan.run, STATUS))


def _pass_on(source: int, target: int | None, copy: Copy | None) -> None:
    while True:
        try:
            data = os.read(source, _CHUNK)
        except OSError:
            return
        if not data:
            return
        if target is not None:
            try:
                _write(target, data)
            except OSError as error:
                # Else a full disk, or a file system that fails: it may take the next lines.
                if error.errno in (errno.EPIPE, errno.EBADF):  # whoever read our output is gone
                    target = None
        if copy:
            copy.add(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another process that has it too may have set O_NONBLOCK
            ready = select.poll()  # select() takes no descriptor above 1,023
            ready.register(fd, select.POLLOUT)
            ready.poll()


def kill_family(pid: int) -> None:
    """SIGKILL to a process, its group and all processes below it: torchrun gives each worker a session of its own."""
    found: set[int] = set()
    while new := _family(pid) - found:  # until those that stand still have started no others
        found |= new
        for one in new:
            _send(os.kill, one, signal.SIGSTOP)
    _send(os.killpg, pid, signal.SIGKILL)
    for one in found:
        _send(os.kill, one, signal.SIGKILL)


def _family(pid: int) -> set[int]:
    """A process and all below it, as /proc has them now."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, left = set[int](), [pid]
    while left:
        found.add(one := left.pop())
        left += children.get(one, ())
    return found


def _send(by: Callable[[int, int], None], pid: int, number: int) -> None:
    """To a process that may have ended, or have become another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        by(pid, number)


def _tuners_env() -> dict[str, str]:
    """What is added to the tuner's environment.

    ``python -m`` imports from the current folder first, where a job may have a ``queue.py``: the tuner does not. It has
    to where that folder holds this package itself.
    """
    with contextlib.suppress(OSError):  # the current folder may be gone
        if Path(__file__).parents[3] == Path.cwd():
            return {}
    return {"PYTHONSAFEPATH": "1"}


def _since(begin: float, times: Sequence[float]) -> list[float]:
    return [at for at in times if at >= begin]


def _shell(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def say(text: object) -> None:
    """One line of ours on stderr, which nobody may read."""
    with contextlib.suppress(OSError):
        _write(2, f"dynamiccl: {text}\n".encode())


def main() -> None:
    """Run the plan of the run folder in ``sys.argv[1]``."""
    status = Launcher(Plan.read(sys.argv[1]), say).run()
    os._exit(status)  # readers may still hang on the output of processes that the job left behind


if __name__ == "__main__":
    main()
