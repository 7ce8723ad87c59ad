"""Which ZeRO stage a job trains under, from its traffic alone: the collectives of a step, their sizes and their groups.

Source: Rajbhandari et al., ZeRO, SC20, section 7, for jobs that reduce and gather the same buckets or units. Where the
traffic fits two stages, or none, the answer is "not sure" and says why.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

#: Traffic below this part of the largest is something else: a norm, a loss.
_SMALL = 0.02
#: Two sizes are of one bucket if they differ by less: each library pads in its own way.
_NEAR = 0.02
#: Bytes of a weight for one of a gradient: NCCL tells every all-gather's in bytes, and no dtype of it.
_WIDTHS = (1.0, 0.5, 2.0)
#: How often a weight is gathered for each time that its gradient is reduced: once, or twice but for what is kept.
_ONCE, _TWICE = (0.95, 1.05), (1.35, 2.1)
#: Gathers that take more of a step than this, from the first to the last, are issued beside forward, not together.
_SPREAD = 0.2
#: Steps that the answer needs, and gathers of which a stage 3 with usual settings would repeat some.
_STEPS, _GATHERS = 3, 6


class Stage(NamedTuple):
    """What a job looks like; ``name`` is None where its traffic does not say. ``why``: the evidence, in words."""

    name: str | None
    why: str

    def __str__(self) -> str:
        return f"looks like {self.name} ({self.why})" if self.name else f"ZeRO stage: not sure ({self.why})"


class _Seen(NamedTuple):
    """A step of one rank: of the collective ``func`` on one communicator the sizes in bytes, in order."""

    func: str
    comm: int
    n_ranks: int
    sizes: list[int]
    itemsize: int

    @property
    def total(self) -> int:
        return sum(self.sizes)


def looks_like(events: pd.DataFrame) -> Stage:
    """The stage of a job by its ``events`` (EVENT_COLUMNS), of whatever table: a table changes no call and no size."""
    one = events[(events["pid"] == events["pid"].iloc[0]) & (events["step"] >= 0)] if len(events) else events
    steps = sorted(one["step"].unique())[1:-1]  # the first holds the set-up, the last may be cut
    if len(steps) < _STEPS:
        return Stage(None, f"{len(steps)} whole steps were seen, and it takes {_STEPS}")
    calls = one[one["step"].isin(steps)].sort_values("enqueue_ns", kind="stable")
    usual = _usual_step(calls)
    parts = _parts(usual)
    reduced, gathered = _of(parts, "reduce_scatter"), _of(parts, "all_gather")
    summed = _of(parts, "all_reduce")
    if len(reduced) > 1 or len(gathered) > 1:
        return Stage(None, "it shards over several groups of ranks")
    if not reduced:
        return _without_scatter(gathered, summed)
    if not gathered:
        return Stage(None, "it reduce-scatters and gathers nothing")
    return _with_scatter(reduced[0], gathered[0], summed, calls)


def _usual_step(calls: pd.DataFrame) -> pd.DataFrame:
    """The calls of a step of the most frequent kind: an evaluation, or a skipped step, has others."""
    kinds = {}
    for step in calls["step"].unique().tolist():
        of_step = calls[calls["step"] == step]
        kinds[step] = (
            tuple(of_step["func"].value_counts().sort_index().items()),
            int(of_step["n_bytes"].sum()),
        )
    most = pd.Series(kinds).value_counts().index[0]
    last = max(step for step, kind in kinds.items() if kind == most)
    return calls[calls["step"] == last]


def _parts(step: pd.DataFrame) -> list[_Seen]:
    """The step's traffic by collective and communicator, without what is small."""
    found = []
    for (func, _), of_part in step.groupby(["func", "comm_id"]):
        first = of_part.iloc[0]
        itemsize = 4 if first["dtype"] == "float32" else 8 if first["dtype"] == "float64" else 2
        sizes = [int(n) for n in of_part["n_bytes"] if n >= _SMALL * of_part["n_bytes"].max()]
        found.append(_Seen(str(func), int(first["comm_id"]), int(first["n_ranks"]), sizes, itemsize))
    # Replicas of a shard all-reduce a part of what its ranks reduce-scatter: each is judged by the whole.
    sharing = max((part.n_ranks for part in found if part.func == "reduce_scatter"), default=1)
    most = max((part.total for part in found), default=0)
    return [
        part for part in found if part.total * (sharing if part.func == "all_reduce" else 1) >= _SMALL * most
    ]


def _of(parts: list[_Seen], func: str) -> list[_Seen]:
    """The parts of one collective, each on a communicator of its own."""
    return [part for part in parts if part.func == func]


def _without_scatter(gathered: list[_Seen], summed: list[_Seen]) -> Stage:
    if not summed:
        return Stage(None, "nothing is reduced")
    if len(summed) > 1:
        return Stage(None, "several groups of ranks all-reduce")
    if not gathered:
        return Stage("data parallel (DDP, ZeRO-0)", "all-reduces alone")
    ratios = _ratios(gathered[0], summed[0])
    if ratios and all(_ONCE[0] < ratio < _ONCE[1] for ratio in ratios) and gathered[0].comm == summed[0].comm:
        return Stage("ZeRO-1 by all-reduce", "each gradient is all-reduced and each weight gathered once")
    return Stage(None, "all-reduces and all-gathers are not of the same buckets")


def _with_scatter(reduced: _Seen, gathered: _Seen, summed: list[_Seen], calls: pd.DataFrame) -> Stage:
    """The stage where gradients are reduce-scattered."""
    if reduced.n_ranks != gathered.n_ranks:
        return Stage(None, "it reduces and gathers over different numbers of ranks")
    replicas = ""
    for part in summed:  # those of a shard, in the gradients' dtype
        times = reduced.total / reduced.itemsize / reduced.n_ranks / (part.total / part.itemsize)
        if part.comm == reduced.comm or replicas or abs(times - max(1, round(times))) > _NEAR * times:
            return Stage(None, "all-reduces beside the shards' are not those of replicas")
        replicas = f"HSDP over {reduced.n_ranks} ranks, "
    ratios = _ratios(gathered, reduced)
    if not ratios:
        return Stage(None, "reductions and gathers are not of the same buckets")
    names = {_by_ratio(ratio, gathered, calls) for ratio in ratios}
    names.discard(None)
    if len(names) != 1:
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        return Stage(None, f"weights are gathered {shown} times for each reduction of their gradients")
    name, why = names.pop() or ("", "")
    return Stage(f"{replicas}{name}" if name else None, why)


def _by_ratio(ratio: float, gathered: _Seen, calls: pd.DataFrame) -> tuple[str, str] | None:
    """Name and evidence by how often a weight is gathered for each reduction of its gradient; no name: not sure."""
    if _TWICE[0] <= ratio <= _TWICE[1]:
        return "ZeRO-3", "weights are gathered for forward and again for backward"
    micro_batches = round(1 / ratio) if ratio else 0
    if ratio < _ONCE[0] and micro_batches > 1 and abs(ratio * micro_batches - 1) < 0.05:
        return (
            "ZeRO-2",
            f"gradients are reduced in each of {micro_batches} micro-batches, weights gathered once",
        )
    if not _ONCE[0] < ratio < _ONCE[1]:
        return None
    once, others = "weights are gathered once a step", "ZeRO-1 or 2, or ZeRO-3 that keeps what it gathers"
    if len(gathered.sizes) < _GATHERS:
        return "", f"{once}: {others}"
    if _span(gathered, calls) > _SPREAD:
        return "", f"{once}, beside forward: {others}"
    return "ZeRO-1 or 2", f"{once}, all together"


def _span(gathered: _Seen, calls: pd.DataFrame) -> float:
    """The part of a step from the first of its gathers to the last, the median."""
    mine = calls[(calls["func"] == gathered.func) & (calls["comm_id"] == gathered.comm)].groupby("step")[
        "enqueue_ns"
    ]
    begins = calls.groupby("step")["enqueue_ns"].min()
    lasts = float(begins.sort_index().diff().median())
    return float((mine.max() - mine.min()).median()) / max(lasts, 1.0)


def _ratios(gathered: _Seen, reduced: _Seen) -> list[float]:
    """Weights gathered for each gradient reduced, by each width of a weight at which both are of the same buckets."""
    found = []
    for width in _WIDTHS:
        sizes = sorted({size / width for size in gathered.sizes})
        theirs = sorted({float(size) for size in reduced.sizes})
        if _alike(sizes, theirs) and _alike(theirs, sizes):
            found.append(gathered.total / width / reduced.total)
    return found


def _alike(some: list[float], others: list[float]) -> bool:
    """Whether each of ``some`` sizes is near one of the ``others``."""
    return all(any(abs(one - other) <= _NEAR * one for other in others) for one in some)
