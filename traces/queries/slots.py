"""Which slots a job has, the fingerprint of each, and what kind of job it is: from events of some default steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ..assemble import DTYPE_BYTES, Offer
from ..fingerprint import Fingerprint
from ..records import PAIRS, TUNED_FUNCS, Slot, pair_costs, size_class
from .skew import durations, label


@dataclass(frozen=True)
class SlotProfile:
    """One slot as the job uses it when NCCL decides."""

    slot: Slot
    n_bytes: int  # that NCCL asks about, of the message that most of the slot's time goes to
    calls: float  # per step
    call_us: float  # median time of one call
    timed_by: str  # how that was found: see skew.py, or "NCCL's price" where no kernel was sampled
    share: float  # calls x call_us / step time
    fingerprint: Fingerprint  # of this one slot: arrays of shape (1, ...)

    @property
    def own(self) -> str:
        """NCCL's own choice, as text."""
        algo, proto = PAIRS[int(self.fingerprint.own_pair[0])]
        return f"{algo}/{proto}/{int(self.fingerprint.own_channels[0])}"


def find_slots(
    events: pd.DataFrame, offers: Mapping[tuple[int, str, int], Offer], step_us: float, memory_pressure: float = 0.0
) -> list[SlotProfile]:
    """The slots of a job, the one with the largest share of the step first.

    ``events`` are those of whole default steps; ``step_us`` is their step time. Where kernels were not sampled, NCCL's
    own price stands in for the time of a call.

    All communicators of a class make one slot. Its calls, times and share are those of one process, the one that it
    costs most, over all its communicators of the class: it waits for them one after the other.
    """
    tuned = events[events["func"].isin(TUNED_FUNCS)]
    if tuned.empty:
        return []
    tuned = with_sizes(tuned)
    n_steps = tuned.groupby("pid")["step"].nunique()
    # Never announced: its class is not known. Not asked about: a symmetric kernel ran it, which no table reaches.
    tuned = tuned[(tuned["n_ranks"] > 0) & (tuned["asked"] > 0)]
    tuned = tuned.assign(part=tuned["n_bytes"] / tuned["asked"])
    most_channels = channels_of(tuned)
    profiles = []
    for key, everyone in tuned.groupby(["n_ranks", "n_nodes", "func", "size_class"]):
        n_ranks, n_nodes, func, klass = cast(tuple[int, int, str, int], key)
        slot = Slot(int(n_ranks), int(n_nodes), func, int(klass))
        pid = _busiest(everyone)
        group = everyone[everyone["pid"] == pid]
        moved = group.groupby(["comm_id", "asked"])["n_bytes"].sum()
        comm_id, n_bytes = map(int, cast(tuple[int, int], moved.idxmax()))
        offer = offers.get((comm_id, slot.func, n_bytes))
        if offer is None:
            continue
        cost = pair_costs(offer.cost_us)
        own = (str(offer.algo), str(offer.proto))
        if own not in PAIRS:
            continue
        timed = group[group["us"].notna()]
        price = float(cost[PAIRS.index(own)])
        call_us = float((timed["us"] / timed["part"]).median()) if len(timed) else price
        timed_by = label(timed["timed_by"]) if len(timed) else "NCCL's price"
        calls = float(group["part"].sum()) / n_steps[pid]  # a group of calls that NCCL prices together is one
        share = min(1.0, calls * call_us / step_us)
        fingerprint = Fingerprint(
            is_reduce_scatter=np.array([float(func == "reduce_scatter")]),
            n_bytes=np.array([float(n_bytes)]),
            calls=np.array([calls]),
            n_ranks=np.array([float(slot.n_ranks)]),
            n_nodes=np.array([float(slot.n_nodes)]),
            cost_us=cost[None].astype(np.float64),
            own_pair=np.array([PAIRS.index(own)]),
            own_channels=np.array([float(group["n_channels"].median())]),
            comm_channels=np.array([most_channels[slot.n_ranks, slot.n_nodes]]),
            share=np.array([share]),
            memory_pressure=np.array([memory_pressure]),
        )
        profiles.append(SlotProfile(slot, n_bytes, calls, call_us, timed_by, share, fingerprint))
    return sorted(profiles, key=lambda p: -p.share)


def with_sizes(events: pd.DataFrame) -> pd.DataFrame:
    """``events`` with the columns of :func:`durations` and two more. ``asked``: the bytes that NCCL asked the tuner
    about, 0 if it did not ask; ``size_class``: of these, or of the message where it did not ask.

    Of grouped calls NCCL asks with the sum of their sizes, which is what a row of a table has to hold. Recordings that
    do not tell are read as if each call had been asked about by itself.
    """
    tells = "asked_bytes" in events and (events["asked_bytes"] > 0).any()
    asked = events["asked_bytes"] if tells else events["n_bytes"]
    sizes = asked.where(asked > 0, events["n_bytes"])
    classes = {n: size_class(int(n)) for n in sizes.unique()}
    return events.assign(asked=asked, size_class=sizes.map(classes).astype("int64")).join(durations(events))


def channels_of(events: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Channels that all communicators of a class (n_ranks, n_nodes) have: the least of the most seen on each."""
    most = events.groupby(["n_ranks", "n_nodes", "comm_id"])["n_channels"].max()
    least = most.groupby(level=["n_ranks", "n_nodes"]).min()
    return {cast(tuple[int, int], sizes): float(n) for sizes, n in least.items()}


def _busiest(events: pd.DataFrame) -> int:
    """The process that these events move most bytes for; of equals the one of the lowest rank."""
    by_process = events.groupby("pid").agg(n_bytes=("n_bytes", "sum"), rank=("rank", "min"))
    return int(by_process.sort_values(["n_bytes", "rank"], ascending=[False, True], kind="stable").index[0])


def regime(events: pd.DataFrame) -> str:
    """Kind of data parallelism, from the traffic of some whole steps: ddp, zero-1/2, zero-3 or unknown.

    One rank's calls are read, step by step, in the order in which they were enqueued; amounts are counted in
    elements (bytes where the type is unknown), so that gathered bf16 parameters and fp32 gradients compare.

    * **zero-3**: parameters are gathered for the forward pass and again for the backward pass: at least 1.5
      elements gathered for each one reduce-scattered, a tenth of the gathering between reduce-scatters.
    * **zero-1/2**: parameters are gathered once, after (or long before) the gradients are reduce-scattered:
      fewer than 1.5, nearly none of it in between. Stages 1 and 2 differ in what a rank keeps, which traffic
      does not show. A stage 1 that all-reduces its gradients and gathers the parameters counts as well.
    * **ddp**: gradients are all-reduced, and next to nothing is gathered or reduce-scattered.
    * **unknown**: anything else, or nothing at all.
    """
    rows = events[events["func"].isin(["all_gather", "reduce_scatter", "all_reduce"])]
    rows = rows[rows["rank"] == rows["rank"].min()].sort_values("enqueue_ns", kind="stable")
    if rows.empty:
        return "unknown"
    known = rows["dtype"].isin(list(DTYPE_BYTES)).all()
    amount = rows["n_bytes"] / rows["dtype"].map(DTYPE_BYTES) if known else rows["n_bytes"].astype(float)
    gather, scatter, reduce = (
        float(amount[rows["func"] == func].sum()) for func in ("all_gather", "reduce_scatter", "all_reduce")
    )
    total = gather + scatter + reduce
    if scatter < 0.05 * total:
        if gather < 0.05 * total:
            return "ddp"
        return "zero-1/2" if reduce and 0.3 <= gather / reduce <= 1.5 else "unknown"
    if gather < 0.05 * total:
        return "unknown"
    between = float(amount[_between_scatters(rows)].sum()) / gather
    if gather / scatter >= 1.5 and between >= 0.1:
        return "zero-3"
    return "zero-1/2" if gather / scatter < 1.5 and between < 0.1 else "unknown"


def _between_scatters(rows: pd.DataFrame) -> np.ndarray[Any, Any]:
    """Which all-gathers of a step come after its first and before its last reduce-scatter (rows in time order)."""
    is_scatter = (rows["func"] == "reduce_scatter").astype(int)
    before = is_scatter.groupby(rows["step"]).cumsum()
    total = is_scatter.groupby(rows["step"]).transform("sum")
    return ((rows["func"] == "all_gather") & (before > 0) & (before < total)).to_numpy()
