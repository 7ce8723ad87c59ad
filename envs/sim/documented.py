"""A job on one cluster and its documented fabric, without weather or noise of its own: what presets have to gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .clusters import Cluster, Fleet
from .fabric import Fabric
from .job_family import STANDARD
from .jobs import Jobs, assemble
from .timeline import CROWD
from .workloads import Workload
from .works import Works

#: Nothing drawn: calls crowd each other as they do on the emulated timeline, compute slows as the fabric says.
_PLAIN = replace(
    STANDARD,
    name="documented",
    touch=(1.0, 1.0),
    crowd=(CROWD, CROWD),
    saturation=(0.0, 0.0),
    drag=(0.0, 0.0),
    swing=0.0,
)


def one_job(work: Workload, cluster: Cluster, seed: int = 0, exposed: float = 0.5) -> Jobs:
    """One job: ``work`` on ``cluster``, ``exposed`` (0..1) of its default step waiting for communication.

    The fabric is the documented one for ``seed`` 0, else one drawn around it. Raises ValueError when the step calls
    nothing that a tuner reaches.
    """
    if not work.slots():
        raise ValueError(f"{work.name} holds no all_gather or reduce_scatter")
    works, truth = Works.of([(work, False)]), Fabric.of(cluster, seed).truth
    none, rng = np.zeros_like(truth.effect), np.random.default_rng(seed)
    fleet = Fleet.of([cluster])
    return assemble(works, np.zeros(1, int), fleet, truth, none, np.zeros(1), np.array([exposed]), _PLAIN, rng)
