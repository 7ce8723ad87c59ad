"""What random jobs are drawn from: the family that trains, and one that is structurally outside of it.

Every range is drawn, to be wider than any one cluster; the public figures that they lie around are named where the
quantities are: :mod:`.fabric`, :mod:`.noise`, :mod:`.clusters`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from . import family
from .family import Family
from .noise import NoiseFamily, Range


@dataclass(frozen=True)
class JobFamily:
    """What jobs are drawn from. Ranges are (low, high): of sizes even on a log scale, else evenly; others are
    probabilities."""

    name: str
    version: int
    clusters: Family
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
    change: float = 0.0  # jobs in which something changes for good: the network, or the time that compute takes ...
    change_at: Range = (200, 4000)  # ... at this step, log scale
    passing: float = 0.3  # of the changes pass: an evaluation, other batches, a neighbour's job ...
    change_for: Range = (200, 5000)  # ... after so many steps, log scale


STANDARD = JobFamily("standard", 2, family.STANDARD, ("gpt2 ", "gpt2-xl", "llama-7b"))
#: Structurally outside: other models, another law of contention, compute that saturates, another kind of noise.
HELD_OUT = JobFamily(
    "held-out",
    2,
    family.HELD_OUT,
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
