"""A world of ranks that is started once and runs one function after another; the fixtures `two` and `four` are such."""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: What a row of the documents is tested with: fixtures of worlds, and dtypes. The first is quick, the rest slow.
SIZES_AND_DTYPES = [
    pytest.param(size, dtype, marks=() if (size, dtype) == ("two", torch.float32) else pytest.mark.slow)
    for size in ("two", "four")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo")
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # torch's CheckpointException is no Exception
            pipe.send((False, traceback.format_exc()))


class World:
    """``size`` processes joined over gloo."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Ranks are forked from a process that has imported what takes seconds, and so has it only once.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "dynamiccl.zero_workload"])
        self.pipes, self.ranks = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.ranks.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(*args)`` on every rank; its results by rank."""
        for pipe in self.pipes:
            pipe.send((function, args))
        silence = (False, f"no answer within {timeout} s")
        answers = [
            pipe.recv() if pipe.poll(timeout) else silence for pipe in self.pipes
        ]  # all, or the next run has it
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank}:\n{value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.ranks, strict=True):
            with contextlib.suppress(OSError):  # it has died
                pipe.send(None)
            process.join(5)
            process.kill()
            process.join()
