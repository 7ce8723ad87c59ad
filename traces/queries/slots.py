"""Which slots a job has, and the fingerprint of each: from events of some default steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from ..assemble import Offer
from ..fingerprint import Fingerprint
from ..names import ALL_REDUCE, TUNABLE_FUNCS, tuned_funcs
from ..records import ALGOS, NO_OFFER, PAIRS_OF, PROTOS, Slot, pair_costs, size_class
from .skew import durations, label
from .steps import counted

Array = np.ndarray[Any, Any]
#: Columns of events that tell slots apart, in the order of a Slot's fields.
SLOT_KEYS = ["n_ranks", "n_nodes", "func", "size_class"]
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
        return f"{self.algo}/{self.proto}/{int(self.fingerprint.own_channels[0])}"

    @property
    def algo(self) -> str:
        """The algorithm of NCCL's own choice."""
        return PAIRS_OF[self.slot.func][int(self.fingerprint.own_pair[0])][0]

    @property
    def proto(self) -> str:
        """The protocol of NCCL's own choice."""
        return PAIRS_OF[self.slot.func][int(self.fingerprint.own_pair[0])][1]


def outside_the_offer(
    events: pd.DataFrame, offers: Mapping[tuple[int, str, int], Offer], all_reduce: str = ""
) -> dict[Slot, str]:
    """Slots that NCCL, left alone, runs as no table can say (a tenth of the calls) -> what it runs.

    From 2.29 on NCCL may take a symmetric kernel or a copy engine, which a tuner does not see. A table there would
    replace what is better by the best of the rest. Of all_reduce that also holds for NVLS, NVLS Tree and CollNet, and
    for calls on registered buffers. ``all_reduce``: the job's option.
    """
    tuned = events[events["func"].isin(tuned_funcs(all_reduce))]
    if tuned.empty:
        return {}
    tuned = with_sizes(tuned)
    tuned = tuned[(tuned["n_ranks"] > 0) & (tuned["asked"] > 0)]
    # The plugin tells of registered buffers once for a communicator.
    registered = {comm_id for (comm_id, _, _), offer in offers.items() if offer.is_registered}
    found = {}
    for key, group in tuned.groupby(SLOT_KEYS):
        slot = slot_of(key)
        outside = Counter[str]()
        for kind, count in group.groupby(["comm_id", "asked", "algo", "proto"]).size().items():
            comm_id, asked, algo, proto = cast(tuple[int, int, str, str], kind)
            message = (int(comm_id), slot.func, int(asked))
            if slot.func == ALL_REDUCE and int(comm_id) in registered:
                outside["a kernel on registered buffers"] += int(count)
            elif not _offers(offers.get(message), algo, proto) or not _is_reached(slot.func, algo, proto):
                outside[_kernel(algo, proto)] += int(count)
        if outside.total() > _OUTSIDE * len(group):
            ((found[slot], _),) = outside.most_common(1)
    return found


def _kernel(algo: str, proto: str) -> str:
    """What ran, in words."""
    return f"{algo}/{proto}" if algo in ALGOS and proto in PROTOS else "a kernel of another kind"


def _offers(offer: Offer | None, algo: str, proto: str) -> bool:
    """Whether NCCL offers this cell; True where its offer is not known."""
    if offer is None:
        return True
    if algo not in ALGOS or proto not in PROTOS:
        return False
    row = ALGOS.index(algo)
    column = PROTOS.index(proto)
    cost = float(offer.cost_us[row, column])
    return 0 <= cost < NO_OFFER


def _is_reached(func: str, algo: str, proto: str) -> bool:
    """Whether a table could say this cell, of all those that NCCL has for the function."""
    return func != ALL_REDUCE or (algo, proto) in PAIRS_OF[func]


def of_class(events: pd.DataFrame, slot: Slot) -> pd.DataFrame:
    """The events of all functions on communicators of the slot's class."""
    is_same = (events["n_ranks"] == slot.n_ranks) & (events["n_nodes"] == slot.n_nodes)
    return events[is_same]


def find_slots(
    events: pd.DataFrame,
    offers: Mapping[tuple[int, str, int], Offer],
    step_us: float,
    memory_pressure: float = 0.0,
    told: pd.Series[int] | None = None,
    headroom: int = 0,
    all_reduce: str = "",
) -> list[SlotProfile]:
    """The slots of a job, the one with the largest share of the step first.

    ``events``: of whole default steps; ``step_us``: their time. NCCL's price stands in for kernels not sampled.
    ``told``: see :func:`.steps.told_steps`. ``headroom``: least channels, though NCCL untouched uses fewer.
    ``all_reduce``: the job's option. A class of communicators is one slot, with the share of the process that it costs
    most.
    """
    tuned = events[events["func"].isin(tuned_funcs(all_reduce))]
    if tuned.empty:
        return []
    tuned = with_sizes(tuned)
    n_steps = counted(tuned, told)
    # Never announced: its class is not known. Not asked about: a symmetric kernel ran it, which no table reaches.
    tuned = tuned[(tuned["n_ranks"] > 0) & (tuned["asked"] > 0)]
    tuned = tuned.assign(part=tuned["n_bytes"] / tuned["asked"])
    channels = channels_of(tuned)
    profiles = []
    for key, everyone in tuned.groupby(SLOT_KEYS):
        slot = slot_of(key)
        pid = _busiest(everyone, n_steps)
        group = everyone[everyone["pid"] == pid]
        comm_id, n_bytes = _largest_message(group)
        offer = offers.get((comm_id, slot.func, n_bytes))
        if offer is None or (offer.algo, offer.proto) not in PAIRS_OF[slot.func]:
            continue
        comm_channels = max(channels[slot.n_ranks, slot.n_nodes], headroom)
        use = _Use(slot, n_bytes, group, n_steps[pid], comm_channels)
        profile = use.profile(offer, step_us, memory_pressure, all_reduce)
        profiles.append(profile)
    return sorted(profiles, key=lambda profile: -profile.share)


@dataclass(frozen=True)
class _Use:
    """How the process that a slot costs most uses it."""

    slot: Slot
    n_bytes: int
    calls: pd.DataFrame  # with the columns of with_sizes and ``part``
    n_steps: int
    comm_channels: float

    def profile(self, offer: Offer, step_us: float, memory_pressure: float, all_reduce: str) -> SlotProfile:
        """The slot's profile, with NCCL's price where no kernel was sampled."""
        func = self.slot.func
        pairs = PAIRS_OF[func]
        cost = pair_costs(offer.cost_us, func)
        own_pair = pairs.index((offer.algo, offer.proto))
        if func == ALL_REDUCE and all_reduce != "algo":
            is_other = [algo != offer.algo for algo, _ in pairs]
            cost[is_other] = -1.0
        timed = self.calls[self.calls["us"].notna()]
        call_us, timed_by = float(cost[own_pair]), "NCCL's price"
        if len(timed):
            call_us = float((timed["us"] / timed["part"]).median())
            timed_by = label(timed["timed_by"])
        # A group of calls that NCCL prices together is one.
        all_calls = float(self.calls["part"].sum())
        calls = all_calls / self.n_steps
        share = min(1.0, calls * call_us / step_us)
        fingerprint = Fingerprint(
            func=_one(TUNABLE_FUNCS.index(func)),
            n_bytes=_one(self.n_bytes),
            calls=_one(calls),
            n_ranks=_one(self.slot.n_ranks),
            n_nodes=_one(self.slot.n_nodes),
            cost_us=cost[None].astype(np.float64),
            own_pair=np.array([own_pair]),
            own_channels=_one(self.calls["n_channels"].median()),
            comm_channels=_one(self.comm_channels),
            share=_one(share),
            memory_pressure=_one(memory_pressure),
        )
        return SlotProfile(self.slot, self.n_bytes, calls, call_us, timed_by, share, fingerprint)


def _one(value: float) -> Array:
    """A feature of one slot, (1,)."""
    return np.array([float(value)])


def slot_of(key: Any) -> Slot:
    """The slot of a group by SLOT_KEYS."""
    n_ranks, n_nodes, func, klass = key
    return Slot(int(n_ranks), int(n_nodes), func, int(klass))


def _largest_message(calls: pd.DataFrame) -> tuple[int, int]:
    """Communicator and asked bytes of the message that most of these calls' bytes go to."""
    moved = calls.groupby(["comm_id", "asked"])["n_bytes"].sum()
    comm_id, asked = cast(tuple[int, int], moved.idxmax())
    return int(comm_id), int(asked)


def with_sizes(events: pd.DataFrame) -> pd.DataFrame:
    """``events`` with the columns of :func:`durations` and two more. ``asked``: the bytes that NCCL asked the tuner
    about, 0: it did not ask; ``size_class``: of these, or of the message.

    Of grouped calls NCCL asks with the sum of their sizes, which a table's row has to hold. Recordings that do not tell
    are read as single calls.
    """
    tells = "asked_bytes" in events and (events["asked_bytes"] > 0).any()
    asked = events["asked_bytes"] if tells else events["n_bytes"]
    sizes = asked.where(asked > 0, events["n_bytes"])
    classes = {n: size_class(int(n)) for n in sizes.unique()}
    size_classes = sizes.map(classes).astype("int64")
    rows = events.assign(asked=asked, size_class=size_classes)
    return rows.join(durations(events))


def channels_of(events: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Channels that all communicators of a class (n_ranks, n_nodes) have: the least of the most seen on each."""
    most = events.groupby(["n_ranks", "n_nodes", "comm_id"])["n_channels"].max()
    least = most.groupby(level=["n_ranks", "n_nodes"]).min()
    found = {}
    for sizes, n_channels in least.items():
        found[cast(tuple[int, int], sizes)] = float(n_channels)
    return found


def _busiest(events: pd.DataFrame, n_steps: pd.Series[int]) -> int:
    """The process that these events move most bytes a step for; of equals the one of the lowest rank. ``n_steps``: of
    each process, which may have recorded fewer than another."""
    processes = events.groupby("pid")
    sums = processes.agg(n_bytes=("n_bytes", "sum"), rank=("rank", "min"))
    sums["n_bytes"] /= n_steps[sums.index]
    sums = sums.sort_values(["n_bytes", "rank"], ascending=[False, True], kind="stable")
    return int(sums.index[0])
