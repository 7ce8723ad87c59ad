"""What another release of NCCL would choose for a job by its own cost model, and whether a table still holds there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..traces.files import Trace
from ..traces.fingerprint import PRICE_CAP
from ..traces.records import ALGOS, PROTOS, TUNED_FUNCS, Rule, Table
from .recordings import of_size
from .sim import clusters, cost_model
from .sim.clusters import Cluster

#: Sizes that a rule is tried at: powers of two, and its own ends, within this range.
_SIZES = (1 << 10, 1 << 32)


@dataclass(frozen=True, order=True)
class Message:
    """One kind of call: a communicator's size, the collective, NCCL's bytes (the whole buffer)."""

    n_ranks: int
    n_nodes: int
    func: str
    n_bytes: int


@dataclass(frozen=True)
class Change:
    """What a message meets in the older (before) and the newer release (after)."""

    message: Message
    before: str  # algo/proto/channels
    after: str
    gone: tuple[str, ...]  # pairs that are offered no more
    new: tuple[str, ...]
    price: float  # NCCL's price of what it chooses, after / before

    @property
    def is_change(self) -> bool:
        """Something else would run, or may be chosen; prices alone are none."""
        return self.before != self.after or bool(self.gone or self.new)


def messages_of(trace: Trace) -> list[Message]:
    """The messages of a recording that a tuner is asked about."""
    columns = ["n_ranks", "n_nodes", "func", "n_bytes"]
    rows = trace.events[trace.events["func"].isin(TUNED_FUNCS)][columns].drop_duplicates()
    found = (Message(int(r), int(m), str(f), int(b)) for r, m, f, b in rows.itertuples(index=False))
    return sorted(m for m in found if m.n_ranks > 1 and m.n_nodes > 0 and m.n_bytes > 0)


def messages_in(rules: Iterable[Rule], c: Cluster) -> list[Message]:
    """Messages that rules are for: their ends and the powers of two between them; any communicator is ``c``'s whole."""
    found = set()
    for rule in rules:
        low, high = max(rule.min_bytes, _SIZES[0]), min(rule.max_bytes, _SIZES[1])
        sizes = {low, high} | {1 << k for k in range(10, 33) if low <= 1 << k <= high}
        place = (rule.n_ranks or c.n_ranks, rule.n_nodes or c.n_nodes)
        found |= {Message(*place, rule.func, b) for b in sizes if low <= high and rule.func in TUNED_FUNCS}
    return sorted(found)


def changes(messages: Iterable[Message], c: Cluster, before: str, after: str) -> list[Change]:
    """Every message with what both releases do. Raises ValueError for a release or communicator that cannot be."""
    found = []
    for m in messages:
        old, new = (clusters.resize(of_size(c, m.n_ranks, m.n_nodes), nccl=release) for release in (before, after))
        tables = [cost_model.cost_table(x, m.func, m.n_bytes) for x in (old, new)]
        offered = [{f"{ALGOS[a]}/{PROTOS[p]}" for a, p in np.argwhere(t >= 0)} for t in tables]
        chosen = [cost_model.choice(x, m.func, m.n_bytes) for x in (old, new)]
        ran = ["/".join((*pair, str(_channels(x, m, *pair)))) for x, pair in zip((old, new), chosen, strict=True)]
        us = [float(t[ALGOS.index(a), PROTOS.index(p)]) for t, (a, p) in zip(tables, chosen, strict=True)]
        gone, fresh = sorted(offered[0] - offered[1]), sorted(offered[1] - offered[0])
        found.append(Change(m, ran[0], ran[1], tuple(gone), tuple(fresh), us[1] / us[0]))
    return found


def _channels(c: Cluster, m: Message, algo: str, proto: str, asked: int = 0) -> int:
    return cost_model.channels(c, m.func, m.n_bytes, algo, proto, asked)[0]


def holds(table: Table, c: Cluster, release: str, messages: Iterable[Message] | None = None) -> list[dict[str, Any]]:
    """For each rule of a table: does it still say something under ``release``? ``messages`` are a job's, if known.

    ``state`` is ``holds``, ``same`` (NCCL does it by itself), ``refused`` (not offered, or priced above the cap),
    ``fewer`` (fewer channels run than it asks for) or ``unmatched`` (no message of the job is in it).
    """
    job = None if messages is None else list(messages)
    rows = []
    for rule in table.rules:
        told = {"func": rule.func, "min_bytes": rule.min_bytes, "max_bytes": rule.max_bytes}
        told |= {"n_ranks": rule.n_ranks, "n_nodes": rule.n_nodes, "decision": str(rule.decision)}
        inside = messages_in([rule], c) if job is None else [m for m in job if _is_for(rule, m)]
        states = [_state(rule, clusters.resize(of_size(c, m.n_ranks, m.n_nodes), nccl=release), m) for m in inside]
        order = ("refused", "fewer", "holds", "same")
        state = next((s for s in order if s in (x for x, _ in states)), "unmatched")
        why = next((text for x, text in states if x == state), "no message of the job is in it")
        rows.append({**told, "state": state, "why": why})
    return rows


def _is_for(rule: Rule, m: Message) -> bool:
    same = rule.n_ranks in (0, m.n_ranks) and rule.n_nodes in (0, m.n_nodes)
    return same and rule.func == m.func and rule.min_bytes <= m.n_bytes <= rule.max_bytes


def _state(rule: Rule, c: Cluster, m: Message) -> tuple[str, str]:
    d, prices = rule.decision, cost_model.cost_table(c, m.func, m.n_bytes)
    own = cost_model.choice(c, m.func, m.n_bytes)
    algo, proto = (d.algo, str(d.proto)) if d.algo else own
    price, best = float(prices[ALGOS.index(algo), PROTOS.index(proto)]), float(prices[prices >= 0].min())
    if price < 0:
        return "refused", f"{algo}/{proto} is not offered for {m.n_bytes} bytes"
    if price > PRICE_CAP * best:
        return "refused", f"{algo}/{proto} is priced at {price / best:.1f} times NCCL's best for {m.n_bytes} bytes"
    ran = _channels(c, m, algo, proto, d.n_channels)
    # Small messages fill fewer channels in every release: only what the communicator or the release withholds counts.
    filled = _channels(clusters.resize(c, nccl="2.30.7"), m, algo, proto, 64)
    if d.n_channels > c.comm_channels or ran < min(d.n_channels, filled):
        return "fewer", f"{ran} channels run for {m.n_bytes} bytes, {d.n_channels} are asked for"
    same = (algo, proto) == own and (not d.n_channels or ran == _channels(c, m, algo, proto))
    return ("same", "NCCL does so by itself") if same else ("holds", "")
