"""Makes a Kineto profile of any size, written as Kineto writes it: ``python tests/tools/make_profile.py FILE [MIB]``.

With ``--read`` in place of the size it is read as ``dynamiccl advise`` does, and time and peak memory are printed:
1 GiB is to take at most 60 seconds and 500 MiB on one core.
"""

import re
import sys
import time
from pathlib import Path

STEP_US, LAYERS, OPERATORS = 32_000.0, 64, 40
HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 16, "nccl_version": "2.28.9"},
  "baseTimeNanoseconds": 1763719000000000000,
  "traceEvents": [
"""


def event(name, kind, ts, dur, args):
    return (
        f'  {{\n    "ph": "X", "cat": "{kind}", "name": "{name}", "pid": 4242, "tid": 1,\n'
        f'    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def step(index, began):
    """The events of one step of a ZeRO-3 job: three collectives in two layers, forty operators a layer."""
    parts, number = [], index * LAYERS * (OPERATORS + 1)
    for layer in range(LAYERS):
        ts = began + layer * STEP_US / LAYERS
        number += 1
        scatter = layer % 3 == 2
        name, sent, got = (
            ("_reduce_scatter_base", 1 << 24, 1 << 20) if scatter else ("_allgather_base", 1 << 20, 1 << 24)
        )
        told = f'"External id": {number}, "Collective name": "{name}", '
        told += f'"In msg nelems": {sent}, "Out msg nelems": {got}, '
        told += '"Group size": 16, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1, ...]"'
        parts.append(event("record_param_comms", "cpu_op", ts, 20, f'{told}, "Rank": 0, "Seq": {number}'))
        grid = f'"External id": {number}, "stream": 20, "grid": [16, 1, 1], "block": [544, 1, 1]'
        parts.append(
            event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "kernel", ts + 50, 400, grid)
        )
        for k in range(OPERATORS):
            number += 1
            shapes = f'"External id": {number}, "Input type": ["c10::BFloat16", "c10::BFloat16"], "Concrete Inputs": '
            shapes += '["", ""], "Input Dims": [[8192, 4096], [4096, 4096]], "Input Strides": [[4096, 1], [1, 4096]], '
            shapes += f'"Ev Idx": {number}'
            parts.append(event("aten::mm", "cpu_op", ts + 10 * k, 8.25, shapes))
            launch = f'"External id": {number}, "cbid": 211, "correlation": {number}'
            parts.append(event("cudaLaunchKernel", "cuda_runtime", ts + 10 * k + 2, 3.5, launch))
            if k % 2 == 0:
                grid = f'"External id": {number}, "stream": 7, "correlation": {number}, "grid": [132, 1, 1], '
                grid += '"registers per thread": 168, "shared memory": 213504, "block": [384, 1, 1]'
                parts.append(event(f"sm90_xmma_gemm_bf16_{k % 6}", "kernel", ts + 10 * k + 9, 18.5, grid))
    parts.append(event(f"ProfilerStep#{index}", "user_annotation", began, STEP_US, '"External id": 0'))
    return ",\n".join(parts)


def write(path, mib):
    """Write a profile of at least so many MiB; the number of its steps."""
    with Path(path).open("w") as file:
        file.write(HEAD)
        index = 0
        while file.tell() < mib << 20:
            file.write((",\n" if index else "") + step(index, 4.4e12 + index * STEP_US))
            index += 1
        file.write('\n  ],\n  "traceName": "x.json"\n}\n')
    return index


def read(path):
    """Read it; prints collectives, steps, kernels, CPU seconds, peak MiB."""
    from dynamiccl.traces.importers.recording import read_recording

    began = time.process_time()
    trace = read_recording([Path(path)])
    # Not getrusage's: that begins with what the process that started this one had.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024
    print(
        len(trace.events), len(trace.steps), len(trace.compute), round(time.process_time() - began, 1), peak
    )


if __name__ == "__main__":
    if "--read" not in sys.argv:
        write(sys.argv[1], int([*sys.argv, "1024"][2]))
    else:
        read(sys.argv[1])
