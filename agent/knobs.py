"""Settings of the launch that no table can say: named where a recording speaks for them, with the public evidence.

The figures are their authors', of their machines; what one of them does here is not known before it is tried:
``dynamiccl compare`` sets launches beside each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..envs.sim.clusters import release_number
from ..traces.records import PAIRS
from .gain import config_decision

if TYPE_CHECKING:
    from .advise import Advice

#: A part of the step below this is never worth a setting of the launch.
_LEAST = 0.01


def knobs(advice: Advice) -> list[dict[str, str]]:
    """The settings that the recording speaks for: ``knob``, ``because``, ``evidence``, ``set``."""
    found = [rule(advice) for rule in (_fewer_ctas, _symmetric, _nvls, _headroom, _second_group)]
    return [knob for knob in found if knob is not None]


def _fewer_ctas(a: Advice) -> dict[str, str] | None:
    lost = sum(o.lost for o in a.overlaps if o.low > 0.02)
    if lost < _LEAST:
        return None
    return {
        "knob": "CTA policy of the communicator",
        "because": f"compute beside collectives loses {lost:.1%} of the step (measured in the recording)",
        "evidence": "openxla/xla#33613: about 7 % faster on 8 x H100 with NCCL 2.28's CTA policy; pytorch#179937: "
        "matmuls beside collectives 30-40 % slower, +2.4 % tokens/s with copy engines",
        "set": "options = dist.ProcessGroupNCCL.Options(); options.config.cta_policy = 1  # or max_ctas; NCCL 2.28+",
    }


def _symmetric(a: Advice) -> dict[str, str] | None:
    share = sum(p.share for p in a.tasks.profiles if p.slot.func == "all_gather" and p.slot.n_nodes == 1)
    if share < 5 * _LEAST or release_number(a.cluster.nccl) < 22703 or a.cluster.generation not in ("H", "B"):
        return None
    return {
        "knob": "registered, symmetric buffers",
        "because": f"all_gathers within a node take {share:.1%} of the step and run as ordinary kernels",
        "evidence": "UniRL#467: all_gather with 2 CTAs for 24, 10.8 % less NCCL time, no gain where it is 0.5 % of "
        "the step; NVIDIA/nccl#2305: reduce_scatter may launch too few CTAs. No tuner is asked for such calls",
        "set": "allocate the gathered buffers from a pool given to ProcessGroupNCCL.register_mem_pool",
    }


def _nvls(a: Advice) -> dict[str, str] | None:
    at = PAIRS.index(("nvls", "simple"))
    lack = [p for p in a.tasks.profiles if p.slot.n_nodes == 1 and p.slot.n_ranks >= 4]
    share = sum(p.share for p in lack if p.fingerprint.cost_us[0, at] < 0)
    if share < 2 * _LEAST or a.cluster.generation not in ("H", "B") or not a.cluster.offers_nvls:
        return None
    return {
        "knob": "NVLS",
        "because": f"NCCL did not offer it to collectives within a node that take {share:.1%} of the step",
        "evidence": "marin#8054: NVLS +0.68 % of an 18 s step; NVIDIA/nccl#1506: all_gather at 300 GB/s, ring 350",
        "set": "NCCL_NVLS_ENABLE=1",
    }


def _headroom(a: Advice) -> dict[str, str] | None:
    for i, p in enumerate(a.tasks.profiles):
        mean, _ = a.gains.belief.figures(i)
        best = int(mean.argmax())
        if not best or mean[best] < 0.5 * _LEAST:
            continue
        count = int(p.fingerprint.comm_channels[0])
        d = config_decision(best)
        if d.n_channels and d.n_channels * 2 > count and d.n_channels > int(p.fingerprint.own_channels[0]):
            return {
                "knob": "head-room of channels",
                "because": f"the best config found for {p.slot} already uses {d.n_channels} of {count} channels",
                "evidence": "a communicator's channels are fixed when it is made (NCCL 2.30.7 src/graph/connect.cc); "
                "rocm-systems#11253 warns of raising them blindly: they cost memory and SMs",
                "set": f"dynamiccl tune --headroom {min(2 * count, 64)}   (NCCL_MIN_CTAS={min(2 * count, 64)})",
            }
    return None


def _second_group(a: Advice) -> dict[str, str] | None:
    events = a.trace.events
    timed = events[events["start_ns"].notna() & (events["rank"] == events["rank"].min())]
    if timed.empty or not len(a.trace.compute):
        return None
    waited = 0
    for _, group in timed.sort_values("start_ns").groupby("comm_id"):
        end, func, queued = (group[c].shift() for c in ("end_ns", "func", "enqueue_ns"))
        behind = (
            (func != group["func"]) & queued.notna() & (group["start_ns"] - end < 5_000) & (group["enqueue_ns"] < end)
        )
        waits = (end - group["enqueue_ns"])[behind.fillna(False)]
        waited += int(waits.clip(upper=(end - group["start_ns"].shift())[waits.index]).sum())
    share = waited / 1e3 / max(1, timed["step"].nunique()) / a.step_us
    bare = float(np.nansum(a.exposed * np.array([p.share for p in a.tasks.profiles])))
    if min(share, bare) < 2 * _LEAST:
        return None
    return {
        "knob": "a second group for reduce_scatter",
        "because": f"all_gather and reduce_scatter wait for each other on one communicator, {share:.1%} of the step; "
        f"{bare:.1%} of the step is exposed",
        "evidence": "pytorch#177015, #177098 and Megatron-LM#2663: both ways are found in practice; no public figure",
        "set": "group = dist.new_group(ranks)  # and give it to the reduce_scatter of your sharding",
    }
