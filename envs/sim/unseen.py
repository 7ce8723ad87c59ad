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
    own = np.reshape(jobs.fingerprint.own_pair, (-1, SLOTS, 1))
    pair = pair_of(np.arange(N_CONFIGS), own)
    fleet = jobs.sites.fleet
    ports = np.where(fleet.n_nodes > 1, fleet.n_nics, fleet.ring.channels)
    return pair, ports[:, None, None]


def _sms(jobs: Jobs, rng: np.random.Generator) -> None:
    """Compute slows by the channels of all calls beside it, beyond a number that it can spare (drawn). Kernels of NCCL
    share no SM (NVIDIA/nccl#689); matrix products beside them took 1.76 times as long (#1428)."""
    jobs.sites.law.knee[:] = rng.uniform(0, 10, len(jobs))
    jobs.sites.law.steep[:] = log_uniform(rng, (0.02, 0.1), len(jobs))


def _meeting(jobs: Jobs, rng: np.random.Generator) -> None:
    """A ring with more channels than ports stretches what runs beside it. Two communicators at once took 2.3 times as
    long, where sharing explains 2 (NVIDIA/nccl#1094); rings that cross at a port make it pause (#1494)."""
    pair, ports = _what_runs(jobs)
    beyond = np.maximum(jobs.tables.channels - ports, 0)
    is_ring = pair <= LAST_RING
    jobs.tables.crowd[:] = np.where(is_ring, beyond / 16, 0)


def _dip(jobs: Jobs, rng: np.random.Generator) -> None:
    """SIMPLE is slow around a size, smoothly: 1.4 to 1.8 times at 4 MiB a rank (meta-pytorch/autoparallel, a fit); that
    other fabrics have it at another size is drawn."""
    f, shape = jobs.fingerprint, (len(jobs), 1, 1)
    shard = np.asarray(f.n_bytes) / np.asarray(f.n_ranks)
    octave = np.log2(shard).reshape(-1, SLOTS, 1)
    at, wide, high = (
        rng.uniform(19.5, 24.5, shape),
        rng.uniform(0.7, 2.0, shape),
        rng.uniform(0.2, 0.9, shape),
    )
    pair, _ = _what_runs(jobs)
    off = (octave - at) / wide
    bump = high * np.exp(-(off**2) / 2) * (pair == _SIMPLE)
    jobs.tables.us *= np.exp(bump).astype(np.float32)


def _rail(jobs: Jobs, rng: np.random.Generator) -> None:
    """One port is slow, and what uses it waits; few channels may miss it (how many is drawn). A wrong port costs 25 to
    29 % (NeMo-RL#3670), a slow link may stay for hours (FALCON)."""
    pair, ports = _what_runs(jobs)
    missed = np.floor(ports * rng.random(ports.shape))  # so many channels do not use the slow port
    slower = log_uniform(rng, (1.15, 3.0), len(jobs))[:, None, None]
    meets = (jobs.tables.channels > missed) & (pair != _NVLS)
    longer = np.where(meets, slower, 1)
    jobs.tables.us *= longer.astype(np.float32)


def _nothing(jobs: Jobs, rng: np.random.Generator) -> None:
    """Every call but the default's takes longer, by how much is drawn, and frees nothing. What gives an all_reduce 27 %
    gave an all_gather nothing, and costs 16.6 % elsewhere (eunomia-bpf/nccl-eBPF)."""
    t, rest = jobs.tables, (slice(None), slice(None), slice(1, None))
    others = t.us[rest]
    slower = t.us[:, :, :1] * rng.uniform(1.02, 1.6, others.shape)
    t.us[rest] = np.maximum(others, slower)
    for part in (t.slow, t.near, t.far):
        part[rest] = np.maximum(part[rest], part[:, :, :1])


_QUIET = World(
    ("gpt2", "llama", "moe"),
    clusters=ClusterFamily(
        (0.02, 0.18, 0.5, 0.3), ((1, 0.1), (4, 0.15), (8, 0.75)), one_node=0.15, n_nodes=(2, 128)
    ),
    one_communicator=0.25,
)
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
UNSEEN = JobFamily("unseen", 1, (*_WORLDS, *(replace(world, **_BURSTS) for world in _WORLDS)))
