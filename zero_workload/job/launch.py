"""Start one process a rank on this machine, watch them, and end all of them when one fails."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

#: Where a rank leaves the reason of its failure for the launcher (a folder).
ERRORS = "ZERO_WORKLOAD_ERRORS"
#: The launcher's process id: a rank that lost it stops after the step.
LAUNCHER = "ZERO_WORKLOAD_LAUNCHER"


class Failed(RuntimeError):
    """The run broke; the message says why."""


def report(rank: int, error: BaseException) -> int:
    """Tell the user, or the launcher if there is one, why this rank ends. Returns the exit code: 2 for a ValueError,
    which says that the request cannot be served as asked, 1 for any other.
    """
    code = 2 if isinstance(error, ValueError) else 1
    text = (str(error).strip().splitlines() or [""])[0]
    if not isinstance(error, Failed | ValueError | FloatingPointError):
        text = f"{type(error).__name__}: {text}"
    if ERRORS in os.environ:
        note = Path(os.environ[ERRORS], f"{rank}.partial")
        note.write_text(f"{code}\n{text}")
        note.replace(note.with_suffix(""))
    else:
        print(f"error: {text}" if rank < 0 else f"error: rank {rank}: {text}", file=sys.stderr, flush=True)
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

    def stop(number: int, frame: object) -> None:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL if stopped else signal.SIGTERM)
        stopped.append(number)

    with tempfile.TemporaryDirectory(prefix="zero-workload-") as folder:
        env = {"OMP_NUM_THREADS": "1", **os.environ, ERRORS: folder, LAUNCHER: str(os.getpid())}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n_ranks)}
        env["LOCAL_WORLD_SIZE"] = env["WORLD_SIZE"]
        previous = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for place in ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n_ranks)):
                command = [sys.executable, "-m", "dynamiccl.zero_workload", *arguments]
                # A session of their own: Ctrl-C reaches the launcher, which tells the ranks once.
                ranks.append(subprocess.Popen(command, env=env | place, start_new_session=True))
            while not stopped and not (failed := [n for n, r in enumerate(ranks) if r.poll()]):
                if all(rank.returncode == 0 for rank in ranks):
                    return 0
                time.sleep(0.05)
            # The others may be writing down an error of their own, or finish their step.
            deadline = time.monotonic() + (10 if stopped else 0.5)
            while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
                time.sleep(0.05)
            ended = {n: status for n, rank in enumerate(ranks) if (status := rank.poll()) is not None}
        finally:
            for process in ranks:
                process.kill()  # SIGTERM cannot end a rank that waits in a collective for a dead one
                process.wait()
            for name, handler in previous.items():
                signal.signal(name, handler)
        if stopped:
            return 128 + stopped[0]
        number, code, reason = _blame(Path(folder), failed[0], ended)
        print(f"error: rank {number}: {reason}", file=sys.stderr, flush=True)
        return code


def _blame(folder: Path, first: int, ended: dict[int, int]) -> tuple[int, int, str]:
    """The rank that failed by itself (rank, exit code, reason): the others fail too, because they lost it."""
    notes = []
    for path in (p for p in folder.iterdir() if p.name.isdigit()):
        code, reason = path.read_text().split("\n", 1)
        lost = "onnection" in reason or "peer" in reason
        notes.append((lost, path.stat().st_mtime_ns, int(path.name), int(code), reason))
    # Where nobody names a cause of its own, a rank that could write no note is the one that the others lost, whichever
    # of them was seen to end first.
    silent = [n for n in sorted(ended, key=lambda n: n != first) if ended[n] and n not in {note[2] for note in notes}]
    if notes and not (min(notes)[0] and silent):
        return min(notes)[2:]
    status = ended[silent[0]]
    return silent[0], 1, f"killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
