"""Recordings as commands take them: ours or PyTorch's, placed on a cluster."""

from __future__ import annotations

from pathlib import Path

from ...envs.replay.recordings import named, on_cluster
from ...traces.files import Trace, TraceError
from ...traces.importers.recording import read_recording, recording_files
from ..report.terminal import terminal


def read(
    paths: list[Path], cluster: str | None = None, nccl: str | None = None, ranks_per_node: int | None = None
) -> Trace:
    """The recording, with offers of the named cluster where it has none. Raises TraceError or ValueError."""
    c = named(cluster, nccl) if cluster else None
    total = sum(p.stat().st_size for p in recording_files(paths))
    if ranks_per_node is None and c is not None:
        ranks_per_node = c.gpus_per_node
    with terminal(stderr=True).status(f"reading {total / 1e6:,.0f} MB"):
        trace = read_recording(paths, ranks_per_node)
    if c is None and not len(trace.offers):
        raise TraceError("the recording does not say what NCCL offers: name the recorded cluster with --cluster")
    return on_cluster(trace, named(str(cluster), nccl, trace.header.get("nccl"))) if c else trace
