"""Which slots a job has, and the fingerprint of each: from events of some default steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from ..assemble import Offer
from ..fingerprint import Fingerprint
from ..records import ALGOS, NO_OFFER, PAIRS, PROTOS, TUNED_FUNCS, Slot, pair_costs, size_class
from .skew import durations, label

_OUTSIDE = 0.1  # of a slot's calls may run otherwise than offered, before it is left alone


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


def outside_the_offer(events: pd.DataFrame, offers: Mapping[tuple[int, str, int], Offer]) -> dict[Slot, str]:
    """Slots that NCCL, left alone, runs otherwise than it offers the tuner (a tenth of the calls) -> what it runs.

    From 2.29 on NCCL may ask the tuner and then take a symmetric kernel, or a copy engine, which are not in the list
    that a tuner sees. A table that claims the call would put the best of the rest in the place of what is better still.
    """
    tuned = events[events["func"].isin(TUNED_FUNCS)]
    if tuned.empty:
        return {}
    tuned = with_sizes(tuned)
    tuned = tuned[(tuned["n_ranks"] > 0) & (tuned["asked"] > 0)]
    found = {}
    for key, group in tuned.groupby(["n_ranks", "n_nodes", "func", "size_class"]):
        n_ranks, n_nodes, func, klass = cast(tuple[int, int, str, int], key)
        outside = Counter[str]()
        for kind, count in group.groupby(["comm_id", "asked", "algo", "proto"]).size().items():
            comm_id, asked, algo, proto = cast(tuple[int, int, str, str], kind)
            if not _offers(offers.get((int(comm_id), func, int(asked))), algo, proto):
                is_known = algo in ALGOS and proto in PROTOS
                outside[f"{algo}/{proto}" if is_known else "a kernel of another kind"] += int(count)
        if outside.total() > _OUTSIDE * len(group):
            slot = Slot(int(n_ranks), int(n_nodes), func, int(klass))
            ((found[slot], _),) = outside.most_common(1)
    return found


def _offers(offer: Offer | None, algo: str, proto: str) -> bool:
    """Whether NCCL offers this cell; True where its offer is not known."""
    if offer is None:
        return True
    if algo not in ALGOS or proto not in PROTOS:
        return False
    cost = float(offer.cost_us[ALGOS.index(algo), PROTOS.index(proto)])
    return 0 <= cost < NO_OFFER


def find_slots(
    events: pd.DataFrame,
    offers: Mapping[tuple[int, str, int], Offer],
    step_us: float,
    memory_pressure: float = 0.0,
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
