"""What random jobs are drawn from: clusters and jobs of the family that trains, and of one that is structurally outside
of it.

Every range is drawn, to be wider than any one cluster (2 to 2048 ranks, four GPU generations), so that a policy learns
to search rather than to know; nothing here is a measurement. The public figures that the ranges lie around are named
where the quantities are: :mod:`.fabric`, :mod:`.noise`, :mod:`.clusters`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..nccl_model.clusters import ClusterArrays
from .noise import NoiseFamily, Range, log_uniform

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ClusterFamily:
    """What clusters are drawn from; ranges are (low, high), drawn evenly on a log scale unless said otherwise."""

    generations: tuple[float, ...] = (0.08, 0.3, 0.47, 0.15)  # weights of V, A, H, B
    per_node: tuple[tuple[int, float], ...] = ((1, 0.12), (2, 0.04), (4, 0.14), (8, 0.7))
    one_node: float = 0.3  # probability
    n_nodes: Range = (2, 256)
    releases: tuple[int, ...] = (22707, 22809, 22907, 23007, 23203)
    width: float = 1.0  # of the fabric's parameters around the nominal ones, see fabric.spread


@dataclass(frozen=True)
class JobFamily:
    """What jobs are drawn from. Ranges are (low, high): of sizes even on a log scale, else evenly; others are
    probabilities."""

    name: str
    version: int
    clusters: ClusterFamily
    works: tuple[str, ...]  # prefixes of the names of workloads
    one_communicator: float = 0.5  # gathers and scatters share one stream, as in FSDP1 and DeepSpeed
    replicated: float = 0.3  # of the jobs with eight GPUs a node: sharded in the node, replicated over nodes
    exposed: Range = (0.01, 0.5)  # part of the default step that waits, log scale; public: 5.6 % (marin#8053)
    effects: Range = (0.05, 0.3)  # log size of what no formula knows, log scale
    octaves: Range = (3.0, 12.0)  # of message size over which such an effect turns into another, evenly
    touch: Range = (0.7, 1.8)  # by how much more calls slow the compute than fabrics say, log scale; public: 30-40 %
    crowd: Range = (0.0, 0.15)
    crowd_by_channels: bool = False  # else every call beside a call weighs the same
    power: Range = (1.0, 1.0)
    saturation: Range = (0.0, 0.5)
    drag: Range = (0.0, 0.15)
    noise: NoiseFamily = field(default_factory=NoiseFamily)
    swing: float = 0.4  # jobs on a network whose pace swings ...
    swing_size: Range = (0.02, 0.4)  # ... by up to this much, log scale ...
    swing_steps: Range = (300, 20_000)  # ... with this period, log scale


STANDARD = JobFamily("standard", 2, ClusterFamily(), ("gpt2 ", "gpt2-xl", "llama-7b"))
#: Structurally outside: other models, another law of contention, compute that saturates, another kind of noise.
HELD_OUT = JobFamily(
    "held-out",
    2,
    # More Blackwell and Volta, more nodes and few-GPU nodes, wilder fabrics.
    ClusterFamily(
        generations=(0.25, 0.1, 0.2, 0.45),
        per_node=((1, 0.2), (2, 0.15), (4, 0.25), (8, 0.4)),
        n_nodes=(2, 512),
        width=1.4,
    ),
    ("llama-13b", "llama-70b", "moe-8x7b"),
    effects=(0.15, 0.45),
    octaves=(1.5, 4.0),
    touch=(0.8, 2.5),
    crowd=(0.1, 0.5),
    crowd_by_channels=True,
    power=(1.2, 1.8),
    saturation=(0.5, 2.0),
    drag=(0.1, 0.4),
    noise=NoiseFamily(sigma=(0.003, 0.05), memory=(0.5, 0.98), two_paces=0.4, late_rank=0.25, call_sigma=(0.01, 0.08)),
    swing=0.7,
)


def draw_fleet(family: ClusterFamily, rng: np.random.Generator, n: int) -> ClusterArrays:
    """``n`` clusters with graphs such as NCCL's search finds (2.30.7 src/graph/search.cc: speed ladders)."""
    gen = rng.choice(4, n, p=np.array(family.generations) / sum(family.generations))
    sizes, weights = zip(*family.per_node, strict=True)
    per_node = rng.choice(np.array(sizes), n, p=np.array(weights) / sum(weights))
    nodes = np.where(rng.random(n) < family.one_node, 1, log_uniform(rng, family.n_nodes, n).round().astype(int))
    nodes = np.where((nodes == 1) & (per_node == 1), rng.choice([2, 4, 8], n), nodes)
    nodes = np.minimum(nodes, 2048 // per_node)
    many = nodes > 1
    nvlink = (per_node > 1) & (rng.random(n) < np.where(per_node == 8, 0.92, 0.6))
    socket = (per_node == 1) & (rng.random(n) < 0.25)

    # Within a node: NVLink as the generation has it, or PCIe.
    link_channels = np.maximum(np.array([12, 12, 12, 16])[gen] * np.minimum(per_node, 8) // 8, 2)
    link_gbs = np.array([20.0, 20.0, 30.0, 45.0])[gen]
    pci_channels, pci_gbs = rng.choice([2, 4], n), rng.choice([6.0, 9.0, 12.0, 24.0], n)
    # Between nodes: one channel a port (two where there is one port), at the port's speed.
    n_nics = np.minimum(rng.choice([1, 2, 4, 8], n, p=[0.15, 0.15, 0.2, 0.5]), per_node)
    nic = np.array([[12.5, 25.0], [12.5, 25.0], [25.0, 50.0], [50.0, 100.0]])[gen, rng.integers(0, 2, n)]
    nic = np.where(socket, rng.choice([0.12, 1.25], n), nic)
    net_channels = np.where(n_nics == 1, 2, n_nics)
    net_gbs = n_nics * nic * 0.96 / net_channels
    channels = np.where(many, net_channels, np.where(nvlink, link_channels, pci_channels))
    gbs = np.where(many, np.where(nvlink | (per_node == 1), net_gbs, np.minimum(net_gbs, pci_gbs)), 0.0)
    gbs = np.where(many, gbs, np.where(nvlink, link_gbs, pci_gbs))
    comm = np.clip(np.where(many | nvlink, 2 * channels, channels), 2, 32)
    comm = np.where(rng.random(n) < 0.2, np.minimum(comm * 2, 32), comm)  # jobs with a raised minimum of CTAs
    latency = np.where(many & (rng.random(n) < 0.3), rng.uniform(0, 20, n), 0.0)
    switch = nvlink & (per_node == 8) & (gen >= 2) & ~many & (rng.random(n) < 0.85)
    nvls_channels = np.where(gen == 3, 24, 16)
    release = rng.choice(np.array(family.releases), n)
    return ClusterArrays(
        n_nodes=nodes,
        gpus_per_node=per_node,
        generation=gen,
        release=release,
        amd=rng.random(n) < 0.4,
        ring_channels=channels,
        ring_bw_intra=gbs,
        ring_bw_inter=gbs.copy(),
        ring_nvl=nvlink,
        ring_latency=latency,
        tree_channels=channels.copy(),
        tree_bw_intra=gbs.copy(),
        tree_bw_inter=gbs.copy(),
        tree_nvl=nvlink.copy(),
        tree_latency=latency.copy(),
        nvls_graph_channels=np.where(gen == 3, 16, 8),
        nvls_bw_intra=np.where(gen == 3, 45.0, 40.0),
        nvls_bw_inter=np.where(gen == 3, 45.0, 40.0),
        nvls_latency=np.zeros(n),
        comm_channels=comm,
        nvls_channels=np.where(switch, nvls_channels, 0),
        ll128=(nvlink | (per_node == 1)) & ~socket & (rng.random(n) < 0.88),
        nvls=switch,
        pat=(per_node == 1) & (rng.random(n) < 0.9),
        collnet=np.zeros(n, bool),
        n_sms=np.array([80, 108, 132, 148])[gen],
        n_nics=n_nics,
        nic_gbs=nic,
    )
