"""What a table should gain, predicted from a recording alone: the search's own belief before it has tried anything.

The belief's prior (``envs/search/belief.py``) has seen many simulated jobs: it knows how long every config of a slot
takes there beside NCCL's own choice, and what the step feels of that. What a recording shows of compute beside
communication is told to it. A table that is advised is to be measured, and kept only where it is faster: so of what
should gain, the boldest within reason is tried first; how sure that is, is said with it.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from ...envs.search.belief import LOG_RANGE, Belief
from ...traces.files import Trace
from ...traces.queries.overlap import exposed_ns
from ...traces.records import Slot, size_class

Array = np.ndarray[Any, Any]

#: A slot's gain below this part of the step is not worth a row; a loss above this is one.
LEAST, LOSS = 0.001, 0.01
#: The belief doubts itself on purpose, for the search: what is told to people is so much narrower. Chosen on simulated
#: jobs of both families (``tests/check_advice.py`` with seeds 11 and 31); other seeds then judge.
NARROWER = 0.8
#: Among configs that should gain, so many standard deviations count beside the mean. Chosen in the same way.
BOLD = 0.5
#: Exposure in the belief's sense for a part ``x`` of the time without compute: ``EXPOSED[0] + EXPOSED[1] * x``, give
#: or take ``EXPOSED[2]``. As simulated jobs of both families show it (``tests/check_advice.py fit``).
EXPOSED = (0.49, 0.31, 0.25)
_DRAWS = 2000


def exposure(trace: Trace) -> dict[Slot, float]:
    """Of slots under NCCL's own choice: the part of their time in which nothing is computed; empty where the recording
    shows no compute."""
    if not len(trace.compute):
        return {}
    default = {g for g, rules in trace.tables.items() if not rules}
    events = trace.events[trace.events["table_generation"].isin(default)]
    events = events.assign(bare=exposed_ns(events, trace.compute)).dropna(subset="bare")
    lasts = (events["end_ns"] - events["start_ns"]).astype(float)
    sizes = events["n_bytes"].map(lambda n: size_class(int(n)))
    grouped = events.assign(lasts=lasts, size_class=sizes).groupby(["n_ranks", "n_nodes", "func", "size_class"])
    sums = grouped[["bare", "lasts"]].sum()
    return {Slot(*key): bare / max(lasts, 1.0) for key, bare, lasts in sums.itertuples()}


def tell(belief: Belief, exposed: Array) -> None:
    """Let the belief know what part of its slots' time was seen without compute, (s,); NaN: not seen."""
    seen = np.flatnonzero(np.isfinite(exposed))
    if len(seen):
        at = [belief.parts[i].start for i in seen]
        values = EXPOSED[0] + EXPOSED[1] * np.minimum(exposed[seen], 1.0)
        belief.learn(at, values, np.full(len(at), EXPOSED[2]))


class Gains:
    """What tables save, as parts of the step; see :class:`envs.search.belief.Belief` for ``belief``."""

    def __init__(self, belief: Belief) -> None:
        self.belief = belief

    def best(self) -> Array:
        """The table to try first, (s,) configs; 0 leaves a slot to NCCL."""
        figures = [self.belief.figures(i) for i in range(len(self.belief.arms))]
        means, deviations = (np.array(part) for part in zip(*figures, strict=True))
        return np.asarray(np.where(means >= LEAST, means + BOLD * deviations, 0.0).argmax(axis=1))

    def interval(self, configs: Array, level: float = 0.8) -> tuple[float, float, float]:
        """(middle, low, high) of what a table saves; the interval holds the truth in ``level`` of the cases."""
        mean, deviation = self.belief.saving(configs)
        half = NormalDist().inv_cdf((1 + level) / 2) * NARROWER * deviation
        return mean, mean - half, mean + half

    def risk(self, configs: Array) -> float:
        """Probability that a table makes steps longer by more than LOSS."""
        mean, deviation = self.belief.saving(configs)
        return NormalDist(mean, max(NARROWER * deviation, 1e-9)).cdf(-LOSS) if np.any(configs) else 0.0

    def possible(self, level: float = 0.8) -> tuple[float, float, float]:
        """(median, low, high) of what the best table would save, were it known: drawn from the belief."""
        b, rng = self.belief, np.random.default_rng(0)
        values, vectors = np.linalg.eigh(b.cov)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        drawn = b.mean + NARROWER * rng.normal(size=(_DRAWS, len(b.mean))) @ root.T
        most = np.zeros(_DRAWS)
        for part, arms, share in zip(b.parts, b.arms, b.share, strict=True):
            if len(arms):
                exposure, logs, rest = np.split(drawn[:, part], [1, 1 + len(arms)], axis=1)
                saved = np.clip(exposure, 0, 1.3) * (1 - np.exp(np.clip(logs, *LOG_RANGE))) + rest
                most += share * np.clip(saved.max(axis=1), 0, 1)
        low, middle, high = np.quantile(most, ((1 - level) / 2, 0.5, (1 + level) / 2))
        return float(middle), float(low), float(high)
