"""Searches on many simulated jobs, a turn of each at a time."""

import numpy as np
from dynamiccl.envs.search import turns


def turn(search, policy):
    """One turn of all jobs of a ``SimSearch`` that are not done, and the windows that come of it; what was seen."""
    going = [i for i, one in enumerate(search.searches) if not one.is_done]
    if not going:
        return None
    seen = np.stack([search.searches[i].observe() for i in going])
    for i, config, what in zip(going, *turns.choices_of(policy.predict(seen)[0]), strict=True):
        search.searches[i].decide(int(config), int(what))
    while going := search.measure([i for i in going if not search.searches[i].is_done]):
        pass
    return seen
