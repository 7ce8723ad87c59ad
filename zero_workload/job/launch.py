"""Start one process a rank on this machine with torch's own launcher, and say in one line why they ended."""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    PContext,
    RunProcsResult,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

#: The launcher's process id: a rank that lost it stops after the step.
LAUNCHER = "ZERO_WORKLOAD_LAUNCHER"
#: What ends the job. PyTorch's launcher listens to the same.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Seconds after a signal in which another is the same one again: a scheduler may send it to each process, and a
#: launcher passes its own on.
SAME_S = 1.0
#: How a rank ends that is told to stop before it has begun.
_STOPPED = f"killed by signal {int(signal.SIGTERM)}"


def report(rank: int, error: BaseException) -> int:
    """Tell the user, or the launcher if it is ours, why this rank ends. Returns the exit code: 2 for a ValueError,
    which says that the request cannot be served as asked, 1 for any other.
    """
    code = 2 if isinstance(error, ValueError) else 1
    text = (str(error).strip().splitlines() or [""])[0]
    if not isinstance(error, ValueError | FloatingPointError):
        text = f"{type(error).__name__}: {text}"
    if LAUNCHER in os.environ:
        note = {"message": text, "errorCode": code, "timestamp": time.time_ns()}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
    else:
        print(f"error: {text}" if rank < 0 else f"error: rank {rank}: {text}", file=sys.stderr, flush=True)
    return code


class Told:
    """Whether this process was told to stop: once, or a second time."""

    def __init__(self) -> None:
        self.first: float | None = None  # when

    def is_second(self) -> bool:
        """Take note of a signal that comes now. Returns whether it is a second one, not the first again."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        return now - self.first >= SAME_S


class _Ranks(SubprocessContext):
    """Ends in a second, not in half a minute: SIGTERM cannot end a rank that waits in a collective for a dead one."""

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 1) -> None:
        """As torch's."""
        super().close(death_sig, timeout)


def launch(n_ranks: int, arguments: Sequence[str], patience: float) -> int:
    """Run this package with ``arguments`` on ``n_ranks`` local ranks, joined by environment variables as torchrun's.

    Args:
        patience: seconds in which the ranks must end when told to stop; -1: any.

    Returns:
        0: all ranks ended well; else 2 (bad input) or 1, after a line on stderr: first failed rank, cause; 128 +
            signal. Others are ended within seconds.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # our one line says it
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), LAUNCHER: str(os.getpid())}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 serves the store, whatever started this process
    command = dict.fromkeys(range(n_ranks), ("-m", "dynamiccl.zero_workload", *arguments))
    envs = {rank: env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)}
    with tempfile.TemporaryDirectory(prefix="zero-workload-") as folder:
        ranks = _Ranks("rank", sys.executable, command, envs, DefaultLogsSpecs(folder))
        before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGCHLD)}
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # ignored, each rank that fails would count as ended well
        try:
            ranks.start()
            _listen(before)  # in place of torch's handlers
            ended = ranks.wait(period=0.05)
        except SignalException as told:
            return _stop(ranks, told.sigval, patience)
        finally:
            ranks.close(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: C code had set it
        return _say_why(ended, 0) if ended and ended.failures else 0


def _listen(before: Mapping[signal.Signals, Any]) -> None:
    """From now on the first signal raises SignalException, and so does a second one, but not the first again.

    What was ignored ``before`` is ignored again, as SIGHUP under nohup.
    """
    told = Told()

    def on_signal(number: int, frame: object) -> None:
        is_first = told.first is None
        if told.is_second() or is_first:
            raise SignalException(f"told to stop by signal {number}", signal.Signals(number))

    for number in SIGNALS:
        is_ignored = before[number] is signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN if is_ignored else on_signal)


def _stop(ranks: PContext, told: signal.Signals, patience: float) -> int:
    """Let each rank finish its step, and save. Returns the exit code; what goes wrong is said on stderr."""
    reason = f"did not end within {patience:g} s of {told.name}"
    try:
        for pid in ranks.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        ended = ranks.wait(patience, period=0.05)
    except SignalException as again:
        ended, reason = None, f"had not ended at {again.sigval.name}, the second signal"
    code = 128 + told
    if not ended:
        print(f"error: ranks {reason}, and are killed: they save nothing", file=sys.stderr, flush=True)
    elif ended.failures:
        code = _say_why(ended, code)
    return code


def _say_why(ended: RunProcsResult, when_stopped: int) -> int:
    """Say in one line why the job failed, and return its exit code: ``when_stopped`` if it was told to."""
    rank, code, reason = _blame(ended.failures.values())
    if reason == _STOPPED and when_stopped:
        return when_stopped
    print(f"error: rank {rank}: {reason}", file=sys.stderr, flush=True)
    return code


def _blame(failures: Iterable[ProcessFailure]) -> tuple[int, int, str]:
    """The rank that failed by itself (rank, exit code, reason): the others fail too, because they lost it."""
    told, silent = [], []
    for failure in failures:
        if Path(failure.error_file).is_file():
            lost = "onnection" in failure.message or "peer" in failure.message
            told.append((lost, failure.timestamp, failure))
        else:
            silent.append(failure)
    told.sort(key=lambda note: note[:2])
    # Where nobody names a cause of its own, a rank that could tell nothing is the one that the others lost.
    if told and not (told[0][0] and silent):
        first = told[0][2]
        return first.local_rank, first.error_file_data["errorCode"], first.message
    first, status = silent[0], silent[0].exitcode
    return (
        first.local_rank,
        1,
        f"killed by signal {-status}" if status < 0 else f"ended with exit code {status}",
    )
