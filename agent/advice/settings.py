"""Settings of the launch that no table can reach, with figures that others measured on other jobs, losses too."""

from __future__ import annotations

from collections.abc import Collection

FSDP2 = "FSDP2"
SUM = (
    "FSDP2 averages in reduce_scatter, which NVLS, PAT and symmetric kernels cannot (pytorch#155915, nccl#1670): "
    "module.set_force_sum_reduction_for_comms(True) opens these to NCCL and to a tuner. No public figure of a whole job"
)
SYMMETRIC = (
    "FSDP2's set_symm_mem_for_comm within one NVLink domain: +1.1 to +6.3 % tokens/s on 4 GB200 (torchtitan#3105); "
    "its kernels ask no tuner"
)
COPY_ENGINES = (
    "all_gather by copy engines, with cta_policy 2 (ZERO), NCCL 2.28 and PyTorch 2.13; reduce_scatter stays a kernel. "
    "Copy engines: +2.4 % tokens/s for Llama3-8B on 8 H100, nothing with tensor parallelism (pytorch#179937), a loss "
    "on 128 GPUs (Megatron-LM#5657). Asked for on 8 H20, a kernel came instead without a word, -1.8 % (UniRL#467): "
    "look for the kernel's name in a profile"
)
EFFICIENCY = (
    "cta_policy 1 is EFFICIENCY, not ZERO: NCCL drops it while a tuner is loaded, so not beside dynamiccl"
)


def settings(funcs: Collection[str], n_nodes: int, framework: str | None = None) -> list[str]:
    """Settings to try, comparing step times, for a job that runs these collectives on ``n_nodes`` at most.

    ``framework`` is what the recording shows. FSDP2's own settings carry a condition unless it is FSDP2.
    """
    condition = "" if framework == FSDP2 else "only for a job that uses FSDP2: "
    found = [condition + SUM] if "reduce_scatter" in funcs else []
    if "all_gather" in funcs and n_nodes == 1:
        found += [condition + SYMMETRIC, COPY_ENGINES, EFFICIENCY]
    return found
