"""NCCL_ALGO and NCCL_PROTO: which (algorithm, protocol) they take from the collectives that a table may touch.

Source: NCCL from 2.24 on (``parseList`` in ``src/graph/tuning.cc``, 2.31: ``src/tuning/cost_model.cc``)::

    value   = entry { ";" entry }            later entries replace earlier ones
    entry   = [ function ":" ] [ "^" ] word { "," word }

The first entry may lack a function. ``^``: all but the named words. No case, no trim. NCCL ends the job at an unknown
word; here it is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...traces.names import ALGOS, PAIRS_OF, PROTOS, TUNABLE_FUNCS, tuned_funcs

ALGO, PROTO = "NCCL_ALGO", "NCCL_PROTO"
#: NCCL's words for functions, without underscores, as all words here: ``allgather``.
_FUNCS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
#: NCCL's words -> ours.
_OUR_ALGOS = {name.replace("_", ""): name for name in ALGOS}
_OUR_PROTOS = {name: name for name in PROTOS}
_OUR_FUNCS = {name.replace("_", ""): name for name in TUNABLE_FUNCS}
_WORDS = {ALGO: _OUR_ALGOS, PROTO: _OUR_PROTOS}

#: (function, algorithm, protocol), e.g. ("all_gather", "ring", "ll128").
Cell = tuple[str, str, str]
CELLS: frozenset[Cell] = frozenset((func, *pair) for func in TUNABLE_FUNCS for pair in PAIRS_OF[func])


@dataclass(frozen=True)
class Narrowing:
    """What the variables do to NCCL's offer.

    ``removed``: cells that NCCL does not offer. ``unguarded``: functions for which NCCL offers LL128 without its own
    safety test, as it does once a list names LL128, or excludes another protocol. ``unknown``: words that NCCL does not
    know, as ``VARIABLE: word``.
    """

    removed: frozenset[Cell] = frozenset()
    unguarded: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def leaves_nothing(self, all_reduce: str) -> bool:
        """No collective that is tuned under this value of the job's option has a cell left."""
        return not any(self.offered(func) for func in tuned_funcs(all_reduce))

    def offered(self, func: str) -> list[tuple[str, str]]:
        """Pairs that the variables leave to a function, in NCCL's order."""
        return [pair for pair in PAIRS_OF[func] if (func, *pair) not in self.removed]


def narrowing(env: Mapping[str, str]) -> Narrowing:
    """What NCCL_ALGO and NCCL_PROTO of this environment take away; see the module for the grammar.

    >>> sorted(narrowing({"NCCL_PROTO": "^LL128"}).removed)
    [('all_gather', 'ring', 'll128'), ('all_reduce', 'ring', 'll128'), ('all_reduce', 'tree', 'll128'), \
('reduce_scatter', 'ring', 'll128')]
    >>> narrowing({"NCCL_ALGO": "broadcast:tree", "NCCL_PROTO": ""})
    Narrowing(removed=frozenset(), unguarded=(), unknown=())
    """
    algos, unknown = _parse(ALGO, env.get(ALGO, ""))
    protos, more = _parse(PROTO, env.get(PROTO, ""))
    removed = set[Cell]()
    for func, algo, proto in CELLS:
        has_algo = algo in algos.get(func, ALGOS)
        has_proto = proto in protos.get(func, PROTOS)
        if not (has_algo and has_proto):
            removed.add((func, algo, proto))
    unguarded = [func for func in TUNABLE_FUNCS if "ll128" in protos.get(func, ())]
    strange = (*unknown, *more)
    return Narrowing(frozenset(removed), tuple(unguarded), strange)


def _parse(variable: str, value: str) -> tuple[dict[str, set[str]], tuple[str, ...]]:
    """Function of ours -> words enabled for it, if the value says anything of it; and words that NCCL does not know."""
    enabled = dict[str, set[str]]()
    unknown = list[str]()
    for number, entry in enumerate(filter(None, value.split(";"))):
        parts = [part for part in entry.split(":") if part]
        if not parts:
            continue
        func = ""
        if len(parts) > 1:
            func = parts[0].lower()
        if func not in ("", *_FUNCS) or (not func and number > 0):
            unknown.append(f"{variable}: {parts[0]}")
            continue
        text = parts[1] if func else parts[0]
        words, strange = _words(variable, text)
        unknown += strange
        if not func:
            enabled |= dict.fromkeys(TUNABLE_FUNCS, words)
        elif func in _OUR_FUNCS:
            enabled[_OUR_FUNCS[func]] = words
    return enabled, tuple(unknown)


def _words(variable: str, text: str) -> tuple[set[str], list[str]]:
    """The words that a list enables, and those that NCCL does not know."""
    known = _WORDS[variable]
    excludes = text.startswith("^")
    named = [word for word in text.removeprefix("^").split(",") if word]
    found = set[str]()
    strange = list[str]()
    for word in named:
        if word.lower() in known:
            found.add(known[word.lower()])
        else:
            strange.append(f"{variable}: {word}")
    if excludes:
        found = set(known.values()) - found
    return found, strange
