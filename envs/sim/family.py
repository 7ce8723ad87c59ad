"""What random jobs are drawn from: worlds, and families that mix them.

Jobs of the world ``plain`` do not surprise a tuner that believes in one effect a slot; those of the others do, each in
its way: ``interaction`` (configs of different slots help or disturb each other), ``tails`` (some configs straggle),
``moving`` (which config is best changes), ``wide`` (configs are farther from any formula, and channels not smooth),
``lasting`` (the noise of real nodes, and of GPUs that ranks share), ``alternating`` (batches that come and go) and
``many`` (20 to 60 slots).

Every range is drawn, to be wider than any one cluster (2 to 2048 ranks, four GPU generations), so that a policy learns
to search rather than to know; nothing here is a measurement but the noise of ``lasting``. The public figures that the
ranges lie around are named where the quantities are: :mod:`.fabric`, :mod:`.noise`, :mod:`.worlds`, :mod:`.clusters`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..nccl_model.clusters import ClusterArrays, GraphArrays
from .noise import NODE, SHARED, NoiseFamily, Range, log_uniform
from .regimes import RegimeFamily
from .step import Law
from .worlds import Extra

Array = np.ndarray[Any, Any]
#: ``SampledClusters.world`` counts them. ``sms`` to ``nothing`` are of :mod:`.unseen`: nothing was trained on them. Nor
#: on ``ddp``, whose jobs all-reduce. ``mpi-headroom`` is of :mod:`.recorded_gains`.
WORLDS = (
    *("plain", "interaction", "tails", "moving", "wide", "lasting", "alternating", "many"),
    *("sms", "meeting", "dip", "rail", "nothing"),
    *("mpi-headroom", "ddp"),
)


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
class Contention:
    """How calls side by side disturb each other, beyond sharing links; of each the probability that a job has it."""

    budget: float = 0.0  # they share a maximum of channels: SMs, copy engines
    serial: float = 0.0  # kernels wait for each other where they do not fit side by side
    limit: Range = (0.3, 0.9)  # either's channels, of twice the communicator's, evenly
    squeeze: Range = (0.5, 3.0)  # log scale
    port: float = 0.0  # some pairs of algorithm and protocol meet at one port ...
    port_size: Range = (0.2, 1.5)  # ... log scale
    port_by_func: bool = False  # other pairs for gathers than for scatters


@dataclass(frozen=True)
class World:
    """What jobs of one world are drawn from. Ranges are (low, high): of sizes even on a log scale, else evenly; others
    are probabilities."""

    works: tuple[str, ...]  # prefixes of the names of workloads
    name: str = "plain"  # one of WORLDS
    clusters: ClusterFamily = field(default_factory=ClusterFamily)
    one_communicator: float = 0.5  # gathers and scatters share one stream, as in FSDP1 and DeepSpeed
    replicated: float = 0.3  # of the jobs with eight GPUs a node: sharded in the node, replicated over nodes
    exposed: Range = (0.01, 0.5)  # part of the default step that waits, log scale; public: 5.6 % (marin#8053)
    effects: Range = (0.05, 0.3)  # log size of what no formula knows, log scale
    octaves: Range = (3.0, 12.0)  # of message size over which such an effect turns into another, evenly
    jagged: Range = (0.0, 0.0)  # log size of what each channel count of a slot has of its own, evenly
    touch: Range = (
        0.7,
        1.8,
    )  # by how much more calls slow the compute than fabrics say, log scale; public: 30-40 %
    #: Waves of tiles that matrix products take on all SMs, log scale; 0: compute slows evenly with the channels.
    waves: Range = (0.0, 0.0)
    steal: Range = (0.0, 0.0)  # of what a call gains it takes this part from compute beside it, evenly
    crowd: Range = (0.0, 0.15)
    crowd_by_channels: bool = False  # else every call beside a call weighs the same
    power: Range = (1.0, 1.0)
    saturation: Range = (0.0, 0.5)
    drag: Range = (0.0, 0.15)
    noise: NoiseFamily = field(default_factory=NoiseFamily)
    swing: float = 0.4  # jobs on a network whose pace swings ...
    swing_size: Range = (0.02, 0.4)  # ... by up to this much, log scale ...
    swing_steps: Range = (300, 20_000)  # ... with this period, log scale
    #: First use of an algorithm, times fabric.connect_us, log scale; public: 1.9 and 1.2 s (UniRL#467).
    connect: Range = (1.0, 30.0)
    carries: float = 0.5  # jobs of which a part of a table's effect carries over into the next step ...
    carry_over: Range = (0.0, 0.3)  # ... this part, evenly; no public figure says how much
    contention: Contention = field(default_factory=Contention)
    extra: Extra = field(default_factory=Extra)
    regimes: RegimeFamily = field(default_factory=RegimeFamily)
    sums: bool = False  # gradients are all-reduced, and no weights gathered
    many: bool = False  # steps of LEAST_MANY to MANY_SLOTS slots, else of SLOTS at most
    crammed: bool = False  # memory pressure tells of the batch, else of nothing
    #: Changes jobs as they are drawn, by a mechanism of its own: called with the jobs and a generator.
    hook: Callable[[Any, np.random.Generator], None] | None = None


@dataclass(frozen=True)
class JobFamily:
    """A mixture: each job is of one of ``parts``, all as often."""

    name: str
    version: int
    parts: tuple[World, ...]

    @property
    def worlds(self) -> tuple[str, ...]:
        """The names of its worlds."""
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def only(self, world: str) -> JobFamily:
        """The part of it that is of one world. Raises ValueError for a world that it has not."""
        if world not in self.worlds:
            raise ValueError(f"{self.name} has no world {world}: it has {', '.join(self.worlds)}")
        return replace(self, parts=tuple(part for part in self.parts if part.name == world))


@dataclass(frozen=True)
class Surprises:
    """What the worlds of a family have that its plain one has not."""

    contention: Contention
    joint: Extra
    tails: Extra
    moves: Extra
    rough: float  # effects of the wide world, in those of the plain one
    lasting: NoiseFamily
    regimes: RegimeFamily


def _worlds(base: World, ways: Surprises) -> list[World]:
    low, high = base.effects
    wide_effects = ways.rough * max(low, 0.12), ways.rough * high
    return [
        base,
        # Slots meet where gathers and scatters have communicators of their own.
        replace(
            base, name="interaction", one_communicator=0.25, contention=ways.contention, extra=ways.joint
        ),
        replace(base, name="tails", extra=ways.tails),
        replace(base, name="moving", exposed=(0.02, 0.5), extra=ways.moves),
        replace(
            base,
            name="wide",
            effects=wide_effects,
            octaves=(1.5, 6.0),
            jagged=(0.05, 0.4),
            touch=(base.touch[0], 2 * base.touch[1]),
            steal=(0.0, 1.5),
        ),
        replace(base, name="lasting", noise=ways.lasting),
        replace(base, name="alternating", regimes=ways.regimes),
        replace(base, name="many", many=True),
    ]


_SMALL = ("gpt2 ", "gpt2-xl", "llama-7b", "llama-13b")
_WAVES = (0.5, 30.0)
_MILD = World(_SMALL, touch=(0.7, 1.4), waves=_WAVES, crammed=True)
#: Another law of contention, compute that saturates, another kind of noise; more Blackwell and Volta, more nodes and
#: few-GPU nodes, wilder fabrics.
_HARSH = World(
    _SMALL,
    clusters=ClusterFamily(
        generations=(0.25, 0.1, 0.2, 0.45),
        per_node=((1, 0.2), (2, 0.15), (4, 0.25), (8, 0.4)),
        n_nodes=(2, 512),
        width=1.4,
    ),
    effects=(0.15, 0.45),
    octaves=(1.5, 4.0),
    touch=(0.7, 1.8),
    waves=_WAVES,
    crowd=(0.1, 0.5),
    crowd_by_channels=True,
    power=(1.2, 1.8),
    saturation=(0.2, 0.8),
    drag=(0.1, 0.4),
    noise=NoiseFamily(
        sigma=(0.003, 0.05), memory=(0.5, 0.98), two_paces=0.4, late_rank=0.25, call_sigma=(0.01, 0.08)
    ),
    swing=0.7,
    crammed=True,
)
_STANDARD = Surprises(
    Contention(budget=0.5, serial=0.25, port=0.5),
    joint=Extra(joint=(0.04, 0.15)),
    tails=Extra(straggle=0.25),
    moves=Extra(moves=(0.3, 1.5)),
    rough=2.5,
    lasting=NODE,
    regimes=RegimeFamily(count=(2, 4)),
)
_ROUGH = replace(_STANDARD, lasting=SHARED, regimes=RegimeFamily(count=(2, 4), batch=(0.2, 5.0), resized=0.7))
#: What trains.
STANDARD = JobFamily("standard", 4, (*_worlds(_MILD, _STANDARD), *_worlds(_HARSH, _ROUGH)))
_STRANGE = replace(
    _HARSH,
    works=("llama-70b", "moe-8x7b"),
    crowd=(0.0, 0.3),
    power=(1.0, 1.4),
    saturation=(0.0, 1.2),
    noise=NoiseFamily(
        sigma=(0.002, 0.06),
        memory=(0.0, 0.995),
        tail=(0.001, 0.02),
        two_paces=0.5,
        pace=(0.02, 0.1),
        hold=(5, 1000),
        late_rank=0.4,
        call_sigma=(0.005, 0.1),
        sampled=(2, 16),
    ),
    swing_steps=(100, 5000),
)
_STRANGE_WAYS = Surprises(
    Contention(serial=0.5, limit=(0.2, 0.6), port=0.8, port_size=(0.3, 3.0), port_by_func=True),
    joint=Extra(joint=(0.05, 0.2), group=3, often=0.2),
    tails=Extra(straggle=0.25, late_often=(0.0005, 0.003), late_size=(1.5, 6.0), by_channels=True),
    moves=Extra(moves=(0.3, 2.0), period=(1500, 12_000), sudden=0.8),
    rough=3.0,
    # Noise that lasts in another form: most machines have two paces, and long steps come often.
    lasting=NoiseFamily(
        sigma=(0.001, 0.05),
        memory=(0.2, 0.95),
        tail=(0.001, 0.05),
        two_paces=0.8,
        pace=(0.02, 0.15),
        hold=(10, 300),
        late_rank=0.5,
        saves=0.8,
        save_every=(8, 300),
        save_cost=(0.05, 2.0),
        slow=(0.002, 0.1),
        slow_steps=(3, 500),
        longer=4.0,
    ),
    regimes=RegimeFamily((2, 4), stay=(60, 3000), batch=(0.15, 4.0), resized=0.8, shuffled=True),
)
#: Structurally outside: other models, contention between other things, effects of three slots together, stragglers that
#: come with many channels, congestion that comes and goes otherwise, another kind of noise, regimes in no fixed order.
HELD_OUT = JobFamily("held-out", 4, tuple(_worlds(_STRANGE, _STRANGE_WAYS)))

#: Data parallel jobs. A family of its own: figures of all-gathers and reduce-scatters hold none of it.
DDP = JobFamily(
    "ddp", 1, tuple(replace(base, name="ddp", sums=True, replicated=0.0) for base in (_MILD, _HARSH))
)


def draw_fleet(family: ClusterFamily, rng: np.random.Generator, n: int) -> ClusterArrays:
    """``n`` clusters with graphs such as NCCL's search finds (2.30.7 src/graph/search.cc: speed ladders)."""
    gen = rng.choice(4, n, p=np.array(family.generations) / sum(family.generations))
    sizes, weights = zip(*family.per_node, strict=True)
    per_node = rng.choice(np.array(sizes), n, p=np.array(weights) / sum(weights))
    nodes = np.where(
        rng.random(n) < family.one_node, 1, log_uniform(rng, family.n_nodes, n).round().astype(int)
    )
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
    switched = np.where(gen == 3, 45.0, 40.0)
    return ClusterArrays(
        n_nodes=nodes,
        gpus_per_node=per_node,
        generation=gen,
        release=release,
        amd=rng.random(n) < 0.4,
        ring=GraphArrays(channels, gbs, gbs.copy(), nvlink, latency),
        tree=GraphArrays(channels.copy(), gbs.copy(), gbs.copy(), nvlink.copy(), latency.copy()),
        nvls=GraphArrays(np.where(gen == 3, 16, 8), switched, switched.copy(), nvlink.copy(), np.zeros(n)),
        comm_channels=comm,
        nvls_channels=np.where(switch, nvls_channels, 0),
        offers_ll128=(nvlink | (per_node == 1)) & ~socket & (rng.random(n) < 0.88),
        offers_nvls=switch,
        offers_pat=(per_node == 1) & (rng.random(n) < 0.9),
        collnet=np.zeros(n, bool),
        n_sms=np.array([80, 108, 132, 148])[gen],
        n_nics=n_nics,
        nic_gbs=nic,
    )


def draw_law(kind: World, fleet: ClusterArrays, rng: np.random.Generator) -> Law:
    """How the calls of each job disturb each other."""
    n = len(fleet)
    contention = kind.contention
    most = 2 * fleet.comm_channels

    def some(share: float, value: Callable[[], Array]) -> Array:
        has = rng.random(n) < share
        drawn = value()
        return np.where(has, drawn, 0.0)

    def limit() -> Array:
        part = rng.uniform(*contention.limit, n)
        return part * most

    def port() -> Array:
        return log_uniform(rng, contention.port_size, n)

    # The order of draws is the order of jobs.
    return Law(
        crowd=rng.uniform(*kind.crowd, n),
        power=rng.uniform(*kind.power, n),
        saturation=rng.uniform(*kind.saturation, n),
        drag=rng.uniform(*kind.drag, n),
        budget=some(contention.budget, limit),
        squeeze=log_uniform(rng, contention.squeeze, n),
        serial=some(contention.serial, limit),
        port=some(contention.port, port),
        knee=np.zeros(n),
        steep=np.zeros(n),
    )
