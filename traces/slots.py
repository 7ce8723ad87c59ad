"""Which slots a job has, and the fingerprint of each: from the events of some default steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from .assemble import Offer
from .fingerprint import Fingerprint
from .records import PAIRS, TUNED_FUNCS, Slot, pair_costs, size_class
from .skew import durations, label


@dataclass(frozen=True)
class SlotProfile:
    """One slot as the job uses it when NCCL decides."""

    slot: Slot
    n_bytes: int  # of the message that most of the slot's time goes to
    calls: float  # per step
    call_us: float  # median time of one call
    timed_by: str  # how that was found: see skew.py, or "NCCL's price" where no kernel was sampled
    share: float  # calls x call_us / step time
    fingerprint: Fingerprint  # of this one slot: arrays of shape (1, ...)


def find_slots(
    events: pd.DataFrame,
    offers: Mapping[tuple[int, str, int], Offer],
    step_us: float,
    memory_pressure: float = 0.0,
    time_scale: float = 1.0,
) -> list[SlotProfile]:
    """The slots of a job, the one with the largest share of the step first.

    ``events`` are those of whole default steps; ``step_us`` is their step time. Where kernels were not sampled, NCCL's
    own price (stretched by ``time_scale`` on an emulated cluster) stands in for the time of a call.
    """
    tuned = events[events["func"].isin(TUNED_FUNCS)]
    if tuned.empty:
        return []
    tuned = tuned.join(durations(tuned))
    ranks = tuned["rank"]
    one = tuned[ranks == ranks.min()]  # one rank's view: all ranks take part in every call
    n_steps = max(1, one["step"].nunique())
    sizes = one["n_bytes"].to_numpy()
    one = one.assign(size_class=[size_class(int(n)) for n in sizes])
    most_channels = tuned.groupby("comm_id")["n_channels"].max()
    profiles = []
    for (comm_id, func, klass), group in one.groupby(["comm_id", "func", "size_class"]):
        slot = Slot(int(comm_id), str(func), int(klass))
        n_bytes = int(group.groupby("n_bytes").size().pipe(lambda s: (s * s.index).idxmax()))
        offer = offers.get((slot.comm_id, slot.func, n_bytes)) or _nearest(offers, slot, n_bytes)
        if offer is None:
            continue  # never asked about: a symmetric kernel or copy engine ran it, no table can reach it
        cost = pair_costs(offer.cost_us)
        own = (str(offer.algo), str(offer.proto))
        if own not in PAIRS:
            continue
        timed = group[group["us"].notna()]
        call_us = float(timed["us"].median()) if len(timed) else float(cost[PAIRS.index(own)]) * time_scale
        timed_by = label(timed["timed_by"]) if len(timed) else "NCCL's price"
        calls = len(group) / n_steps
        share = min(1.0, calls * call_us / step_us)
        fingerprint = Fingerprint(
            is_reduce_scatter=np.array([float(func == "reduce_scatter")]),
            n_bytes=np.array([float(n_bytes)]),
            calls=np.array([calls]),
            n_ranks=np.array([float(group["n_ranks"].iloc[0])]),
            n_nodes=np.array([float(group["n_nodes"].iloc[0])]),
            cost_us=cost[None].astype(np.float64),
            own_pair=np.array([PAIRS.index(own)]),
            own_channels=np.array([float(group["n_channels"].median())]),
            comm_channels=np.array([float(most_channels[comm_id])]),
            share=np.array([share]),
            exposed=np.array([np.nan]),  # the host cannot see when a GPU computes
            memory_pressure=np.array([memory_pressure]),
        )
        profiles.append(SlotProfile(slot, n_bytes, calls, call_us, timed_by, share, fingerprint))
    return sorted(profiles, key=lambda p: -p.share)


def _nearest(offers: Mapping[tuple[int, str, int], Offer], slot: Slot, n_bytes: int) -> Offer | None:
    """Grouped calls are priced as one larger message: the nearest size of the same communicator then stands in."""
    sizes = [n for comm, func, n in offers if comm == slot.comm_id and func == slot.func]
    return offers[slot.comm_id, slot.func, min(sizes, key=lambda n: abs(n - n_bytes))] if sizes else None
