"""Start one process a rank on this machine, watch them, and end all of them when one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

#: Where a rank leaves the reason of its failure for the launcher (a folder).
ERRORS = "ZERO_WORKLOAD_ERRORS"
#: The launcher's process id: a rank that lost it stops after the step.
LAUNCHER = "ZERO_WORKLOAD_LAUNCHER"
GRACE_S = 5.0


class BadInput(Exception):
    """The request cannot be served as asked; the message says what to do. Exit code 2."""


class Failed(Exception):
    """The run broke; the message says why. Exit code 1."""


def report(rank: int, error: BaseException) -> int:
    """Tell the user, or the launcher if there is one, why this rank ends. Returns the exit code."""
    code = 2 if isinstance(error, BadInput) else 1
    known = isinstance(error, BadInput | Failed | ValueError)
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if known else f"{type(error).__name__}: {lines[0]}"
    folder = os.environ.get(ERRORS)
    if folder:
        Path(folder, f"{rank}.partial").write_text(f"{code}\n{text}")
        Path(folder, f"{rank}.partial").replace(Path(folder, str(rank)))
    else:
        print(f"error: rank {rank}: {text}", file=sys.stderr, flush=True)
    return code


def launch(n_ranks: int, arguments: Sequence[str]) -> int:
    """Run this package with ``arguments`` on ``n_ranks`` local ranks, joined by environment variables as torchrun's.

    Returns:
        0 when all ranks end well; else 2 (bad input) or 1, after one line on stderr that names the rank that failed
        first and why; 128 + signal number after SIGINT or SIGTERM. The other ranks are ended within seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stopped: list[int] = []
    ranks: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        again = bool(stopped)
        stopped.append(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL if again else signal.SIGTERM)

    with tempfile.TemporaryDirectory(prefix="zero-workload-") as folder:
        previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank in range(n_ranks):
                env = dict(
                    os.environ,
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(n_ranks),
                    LOCAL_WORLD_SIZE=str(n_ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
                )
                env |= {ERRORS: folder, LAUNCHER: str(os.getpid())}
                command = [sys.executable, "-m", str(__package__), *arguments]
                # A group of their own: Ctrl-C reaches the launcher, which tells the ranks once.
                ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
            failed = _watch(ranks, stopped)
        finally:
            ended = _end(ranks)
            for number, handler in previous.items():
                signal.signal(number, handler)
        if stopped:
            return 128 + stopped[0]
        if failed is None:
            return 0
        rank, code, reason = _blame(Path(folder), failed, ended)
        print(f"error: rank {rank}: {reason}", file=sys.stderr, flush=True)
        return code


def _watch(ranks: list[subprocess.Popen[bytes]], stopped: list[int]) -> int | None:
    """Wait for the end of all ranks, or of the first that fails: its number."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        for number, rank in enumerate(ranks):
            if rank.poll():
                return number
        if stopped and deadline is None:
            deadline = time.monotonic() + 2 * GRACE_S
        if deadline and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return next((number for number, rank in enumerate(ranks) if rank.returncode), None)


def _end(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """End what still runs. Returns the exit status of each rank that ended by itself."""
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)  # the others may be writing down an error of their own
    ended = {number: status for number, rank in enumerate(ranks) if (status := rank.poll()) is not None}
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()  # SIGTERM cannot end a rank that waits in a collective for a dead one
    for rank in ranks:
        rank.wait()
    return ended


def _blame(folder: Path, first: int, ended: dict[int, int]) -> tuple[int, int, str]:
    """The rank that failed by itself (rank, exit code, reason): the others fail too, because they lost it."""
    notes = []
    for path in folder.iterdir():
        if path.name.isdigit():
            code, reason = path.read_text().split("\n", 1)
            lost = "onnection" in reason or "peer" in reason
            notes.append((lost, path.stat().st_mtime_ns, int(path.name), int(code), reason))
    if notes and not min(notes)[0]:
        return min(notes)[2:]
    # Nobody names a cause of its own. A rank that could write no note is the one that the others lost, whichever
    # of them was seen to end first.
    noted = {note[2] for note in notes}
    silent = [number for number, status in ended.items() if status and number not in noted]
    if silent:
        number = first if first in silent else silent[0]
        status = ended[number]
        return number, 1, f"killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return min(notes)[2:]
