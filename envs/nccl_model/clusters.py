"""Clusters as NCCL sees them: presets, files, and many clusters at once as arrays.

A :class:`Cluster` is what NCCL knows after its topology search; a :class:`ClusterArrays` is ``n`` of them as arrays,
which is what the cost model and the fabric compute on.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .columns import Columns

if TYPE_CHECKING:  # a job on an emulated cluster does not wait for numpy to have its cluster checked
    import numpy as np

    Array = np.ndarray[Any, Any]

#: Rows of NCCL's tuning constants, in their order (NCCL 2.30.7 src/graph/tuning.cc).
GENERATIONS = ("V", "A", "H", "B")
CPUS = ("intel", "amd", "arm", "mixed")
#: NCCL's path types from near to far (NCCL 2.30.7 src/graph/topo.h).
PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")
MAX_CHANNELS = 64
_FILE = Path(__file__).with_name("clusters.toml")


@dataclass(frozen=True)
class Graph:
    """One graph of NCCL's search: channels, GB/s a channel within and between nodes, path types, network us."""

    channels: int
    bw_intra: float
    bw_inter: float
    type_intra: str = "NVL"
    type_inter: str = "PIX"
    latency_inter: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.channels <= MAX_CHANNELS:
            raise ValueError(f"graph channels must lie in 0..{MAX_CHANNELS}, not {self.channels}")
        # Written so that NaN fails too.
        if not (0 < self.bw_intra < 1e5 and 0 < self.bw_inter < 1e5 and 0 <= self.latency_inter < 1e4):
            raise ValueError("a graph needs bw_intra, bw_inter in (0, 1e5) GB/s, latency_inter in [0, 1e4) us")
        for path in (self.type_intra, self.type_inter):
            if path not in PATHS:
                raise ValueError(f"unknown path type {path!r}; NCCL's are {', '.join(PATHS)}")


NO_GRAPH = Graph(0, 1.0, 1.0)


@dataclass(frozen=True)
class Cluster:
    """What NCCL knows of a cluster; the keys are explained at the head of ``clusters.toml``."""

    name: str
    n_nodes: int
    gpus_per_node: int
    generation: str
    ring: Graph
    tree: Graph
    comm_channels: int
    nvls: Graph = field(default=NO_GRAPH)
    nvls_channels: int = 0
    gpu: str = "unknown"
    n_sms: int = 108
    cpu: str = "intel"
    nic: str = "unknown"
    n_nics: int = 1
    nic_gbs: float = 12.5
    nccl: str = "2.28.9"
    collnet: bool = False
    host_net: bool = True

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.n_nodes <= 65536, f"n_nodes must lie in 1..65536, not {self.n_nodes}"),
            (1 <= self.gpus_per_node <= 72, f"gpus_per_node must lie in 1..72, not {self.gpus_per_node}"),
            (self.n_ranks >= 2, "a cluster has at least 2 ranks: NCCL never asks a tuner for one"),
            (self.generation in GENERATIONS, f"generation must be one of {', '.join(GENERATIONS)}"),
            (self.cpu in CPUS, f"cpu must be one of {', '.join(CPUS)}"),
            (1 <= self.comm_channels <= MAX_CHANNELS, f"comm_channels must lie in 1..{MAX_CHANNELS}"),
            (0 <= self.nvls_channels <= MAX_CHANNELS, f"nvls_channels must lie in 0..{MAX_CHANNELS}"),
            (self.n_sms >= 1 and self.n_nics >= 1 and self.nic_gbs > 0, "n_sms, n_nics and nic_gbs must be positive"),
            (self.ring.channels >= 1, "the ring graph has at least one channel"),
        )
        for ok, message in checks:
            if not ok:
                raise ValueError(f"cluster {self.name}: {message}")
        release_number(self.nccl)

    @property
    def n_ranks(self) -> int:
        """Ranks of the communicator, one a GPU."""
        return self.n_nodes * self.gpus_per_node

    @property
    def offers_ll128(self) -> bool:
        """NCCL's default rule for LL128: near paths only (2.30.7 src/graph/tuning.cc, ncclTopoTuneModel)."""
        farthest = "PXN" if self.generation in ("H", "B") else "PXB"
        near = PATHS.index(self.ring.type_intra) <= PATHS.index("NVB")
        return near and (self.n_nodes == 1 or PATHS.index(self.ring.type_inter) <= PATHS.index(farthest))

    @property
    def offers_nvls(self) -> bool:
        """NVLS for all_gather and reduce_scatter: NVSwitch multicast; on several nodes CollNet too."""
        able = self.generation in ("H", "B") and self.nvls.channels >= 2 and self.nvls_channels > 0
        return able and self.gpus_per_node <= 32 and (self.n_nodes == 1 or self.collnet)

    @property
    def offers_pat(self) -> bool:
        """PAT: one GPU a node and a host-driven network (NCCL_PAT_ENABLE at its default), from 2.23 on."""
        return self.gpus_per_node == 1 and self.host_net and release_number(self.nccl) >= 22300


@dataclass
class ClusterArrays(Columns):
    """``n`` clusters as arrays of shape (n,): what the cost model and the fabric compute on."""

    n_nodes: Array
    gpus_per_node: Array
    generation: Array  # index into GENERATIONS
    release: Array  # 22809 for 2.28.9
    amd: Array  # bool: AMD or mixed CPUs
    ring_channels: Array
    ring_bw_intra: Array  # GB/s a channel
    ring_bw_inter: Array
    ring_nvl: Array  # bool: the ring's path within a node is NVLink
    ring_latency: Array  # us
    tree_channels: Array
    tree_bw_intra: Array
    tree_bw_inter: Array
    tree_nvl: Array
    tree_latency: Array
    nvls_graph_channels: Array
    nvls_bw_intra: Array
    nvls_bw_inter: Array
    nvls_latency: Array
    comm_channels: Array
    nvls_channels: Array
    ll128: Array  # bool: offered
    nvls: Array
    pat: Array
    collnet: Array
    n_sms: Array
    n_nics: Array
    nic_gbs: Array

    @property
    def n_ranks(self) -> Array:
        """Ranks, (n,)."""
        import numpy as np

        return np.asarray(self.n_nodes * self.gpus_per_node)

    @classmethod
    def of(cls, clusters: Sequence[Cluster]) -> ClusterArrays:
        """The arrays of ``clusters``, in their order."""
        import numpy as np

        rows = [_row(c) for c in clusters]
        return cls(**{f.name: np.array([row[f.name] for row in rows]) for f in fields(cls)})


def _row(c: Cluster) -> dict[str, Any]:
    """What ClusterArrays has of a cluster, by its fields: those of the cluster, and some that follow from them."""
    row = {**vars(c), "nic_gbs": float(c.nic_gbs), "nvls_graph_channels": c.nvls.channels}
    row |= {"generation": GENERATIONS.index(c.generation), "release": release_number(c.nccl)}
    row |= {"amd": c.cpu in ("amd", "mixed"), "ring_channels": c.ring.channels, "tree_channels": c.tree.channels}
    for kind, graph in (("ring", c.ring), ("tree", c.tree), ("nvls", c.nvls)):
        row |= {f"{kind}_bw_intra": float(graph.bw_intra), f"{kind}_bw_inter": float(graph.bw_inter)}
        row |= {f"{kind}_latency": float(graph.latency_inter), f"{kind}_nvl": graph.type_intra == "NVL"}
    return {**row, "ll128": c.offers_ll128, "nvls": c.offers_nvls, "pat": c.offers_pat}


@functools.lru_cache(maxsize=256)
def release_number(text: str) -> int:
    """``'2.28.9' -> 22809``. Raises ValueError when it is no release."""
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(p.isdigit() for p in parts) or int(parts[0]) != 2:
        raise ValueError(f"NCCL release looks like 2.28.9, not {text!r}")
    return int(parts[0]) * 10000 + int(parts[1]) * 100 + (int(parts[2]) if len(parts) == 3 else 0)


def from_mapping(name: str, values: Mapping[str, Any]) -> Cluster:
    """Cluster from the keys of a TOML table. Raises ValueError naming what is missing, unknown, impossible."""
    known = {f.name for f in fields(Cluster)} - {"name"}
    for key in values:
        if key not in known and key not in ("like", "name"):
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"cluster {name}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    base = _fields(cluster(str(values["like"]))) if "like" in values else {}
    merged: dict[str, Any] = {**base, **{k: v for k, v in values.items() if k not in ("like", "name")}}
    graphs = [key for key in ("ring", "tree", "nvls") if isinstance(merged.get(key), Mapping)]
    needed = ("n_nodes", "gpus_per_node", "generation", "ring", "comm_channels")
    missing = [key for key in needed if key not in merged]
    if missing:
        raise ValueError(f"cluster {name}: missing {', '.join(missing)}")
    try:
        merged |= {key: Graph(**merged[key]) for key in graphs}
        merged.setdefault("tree", merged["ring"])
        return Cluster(name=name, **merged)
    except TypeError as error:
        raise ValueError(f"cluster {name}: {error}") from None
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("cluster ") else f"cluster {name}: {text}") from None


def _fields(c: Cluster) -> dict[str, Any]:
    return {f.name: getattr(c, f.name) for f in fields(c) if f.name != "name"}


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())


def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets."""
    return tuple(_tables())


@functools.cache
def _preset(name: str) -> Cluster:
    return from_mapping(name, _tables()[name])


def cluster(name: str) -> Cluster:
    """The preset of that name, or the cluster in the TOML file at that path.

    Raises ValueError naming the presets (near ones first) for an unknown name, what is wrong for a bad file.
    """
    if name in _tables():
        return _preset(name)
    if name.endswith(".toml"):
        return _read(Path(name))
    near = difflib.get_close_matches(name, preset_names(), 3, 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no cluster preset {name!r}: {hint}presets are {', '.join(preset_names())}; or a .toml file")


def _read(path: Path) -> Cluster:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read cluster file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"cluster file {path} is not TOML: {error}") from None
    tables = [k for k, value in values.items() if isinstance(value, Mapping) and k not in ("ring", "tree", "nvls")]
    if tables and len(tables) == len(values) == 1:
        return from_mapping(tables[0], values[tables[0]])
    return from_mapping(str(values.get("name", path.stem)), values)


def resize(c: Cluster, n_nodes: int | None = None, nccl: str | None = None) -> Cluster:
    """The same kind of cluster with another number of nodes or another NCCL release.

    A one-node preset grown to several nodes takes the graphs of its kind's two-node preset, where there is
    one.
    """
    if n_nodes is not None and n_nodes != c.n_nodes:
        kind, _, _ = c.name.rpartition("-")
        pair = f"{kind}-{'1' if n_nodes == 1 else '2'}x{c.gpus_per_node}"
        base = cluster(pair) if pair in _tables() and (n_nodes == 1) != (c.n_nodes == 1) else c
        c = replace(base, n_nodes=n_nodes, nccl=c.nccl, name=f"{kind}-{n_nodes}x{c.gpus_per_node}")
    return replace(c, nccl=nccl) if nccl is not None else c


def find(name: str, n_nodes: int | None = None) -> Cluster:
    """:func:`cluster`, or a kind of preset: ``dgx-h100`` with ``n_nodes`` (default 1, else the fewest)."""
    kinds = [p for p in preset_names() if p.rpartition("-")[0] == name]
    if not kinds:
        return cluster(name)
    exact = [p for p in kinds if cluster(p).n_nodes == (n_nodes or 1)]
    return cluster((exact or kinds)[0])
