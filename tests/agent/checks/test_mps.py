"""Our MPS for ranks that share a GPU, with a stand-in for its control program and for a client."""

import os

import pytest
from dynamiccl.agent.checks.gpu import mps
from dynamiccl.agent.checks.gpu.mps import Mps

CONTROL = """#!/bin/sh
[ "$1" = -f ] || { cat >> "$CUDA_MPS_PIPE_DIRECTORY/said"; cp "$CUDA_MPS_PIPE_DIRECTORY/said" "$SAID"; exit; }
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 60
"""
IS_CLIENT = "import os; open(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/control')"


@pytest.fixture
def said(tmp_path, monkeypatch):
    """The control program is installed; returns the file of what it is told."""
    (control := tmp_path / "nvidia-cuda-mps-control").write_text(CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    return tmp_path / "said"


@pytest.mark.parametrize(
    ("client", "state"),
    [
        (IS_CLIENT, "own"),
        ("import sys; sys.exit('CUDA error 805')", "none: no client can use it (CUDA error 805)"),
        ("import time; time.sleep(60)", "none: no client can use it (it hangs for 0 s)"),
    ],
)
def test_mps_is_used_where_a_client_can_connect(said, monkeypatch, client, state):
    """Before: it was used once its pipe was there, and if no rank could connect nearly nothing was measured."""
    monkeypatch.setattr(mps, "_CLIENT", client)
    if "hangs" in state:
        monkeypatch.setattr(mps, "_CLIENT_S", 0.2)
    ours = Mps(ranks_per_gpu=4)
    assert ours.state == state and bool(ours.env) == (state == "own")
    if state == "own":
        assert ours.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25" and not said.exists()
    ours.stop()
    assert said.read_text() == "quit\n"


def test_the_client_says_what_is_missing(said):
    """There may be no libcuda.so.1 at all."""
    ours = Mps(ranks_per_gpu=2)
    ours.stop()
    assert ours.state == "own" or ours.state.startswith("none: no client can use it (")
