"""A job on one cluster and its documented fabric, without weather or noise of its own: what presets have to gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .clusters import Cluster
from .fabric import Fabric
from .job_family import STANDARD
from .jobs import Jobs, Sites, assemble
from .step import Law
from .timeline import CROWD
from .workloads import Workload
from .works import Works

#: Nothing drawn: calls crowd each other as they do on the emulated timeline, compute slows as the fabric says.
_PLAIN = replace(STANDARD, name="documented", swing=0.0)


def one_job(work: Workload, cluster: Cluster, seed: int = 0, exposed: float = 0.5) -> Jobs:
    """One job: ``work`` on ``cluster``, ``exposed`` (0..1) of its default step waiting for communication.

    The fabric is the documented one for ``seed`` 0, else one drawn around it. Raises ValueError when the step calls
    nothing that a tuner reaches.
    """
    if not work.slots():
        raise ValueError(f"{work.name} holds no all_gather or reduce_scatter")
    fabric = Fabric.of(cluster, seed)
    law = Law(crowd=CROWD).rows(1)
    sites = Sites(fabric.fleet, fabric.truth, np.zeros_like(fabric.truth.effect), np.zeros(1), np.ones(1), law)
    works, rng = Works.of([(work, False)]), np.random.default_rng(seed)
    return assemble(works, np.zeros(1, int), sites, np.array([exposed]), _PLAIN, rng)
