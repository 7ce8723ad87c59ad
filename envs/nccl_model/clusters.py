"""Clusters as NCCL sees them: presets, files, and many clusters at once as arrays.

A :class:`Cluster` is what NCCL knows after its topology search; a :class:`ClusterArrays` is ``n`` of them as arrays,
which is what the cost model and the fabric compute on.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .columns import Columns, as_columns

if TYPE_CHECKING:  # a job on an emulated cluster does not wait for numpy to have its cluster checked
    import numpy as np

    Array = np.ndarray[Any, Any]

#: Rows of NCCL's tuning constants, in their order (NCCL 2.30.7 src/graph/tuning.cc).
GENERATIONS = ("V", "A", "H", "B")
CPUS = ("intel", "amd", "arm", "mixed")
#: NCCL's path types from near to far (NCCL 2.30.7 src/graph/topo.h).
PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")
MAX_CHANNELS = 64
#: Keys of a cluster's graphs.
GRAPHS = ("ring", "tree", "nvls")
#: Ending of a file that describes a cluster.
FILE = ".toml"
#: Keys that say nothing of a cluster that NCCL looks at.
LABELS = ("like", "name", "gpu", "nic")
#: Types of a cluster's values in a file, and their names in words.
_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "str": (str, "a text in quotes"),
    "bool": (bool, "true or false"),
    "Graph": (Mapping, "a table with channels, bw_intra and bw_inter"),
}
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
            raise ValueError(
                "a graph needs bw_intra, bw_inter in (0, 1e5) GB/s, latency_inter in [0, 1e4) us"
            )
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
    n_sms: int = 108
    cpu: str = "intel"
    n_nics: int = 1
    nic_gbs: float = 12.5
    nccl: str = "2.28.9"
    collnet: bool = False

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.n_nodes <= 65536, f"n_nodes must lie in 1..65536, not {self.n_nodes}"),
            (1 <= self.gpus_per_node <= 72, f"gpus_per_node must lie in 1..72, not {self.gpus_per_node}"),
            (self.n_ranks >= 2, "a cluster has at least 2 ranks: NCCL never asks a tuner for one"),
            (self.generation in GENERATIONS, f"generation must be one of {', '.join(GENERATIONS)}"),
            (self.cpu in CPUS, f"cpu must be one of {', '.join(CPUS)}"),
            (1 <= self.comm_channels <= MAX_CHANNELS, f"comm_channels must lie in 1..{MAX_CHANNELS}"),
            (0 <= self.nvls_channels <= MAX_CHANNELS, f"nvls_channels must lie in 0..{MAX_CHANNELS}"),
            (
                self.n_sms >= 1 and self.n_nics >= 1 and self.nic_gbs > 0,
                "n_sms, n_nics and nic_gbs must be positive",
            ),
            (self.ring.channels >= 1, "the ring graph has at least one channel"),
        )
        for ok, message in checks:
            if not ok:
                raise ValueError(f"cluster {self.name}: {message}")
        _ = self.release  # raises where it is none

    @property
    def n_ranks(self) -> int:
        """Ranks of the communicator, one a GPU."""
        return self.n_nodes * self.gpus_per_node

    @property
    def release(self) -> int:
        """NCCL's release as a number, see :func:`release_number`."""
        return release_number(self.nccl)

    @property
    def amd(self) -> bool:
        """AMD or mixed CPUs."""
        return self.cpu in ("amd", "mixed")

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
        """PAT: one GPU a node (and a network that the host drives, as all here are), from 2.23 on."""
        return self.gpus_per_node == 1 and self.release >= 22300


@dataclass
class GraphArrays(Columns):
    """The graphs of ``n`` clusters as arrays of shape (n,), see :class:`Graph`."""

    channels: Array
    bw_intra: Array  # GB/s a channel
    bw_inter: Array
    nvlink: Array  # bool: the path within a node
    latency: Array  # us

    @classmethod
    def of(cls, graphs: Sequence[Graph]) -> GraphArrays:
        """The arrays of ``graphs``, in their order."""
        rows = [(g.channels, g.bw_intra, g.bw_inter, g.type_intra == "NVL", g.latency_inter) for g in graphs]
        return cls(*as_columns(rows))


@dataclass
class ClusterArrays(Columns):
    """``n`` clusters as arrays of shape (n,): what the cost model and the fabric compute on."""

    n_nodes: Array
    gpus_per_node: Array
    generation: Array  # index into GENERATIONS
    release: Array  # 22809 for 2.28.9
    amd: Array  # bool: AMD or mixed CPUs
    comm_channels: Array
    nvls_channels: Array
    n_sms: Array
    n_nics: Array
    nic_gbs: Array
    ring: GraphArrays
    tree: GraphArrays
    nvls: GraphArrays
    offers_ll128: Array  # bool
    offers_nvls: Array
    offers_pat: Array
    collnet: Array

    @property
    def n_ranks(self) -> Array:
        """Ranks, (n,)."""
        return self.n_nodes * self.gpus_per_node

    @classmethod
    def of(cls, clusters: Sequence[Cluster]) -> ClusterArrays:
        """The arrays of ``clusters``, in their order."""
        names = [f.name for f in fields(cls) if f.name not in (*GRAPHS, "generation")]
        columns = as_columns([[getattr(c, name) for name in names] for c in clusters])
        graphs: dict[str, Any] = {
            kind: GraphArrays.of([getattr(c, kind) for c in clusters]) for kind in GRAPHS
        }
        (generation,) = as_columns([[GENERATIONS.index(c.generation)] for c in clusters])
        return cls(**dict(zip(names, columns, strict=True)), **graphs, generation=generation)


@functools.lru_cache(maxsize=256)
def release_number(text: str) -> int:
    """``'2.28.9' -> 22809``. Raises ValueError when it is no release."""
    parts = text.split(".")
    if len(parts) not in (2, 3) or not all(p.isdigit() for p in parts) or int(parts[0]) != 2:
        raise ValueError(f"{text!r} is no release of NCCL: give one like 2.28.9")
    return int(parts[0]) * 10000 + int(parts[1]) * 100 + (int(parts[2]) if len(parts) == 3 else 0)


def values_of(c: Cluster) -> dict[str, Any]:
    """What :func:`from_mapping` makes that cluster of, beside its name."""
    return {key: value for key, value in asdict(c).items() if key != "name"}


def from_mapping(name: str, values: Mapping[str, Any]) -> Cluster:
    """Cluster from the keys of a TOML table. Raises ValueError naming what is missing, unknown, impossible."""
    given = {key: value for key, value in values.items() if key not in LABELS}
    _check_keys(name, given, "like" in values)
    for key in GRAPHS:
        if isinstance(given.get(key), Mapping):
            _check_types(f"{name}, {key}", Graph, given[key])
    _check_types(name, Cluster, given)
    base = _like(name, values["like"]) if "like" in values else None
    try:
        given |= {key: Graph(**given[key]) for key in GRAPHS if isinstance(given.get(key), Mapping)}
        if base is not None:
            return replace(base, name=name, **given)
        return Cluster(name=name, **{"tree": given["ring"], **given})
    except (TypeError, ValueError) as error:
        raise ValueError(f"cluster {name}: {str(error).removeprefix(f'cluster {name}: ')}") from None


def _check_types(name: str, of: type, given: Mapping[str, Any]) -> None:
    """Raises ValueError naming a value that is not of the type of its field."""
    for one in fields(of):
        if one.name not in given:
            continue
        value = given[one.name]
        kinds, words = _TYPES[str(one.type)]
        is_bool = isinstance(value, bool)  # which is an int for Python
        if not isinstance(value, kinds) or is_bool != (kinds is bool):
            raise ValueError(f"cluster {name}: {one.name} is {words}, not {value!r}")


def _like(name: str, preset: Any) -> Cluster:
    """The preset that a cluster is like. Raises ValueError for a file: it might be the one that is being read."""
    if not isinstance(preset, str) or preset.endswith(FILE):
        raise ValueError(f"cluster {name}: like is the name of a preset, not {preset!r}")
    return cluster(preset)


def _check_keys(name: str, given: Mapping[str, Any], is_like_another: bool) -> None:
    """Raises ValueError naming a key that no cluster has, or those that are missing from a cluster of its own."""
    known = {f.name for f in fields(Cluster)} - {"name"}
    for key in given.keys() - known:
        near = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"cluster {name}: unknown key {key!r}{hint}")
    needed = ("n_nodes", "gpus_per_node", "generation", "ring", "comm_channels")
    missing = [key for key in needed if key not in given]
    if missing and not is_like_another:
        raise ValueError(f"cluster {name}: missing {', '.join(missing)}")


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
    if name.endswith(FILE):
        return _read(Path(name))
    near = difflib.get_close_matches(name, preset_names(), 3, 0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"no cluster preset {name!r}: {hint}presets are {', '.join(preset_names())}; or a .toml file"
    )


def _read(path: Path) -> Cluster:
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read cluster file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"cluster file {path} is not TOML: {error}") from None
    return from_mapping(str(values.get("name", path.stem)), values)


def resize(c: Cluster, n_nodes: int | None = None, nccl: str | None = None) -> Cluster:
    """The same kind of cluster with another number of nodes or another NCCL release.

    A one-node preset grown to several nodes takes the graphs of its kind's two-node preset, where there is one. The
    cluster of a file keeps its own, whatever its name.
    """
    if n_nodes is not None and n_nodes != c.n_nodes:
        kind = c.name.removesuffix(f"-{c.n_nodes}x{c.gpus_per_node}")
        pair = _of_kind(kind, n_nodes, c.gpus_per_node)
        is_other = (n_nodes == 1) != (c.n_nodes == 1)
        base = cluster(pair) if is_other and pair in _tables() and _is_preset(c, kind) else c
        c = replace(base, n_nodes=n_nodes, nccl=c.nccl, name=f"{kind}-{n_nodes}x{c.gpus_per_node}")
    return replace(c, nccl=nccl) if nccl is not None else c


def _of_kind(kind: str, n_nodes: int, per_node: int) -> str:
    """Name of the preset of a kind whose graphs hold for so many nodes."""
    return f"{kind}-{'1' if n_nodes == 1 else '2'}x{per_node}"


def _is_preset(c: Cluster, kind: str) -> bool:
    """Whether a cluster is the preset of its name, or one of its kind in another size; the release may be any."""
    for name in (c.name, _of_kind(kind, c.n_nodes, c.gpus_per_node)):
        if name in _tables() and replace(cluster(name), name=c.name, n_nodes=c.n_nodes, nccl=c.nccl) == c:
            return True
    return False


def find(name: str, n_nodes: int | None = None) -> Cluster:
    """:func:`cluster`, or a kind of preset: ``dgx-h100`` with ``n_nodes`` (default 1, else the fewest)."""
    kinds = [p for p in preset_names() if p.rpartition("-")[0] == name]
    if not kinds:
        return cluster(name)
    exact = [p for p in kinds if cluster(p).n_nodes == (n_nodes or 1)]
    return cluster((exact or kinds)[0])
