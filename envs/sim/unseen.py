"""Worlds that nothing is trained on or fitted to: one mechanism each, after public reports.

How large each is was drawn around what is reported; what has no report is said to be drawn. At half of the jobs a
neighbour comes in bursts of hundreds of steps: slow links last from tens of seconds to ten hours and make jobs take
1.34 times as long in the mean (FALCON, arXiv 2410.12588), single calls 50 to 280 times (NVIDIA/nccl#361); how often is
drawn. The oracle climbs by :meth:`Jobs.usual_us`, which has all of it but bursts and swings of the network: its table
is the best in fair weather. Where slots act together (``sms``, ``meeting``) it climbs every pair of configs as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy import arange, asarray, exp, floor, log2, maximum, reshape, where
from numpy.random import Generator

from ...traces.records import PAIRS
from ...traces.spaces import N_CONFIGS, pair_of
from .family import ClusterFamily, JobFamily, World
from .noise import NoiseFamily, log_uniform
from .truth import LAST_RING, Jobs
from .workloads import SLOTS

Array = np.ndarray[Any, Any]
_SIMPLE = PAIRS.index(("ring", "simple"))
_NVLS = PAIRS.index(("nvls", "simple"))


def _what_runs(jobs: Jobs) -> tuple[Array, Array]:
    """Indices into PAIRS of all configs, (n, SLOTS, N_CONFIGS), and ports of each job, (n, 1, 1)."""
    own = jobs.fingerprint.own_pair
    own = reshape(own, (-1, SLOTS, 1))
    configs = arange(N_CONFIGS)
    pair = pair_of(configs, own)
    fleet = jobs.sites.fleet
    has_network = fleet.n_nodes > 1
    ports = where(has_network, fleet.n_nics, fleet.ring.channels)
    return pair, ports[:, None, None]


def _sms(jobs: Jobs, rng: Generator) -> None:
    """Compute slows by the channels of all calls beside it, beyond a number that it can spare (drawn). Kernels of NCCL
    share no SM (NVIDIA/nccl#689); matrix products beside them took 1.76 times as long (#1428)."""
    n = len(jobs)
    law = jobs.sites.law
    law.knee[:] = rng.uniform(0, 10, n)
    law.steep[:] = log_uniform(rng, (0.02, 0.1), n)


def _meeting(jobs: Jobs, rng: Generator) -> None:
    """A ring with more channels than ports stretches what runs beside it. Two communicators at once took 2.3 times as
    long, where sharing explains 2 (NVIDIA/nccl#1094); rings that cross at a port make it pause (#1494)."""
    pair, ports = _what_runs(jobs)
    tables = jobs.tables
    beyond = maximum(tables.channels - ports, 0)
    is_ring = pair <= LAST_RING
    tables.crowd[:] = where(is_ring, beyond / 16, 0)


def _dip(jobs: Jobs, rng: Generator) -> None:
    """SIMPLE is slow around a size, smoothly: 1.4 to 1.8 times at 4 MiB a rank (meta-pytorch/autoparallel, a fit); that
    other fabrics have it at another size is drawn."""
    n_bytes = asarray(jobs.fingerprint.n_bytes)
    n_ranks = asarray(jobs.fingerprint.n_ranks)
    octave = log2(n_bytes / n_ranks)
    octave = octave.reshape(-1, SLOTS, 1)

    shape = len(jobs), 1, 1
    at = rng.uniform(19.5, 24.5, shape)
    wide = rng.uniform(0.7, 2.0, shape)
    high = rng.uniform(0.2, 0.9, shape)
    off = (octave - at) / wide
    bump = high * exp(-(off**2) / 2)

    pair, _ = _what_runs(jobs)
    log_longer = bump * (pair == _SIMPLE)
    longer = exp(log_longer)
    jobs.tables.us *= longer.astype(np.float32)


def _rail(jobs: Jobs, rng: Generator) -> None:
    """One port is slow, and what uses it waits; few channels may miss it (how many is drawn). A wrong port costs 25 to
    29 % (NeMo-RL#3670), a slow link may stay for hours (FALCON)."""
    pair, ports = _what_runs(jobs)
    part = rng.random(ports.shape)
    missed = floor(ports * part)  # so many channels do not use the slow port
    slower = log_uniform(rng, (1.15, 3.0), len(jobs))
    tables = jobs.tables
    meets = (tables.channels > missed) & (pair != _NVLS)
    longer = where(meets, slower[:, None, None], 1)
    tables.us *= longer.astype(np.float32)


def _nothing(jobs: Jobs, rng: Generator) -> None:
    """Every call but the default's takes longer, by how much is drawn, and frees nothing. What gives an all_reduce 27 %
    gave an all_gather nothing, and costs 16.6 % elsewhere (eunomia-bpf/nccl-eBPF)."""
    t = jobs.tables
    default_us = t.us[:, :, :1]
    others_us = t.us[:, :, 1:]
    factor = rng.uniform(1.02, 1.6, others_us.shape)
    slower = default_us * factor
    t.us[:, :, 1:] = maximum(others_us, slower)
    burdens = (t.slow, t.near, t.far)
    for part in burdens:
        default = part[:, :, :1]
        others = part[:, :, 1:]
        part[:, :, 1:] = maximum(others, default)


_CLUSTERS = ClusterFamily(
    (0.02, 0.18, 0.5, 0.3), ((1, 0.1), (4, 0.15), (8, 0.75)), one_node=0.15, n_nodes=(2, 128)
)
_QUIET = World(("gpt2", "llama", "moe"), clusters=_CLUSTERS, one_communicator=0.25)
_WORLDS = (
    replace(_QUIET, name="sms", hook=_sms, exposed=(0.005, 0.1)),
    replace(_QUIET, name="meeting", hook=_meeting, one_communicator=0.0, crowd=(0.5, 3.0)),
    replace(_QUIET, name="dip", hook=_dip),
    replace(_QUIET, name="rail", hook=_rail),
    replace(_QUIET, name="nothing", hook=_nothing),
)
_NEIGHBOUR = NoiseFamily((0.01, 0.08), (0.9, 0.998), (0.003, 0.03), 0.8, (0.05, 0.3), (200, 1500))
_BURSTS: dict[str, Any] = {
    "noise": _NEIGHBOUR,
    "swing": 0.9,
    "swing_size": (0.1, 0.8),
    "swing_steps": (400, 4000),
}
_WITH_BURSTS = [replace(world, **_BURSTS) for world in _WORLDS]
UNSEEN = JobFamily("unseen", 1, (*_WORLDS, *_WITH_BURSTS))
