"""MPS (NVIDIA's Multi-Process Service) for ranks that share a GPU: without it they take turns on it, in time slices."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_PR_SET_PDEATHSIG = 1
#: Seconds that MPS has to come up, and that its first client has: a server starts for it.
_PATIENCE_S, _CLIENT_S = 5.0, 15.0
#: A client: it makes a context on a GPU.
_CLIENT = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
error = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
error = error or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
sys.exit(f"CUDA error {error}" if error else 0)
"""


def with_parent() -> None:
    """In a child, before its program runs: end when the parent does, also when that is killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Mps:
    """Our own MPS in a private pipe folder, so that it meets no other; ``env`` is for the ranks.

    It is ours to stop. An MPS that the environment names is used and left alone. Ours is used only if a client can
    connect: the check is slower without MPS, and could not run with one that takes no clients.
    """

    def __init__(self, ranks_per_gpu: int) -> None:
        share = str(round(100 / ranks_per_gpu))
        self.env: dict[str, str] = {}
        self.state = "none: nvidia-cuda-mps-control is not installed"
        self._folder: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        theirs = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
        if (theirs / "control").exists():
            self.env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": share}
            self.state = "another's, which ran before"
        elif shutil.which(_CONTROL):
            self._start(share)

    def _start(self, share: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dynamiccl-mps-"))
        folders = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(self._folder))
        # In the foreground, as our child: it ends with us, however we end.
        self._server = subprocess.Popen(
            [_CONTROL, "-f"],
            env={**os.environ, **folders},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=with_parent,
        )
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end and self._server.poll() is None:
            if (self._folder / "control").exists():
                self.env = {**folders, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": share}
                fault = self._fault_of_a_client()
                self.state = f"none: no client can use it ({fault})" if fault else "own"
                break
            time.sleep(0.05)
        else:
            self.state = f"none: it did not start within {_PATIENCE_S:.0f} s"
        if self.state != "own":
            self.stop()
            self.env = {}

    def _fault_of_a_client(self) -> str:
        """Why a process cannot use our MPS; '' if it can."""
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _CLIENT],
                env={**os.environ, **self.env},
                capture_output=True,
                text=True,
                timeout=_CLIENT_S,
                check=False,
                preexec_fn=with_parent,
            )
        except subprocess.TimeoutExpired:
            return f"it hangs for {_CLIENT_S:.0f} s"
        last = done.stderr.strip().rpartition("\n")[2]
        return (last or f"status {done.returncode}") if done.returncode else ""

    def stop(self) -> None:
        """Stop the server that we started, and remove its folder."""
        if self._server is not None:
            if self.env:
                self._quit()
            self._server.terminate()
            try:
                self._server.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _quit(self) -> None:
        try:
            subprocess.run(
                [_CONTROL], input=b"quit\n", env={**os.environ, **self.env}, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
