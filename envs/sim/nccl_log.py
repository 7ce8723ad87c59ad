"""A cluster from what a real NCCL printed: ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING,NVLS``.

Used are the lines about graphs ("Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX"), the
communicator ("nRanks 16 nNodes 2 localRanks 8", "24 coll channels, ... 16 nvls channels") and, as far as they are
there, the version, the processor ("CPU/0-0 (1/1/2)": architecture, vendor) and the links ("NVL[370.8]").
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .clusters import Cluster, Graph, from_mapping

_GRAPH = re.compile(
    r"Pattern (\d+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+)"
    r"(?:, nvlink \d+, type|, type) (\w+)/(\w+)"
)
_COMM = re.compile(r"nRanks (\d+) nNodes (\d+)")
_INIT = re.compile(r"rank \d+ nranks (\d+) ")
_CHANNELS = re.compile(r"(\d+) coll channels(?:, \d+ collnet channels, (\d+) nvls channels)?")
_VERSION = re.compile(r"NCCL version (\d+\.\d+\.\d+)")
_CPU = re.compile(r"CPU/[\w-]+ \((\d)/(\d)/-?\d+\)")
_NVLINK = re.compile(r"NVL\[([\d.]+)\]")
_NET = re.compile(r"NET\[([\d.]+)\]")
#: Patterns of NCCL's graphs (2.30.7 src/include/graph.h): three kinds of tree, ring, NVLS.
_KINDS = {1: "tree", 2: "tree", 3: "tree", 4: "ring", 5: "nvls"}
_VENDORS = {"1": "intel", "2": "amd"}
#: GB/s of one NVLink by generation (2.30.7 src/graph/topo.h); V100 and A100 links are alike but differ in number.
_LINKS = ((40.1, "B"), (20.6, "H"), (20.0, "A"))


def parse(text: str, name: str = "log") -> Cluster:
    """The cluster of the first communicator in a log. Raises ValueError that names the lines that are missing."""
    graphs: dict[str, Graph] = {}
    for match in _GRAPH.finditer(text):
        pattern, channels, intra, inter, near, far = match.groups()
        kind = _KINDS.get(int(pattern))
        if kind and kind not in graphs:
            # Older releases write PATH_NVL's short name in full: keep the three letters that all share.
            graphs[kind] = Graph(int(channels), float(intra), float(inter), near, far)
    if "ring" not in graphs:
        raise ValueError(
            f"{name} holds no ring graph ('Pattern 4, crossNic ...'): "
            "run the job with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING,NVLS"
        )
    comm, init = _COMM.search(text), _INIT.search(text)
    if comm:
        n_ranks, n_nodes = int(comm[1]), int(comm[2])
    elif init:
        raise ValueError(f"{name} tells the ranks ({init[1]}) but not the nodes: add INIT to NCCL_DEBUG_SUBSYS")
    else:
        raise ValueError(f"{name} holds no line 'nRanks ... nNodes ...': add INIT to NCCL_DEBUG_SUBSYS")
    if n_nodes < 1 or n_ranks % n_nodes:
        raise ValueError(f"{name}: {n_ranks} ranks do not divide over {n_nodes} nodes")
    channels_line = _CHANNELS.search(text)
    if channels_line is None:
        raise ValueError(f"{name} holds no line '... coll channels': add INIT to NCCL_DEBUG_SUBSYS")
    values: dict[str, Any] = {
        "n_nodes": n_nodes,
        "gpus_per_node": n_ranks // n_nodes,
        "comm_channels": int(channels_line[1]),
        "nvls_channels": int(channels_line[2] or 0),
        "generation": _generation(text, int(channels_line[2] or 0)),
        **graphs,
    }
    if version := _VERSION.search(text):
        values["nccl"] = version[1]
    vendors = {_VENDORS.get(vendor, "arm" if arch == "3" else "intel") for arch, vendor in _CPU.findall(text)}
    values["cpu"] = vendors.pop() if len(vendors) == 1 else "mixed" if vendors else "intel"
    ports = [float(x) for x in _NET.findall(text)]
    if ports:
        values["nic_gbs"], values["n_nics"] = max(ports), min(len(ports), values["gpus_per_node"])
    return from_mapping(name, values)


def _generation(text: str, nvls_channels: int) -> str:
    """GPU generation from the NVLink rates in the topology, else from whether NVLS is there."""
    rates = [float(x) for x in _NVLINK.findall(text)]
    for link, generation in _LINKS:
        for rate in rates:
            links = round(rate / link)
            if links >= 1 and abs(rate - links * link) < 0.05 * links:
                return "V" if generation == "A" and links <= 6 else generation
    return "H" if nvls_channels else "A"


def read(path: Path) -> Cluster:
    """:func:`parse` of a file. Raises ValueError when it cannot be read."""
    try:
        return parse(path.read_text(errors="replace"), path.stem)
    except OSError as error:
        raise ValueError(f"cannot read NCCL log {path}: {error.strerror}") from None


def to_toml(c: Cluster) -> str:
    """A preset file with every key of the cluster, as ``clusters.toml`` explains them."""

    def value(x: Any) -> str:
        if isinstance(x, Graph):
            return "{ " + ", ".join(f"{k} = {value(v)}" for k, v in vars(x).items()) + " }"
        return f'"{x}"' if isinstance(x, str) else str(x).lower() if isinstance(x, bool) else repr(x)

    keys = {k: v for k, v in vars(c).items() if not (isinstance(v, Graph) and v.channels == 0)}
    return "".join(f"{k} = {value(v)}\n" for k, v in keys.items())
