"""All reasons that the product gives, by code. The words of each code stand only here.

Four kinds: :class:`RunEnds`, :class:`NotTuning`, :class:`RowRefused`, :class:`NotAgreeing`. A member is a code; its
value a text with gaps. Call it with its facts: a :class:`Why`, which travels as code and facts. No program reads words.
Standard library only: the probe imports this.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any


class Reason(Enum):
    """A code: its words, with gaps for facts."""

    def __call__(self, **facts: object) -> Why:
        """Give this reason. Raises KeyError if a fact is missing, or is none of this reason's."""
        if facts.keys() != self.gaps:
            raise KeyError(f"{self.code} has the facts {sorted(self.gaps)}, not {sorted(facts)}")
        return Why(self, {name: _simple(value) for name, value in facts.items()})

    @property
    def code(self) -> str:
        """Its name in files and in the documentation, e.g. ``no-plugin``."""
        return self.name.lower().replace("_", "-")

    @property
    def gaps(self) -> frozenset[str]:
        """The names of its facts."""
        return _gaps(str(self.value))


class Why:
    """A reason that was given: its code, and its facts by name, one of which may be another reason.

    ``str()`` gives the words for people. Equal codes with equal facts are equal. It is never changed.
    """

    def __init__(self, reason: Reason, facts: Mapping[str, int | float | str | Why]) -> None:
        self.reason = reason
        self.facts = dict(facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Why) and (self.reason, self.facts) == (other.reason, other.facts)

    def __hash__(self) -> int:
        return hash((self.reason, *sorted(self.facts)))

    def __str__(self) -> str:
        return _Words().vformat(str(self.reason.value), (), self.facts)

    def __repr__(self) -> str:
        return f"<{self.packed()}>"

    def __iter__(self) -> Iterator[Reason]:
        """The reason, then those within it, the outermost first."""
        yield self.reason
        for fact in self.facts.values():
            if isinstance(fact, Why):
                yield from fact

    @property
    def codes(self) -> list[str]:
        """The codes, the outermost first.

        >>> RunEnds.NEVER_SWITCHED(why=NotAgreeing.NO_PLUGIN(rank=3)).codes
        ['never-switched', 'no-plugin']
        """
        return [one.code for one in self]

    def as_json(self) -> dict[str, Any]:
        """``{"code": ..., "facts": {...}}``."""
        facts = {name: fact.as_json() if isinstance(fact, Why) else fact for name, fact in self.facts.items()}
        return {"code": self.reason.code, "facts": facts}

    def packed(self) -> str:
        """One line: the code, then the facts as JSON. Its beginning still tells the code."""
        told = self.as_json()
        return f"{told['code']} {json.dumps(told['facts'], separators=(',', ':'))}"

    @classmethod
    def of(cls, found: object) -> Why:
        """The reason in a JSON value, see :meth:`as_json`. Raises ValueError for another value, or an unknown code."""
        if not isinstance(found, dict) or not {"code", "facts"} <= found.keys() <= {"code", "facts", "text"}:
            raise ValueError(f"no reason: {found!r}")
        code, facts = found["code"], found["facts"]
        if code not in _by_code() or not isinstance(facts, dict):
            raise ValueError(f"not a reason that is known here: {code!r}")
        return cls(_by_code()[code], {str(name): _fact(value) for name, value in facts.items()})

    @classmethod
    def unpacked(cls, line: str) -> Why | None:
        """The reason of :meth:`packed`; without facts where the end of the line is missing; None if there is none."""
        code, _, facts = line.partition(" ")
        if code not in _by_code():
            return None
        try:
            return cls.of({"code": code, "facts": json.loads(facts)})
        except ValueError:
            return cls(_by_code()[code], {})


class _Words(string.Formatter):
    """Fills the gaps; a fact that is not known is a question mark."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        return kwargs.get(field_name, "?"), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _FIGURES and isinstance(value, int | float):
            return _FIGURES[format_spec](value)
        return format(value, format_spec) if isinstance(value, int | float) else str(value)


def ms(value: float) -> str:
    """Milliseconds with three digits: ``6.16 ms``, ``325 ms``."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def seconds(value: float) -> str:
    """``0.4 s``, ``30 s``, ``12 min``, ``3.2 h``."""
    if value < 100:
        return f"{value:.{1 if value < 10 else 0}f} s"
    return f"{value / 60:.0f} min" if value < 5940 else f"{value / 3600:.1f} h"


def changed(speedup: float) -> str:
    """A speed-up as a change of the step time: ``12.8 % shorter``."""
    sign = 1 if speedup >= 1 else -1
    value = round(100 * sign * (1 - 1 / speedup), 1) + 0.0  # no "-0.0"
    return f"{value:.1f} % {'shorter' if sign > 0 else 'longer'}"


#: Figures in words, by the format of a gap.
_FIGURES: dict[str, Callable[[float], str]] = {"ms": ms, "seconds": seconds, "changed": changed}


def _simple(value: object) -> int | float | str | Why:
    """A fact as files hold it."""
    return value if isinstance(value, int | float | str | Why) else str(value)


def _fact(value: object) -> int | float | str | Why:
    """A fact from a file. Raises ValueError."""
    return value if isinstance(value, int | float | str) else Why.of(value)


class RunEnds(Reason):
    """Why a run is over, or has lost its kept table."""

    JOB_ENDED = "the job has ended"
    JOB_STATUS = "the job ended with status {status}"
    ALL_STEPS = "the simulated job has run its {count:,} steps"
    BEFORE_A_SWITCH = "{ended}, before its ranks switched tables: {why}"
    ONCE = "the verdict is reached: tuning ends here, as --once requests"
    STOPPED = "stopped by `dynamiccl stop`"
    SEARCHED_AGAIN = "another search began"
    SWITCHED_OFF = "the tuner is switched off here ({why})"
    NOT_STARTED = "dynamiccl cannot start here ({why})"
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"
    NEVER_SWITCHED = "the ranks never switched tables: {why}"
    NO_MORE_SWITCHES = "the ranks switch no more tables: {why}"
    TWO_WAYS = "two ranks ran one collective with different settings ({example}): the table was withdrawn"
    TWO_WAYS_STILL = (
        "two ranks ran one collective with different settings ({example}), and the table is still in force: "
        "run `dynamiccl stop` on the node of rank 0"
    )
    SLOWER = "the table is no longer faster than NCCL's default"
    NO_GAIN = "no gain beyond the noise: NCCL's default stays"
    CANNOT_WRITE = "the results cannot be written: {error}"


class NotTuning(Reason):
    """Why nothing is tuned, now or ever."""

    NOTHING = (
        "the job runs nothing that is tuned (all_gather, reduce_scatter, with --all-reduce all_reduce) "
        "where a tuner can reach it: nothing to tune"
    )
    TOO_SMALL = (
        "the tuned collectives that a tuner can reach take {share:.1%} of a step: too small a share to tune"
    )
    NOT_LOADED = (
        "NCCL has not loaded the plugin in any process here, so nothing can be tuned: keep the job's variables that "
        "begin with NCCL_ and DYNAMICCL_, set no NCCL_ENV_PLUGIN, and look for TUNER/Plugin and ENV/Plugin in the "
        "output of NCCL_DEBUG=INFO"
    )
    NO_JOB_GROUP = (
        "no process here has made a group of torch.distributed, "
        "and NCCL has not loaded the plugin: nothing to tune"
    )
    NOT_LOADED_AS_TOLD = NOT_LOADED + "; rank 0 says: {why}"
    NOT_ASKED = (
        "NCCL runs collectives that are tuned but never asks the tuner (symmetric kernels, copy engines, another "
        "tuner): `dynamiccl doctor` names the variables that cause this"
    )
    NOT_TOLD = (
        "NCCL asks the tuner but tells the profiler of no collective, so none can be compared: keep the job's "
        "NCCL_PROFILER_PLUGIN, and use NCCL 2.28.3 or newer"
    )
    OUTSIDE = (
        "{slot} is left alone: NCCL runs {ran} there, which it does not offer to a tuner (a symmetric kernel or a copy "
        "engine)"
    )
    NOT_REACHED = (
        "{slot} is left alone: NCCL runs {ran} there, and of all_reduce a table reaches Ring and Tree only"
    )
    NOT_UNTOUCHED = (
        "with --headroom NCCL cannot be left untouched here, so no gain could be told ({why}): "
        "run the job without that option"
    )
    SLOT_TAKEN = (
        "{variable}={value} was set after `tune`, `env` or `apply` had set it (by a Slurm TaskProlog or a SPANK "
        "plugin, for example): NCCL loads only one such plugin, so ours replaces it"
    )
    OTHER_BACKEND = "torch.distributed runs on {backend} here; only NCCL asks a tuner"
    NO_PROBE = "no process of the job has loaded the probe yet"
    NO_RING = "no process of the job has a ring, so nothing is heard of it: {why}"
    NO_STEP = "the probe is loaded; no optimizer step yet"
    NO_STEP_TO_APPLY = "no step of a PyTorch optimizer was seen here; --no-gate is for other programs"
    NO_STEP_OF_RANK_0 = "the first step of rank 0"
    ELSEWHERE = "rank 0 is on another node: the tuner there tunes, and this one only serves the job"
    NO_SWITCH_YET = "the ranks do not switch tables yet: {why}"
    NOT_ON_ALL = "not all ranks switch tables at present: {why}"
    NOT_ALL_THERE = "not every rank has taken its first step, or NCCL has not loaded the tuner there"
    NOT_LOOKED = "rank 0 has not looked for another table yet: it may be held up"
    NEXT_STEP = "the next steps of the job"
    PAUSED = "the job has taken no step for {seconds:.0f} s: it pauses, or is about to end"
    UNEVEN = (
        "in {count} trials in a row no quad of turns was measured: the job's steps differ too much in their "
        "collectives to compare two tables"
    )
    TOO_FEW_STEPS = "it took {count} steps, too few to try a table"


class RowRefused(Reason):
    """Why a row of a table, or a setting of a slot, is not used."""

    NOT_TRIED = "NCCL's default, {own}, stays: no other setting was tried"
    NOT_BETTER = "NCCL's default, {own}, stays: {tried} other settings tried, none was certainly faster"
    NOT_OBEYED = "not obeyed: NCCL ran {ran} where the table says {decision} for {slot}"
    TOO_SLOW = "not tried again: {decision} for {slot} made steps more than {times:g} times as long"
    FATAL = "not tried again: the ranks ended in a trial of {decision} for {slot}"
    NO_MEMORY = (
        "{algo} is not tried on communicators of {of} ranks: its first call may take {needs:.1f} GiB of GPU memory, "
        "and the fullest GPU of this node has {free:.1f} GiB left"
    )
    AFTER_LL = (
        "Simple is not tried for {slot}: the job registers buffers, its communicators also run LL, and NCCL can hang "
        "over nodes if Simple follows LL (NVIDIA/nccl#2389)"
    )
    PLUGIN_REFUSES = "the plugin refuses the table: {error}"


class NotAgreeing(Reason):
    """Why the ranks change no table, or not on all communicators."""

    NO_GROUP = "NCCL runs here, but there is no process group of torch.distributed through which its ranks could agree"
    NO_PLUGIN = "rank {rank} has no plugin"
    NOTHING_COUNTED = (
        "no collective that is tuned is counted yet: the job has run too few, or NCCL tells the profiler of none "
        "(NCCL_PROFILER_PLUGIN)"
    )
    NOT_ALL_VOTED = (
        "{n} of {of} ranks of a communicator of rank {rank} take part: the others have no tuner, count nothing, or "
        "answer late"
    )
    NOT_ALIKE = "rank {rank} has {what}, rank {other} has {others}"
    NOT_SERVED = "a communicator of rank {rank} does not have the table yet that is there to stay"
    NOT_REPORTED = "rank {rank} has not told what it runs since the last table came"
    GAVE_UP = (
        "rank {rank} has waited too long for the job's store and gave up: a communicator there keeps the table that it "
        "has until the job ends"
    )
    OTHER_PLANS = (
        "rank {rank} and rank {other} of a communicator would run its collective {count} under different tables: "
        "NCCL's default is set, and tuning ends"
    )
    NO_COMMON_COUNT = (
        "rank {rank} has issued {count} collectives on a communicator, but the number of rank {other} differs so much "
        "that they cannot be compared"
    )
    OTHER_CALLS = (
        "the first {count} collectives of rank {rank} and rank {other} on their communicator are not the same"
    )
    NO_CLOCK = (
        "NCCL does not report the calls of rank {rank} where they are made ({why}), so the ranks share no count: "
        "no table changes on that communicator"
    )
    NO_RHYTHM = (
        "the last steps of a communicator of rank {rank} had different numbers of collectives, or its ranks count "
        "steps differently: tables cannot alternate step by step"
    )
    FATAL_TRIAL = "the ranks ended in a trial of these rows: they are not tried again"
    OLD_TRIAL = "this trial began before the ranks, or their group, were made anew"
    NO_ROOM = "no room for another table: the {n} communicators of a rank hold all tables that there are"
    NOT_SWITCHED = "rank {rank} could not change its table as the others did: {error}"
    TOO_MANY = "rank {rank}: too many destroyed process groups wait for the tuner to leave them"
    LATE_STORE = "a rank reached its limit before the job's store answered"
    NO_STORE = "rank {rank}: the job's store is gone ({error}); its tables stay as they are"
    NOT_CONNECTED = "no table changes until the job's store answers ({why})"
    TABLE_STAYS = "a table may stay in force until the job ends: {why}"
    DESTROYED = "the process group was destroyed"
    FAULT = "rank {rank}: {error}"


class Happened(Reason):
    """What the tuner does, and what comes of it, in the order of a run."""

    WAITS_FOR_STEPS = "waiting for the job's first steps"
    GOES_ON = "a table was confirmed before: going on with it"
    WAITING = "waiting: {why}"
    NEEDS_NCCL = "{why}: run the job on NCCL, or emulate a cluster by dynamiccl tune --cluster"
    ONLY_WATCHES = "this tuner only watches (--search-slots {slots}): {why}"
    NO_SEARCH_SLOT = "as many tuners search already as this site allows"
    NO_SLOT_FILE = "{path}: {error}"
    NOT_LOGGED = "not written: {error}"
    RECALLED = "memory: {why}"
    ROWS_GONE = "rows dropped, as no such calls are made or tuned here now: {slots}"
    SLOTS = "{count} kinds of call to tune, {share:.0%} of a step of {step:ms}"
    CRITICAL = "on the critical path: {slots}"
    NONE_CRITICAL = "on the critical path: none, the step hides its collectives behind compute"
    TABLE = "{table} = {rows}"
    GIVEN_UP = "{table} given up: a step took over {times:g} times as long"
    BEST = "best so far {table}: one window {speedup:changed} than NCCL's default"
    COMPARES = "comparison: {table} against {against}"
    KEPT = "kept {table}: {speedup:changed} than {against} ({low:.1f} to {high:.1f}: {count} {unit})"
    LOST = "{table} lost: {speedup:changed} than {against} ({low:.1f} to {high:.1f}: {count} {unit})"
    NOT_DECIDED = (
        "{table} not decided: {speedup:changed} than {against} ({low:.1f} to {high:.1f}: {count} {unit})"
    )
    NOT_COMPARED = "{table} against {against}: too few alternations to tell"
    TRIALS_LEFT = (
        "trials: up to {count} times {steps} steps under another table; with tune --once there are none"
    )
    TRIALS_OVER = "trials over: {count} windows, at the cost of {cost:seconds}"
    JOB_CHANGED = "the job has changed: measuring NCCL's default again"
    TABLE_DROPPED = "back to NCCL's default: {why}"
    FAILED = "FAILURE: {why}"
    LOOKS_AGAIN = "looking again for what can be tuned"
    ENDS_BY_ERROR = "tuning ends: {error}"
    LEAVES_JOB = "{why}: the job goes on under what was confirmed"
    NO_REPORT = "the report could not be made ({error}); the rest is whole"


class Recalled(Reason):
    """What the memory has for a job's first table."""

    NOTHING_KNOWN = "nothing is known of this cluster yet"
    NOTHING_ALIKE = "runs before had no slot like these, or its calls took another time"
    FAILED_BEFORE = "this job failed, {written}: no run up to that one is used"
    BEGINS_WITH_TABLE = "{rows} of {slots} slots begin with what {job} came to, {written}"
    BEGINS_WITH_DEFAULT = "NCCL's default is what {job} came to, {written}"
    UNREADABLE = "the memory {url} cannot be read ({error}): beginning from nothing"
    PASSED_OVER = "the memory passes over {file}"
    NOT_LEFT = "the table could not be left in {url}: {error}"


VOCABULARY: tuple[type[Reason], ...] = (RunEnds, NotTuning, RowRefused, NotAgreeing, Happened, Recalled)


@cache
def _by_code() -> dict[str, Reason]:
    return {one.code: one for kind in VOCABULARY for one in kind}


@cache
def _gaps(text: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in string.Formatter().parse(text) if name)


def revived(value: Any) -> Any:
    """A JSON value with its reasons as :class:`Why`; those of another release stay as they are."""
    if isinstance(value, list):
        return [revived(one) for one in value]
    if not isinstance(value, dict):
        return value
    try:
        return Why.of(value)
    except ValueError:
        return {key: revived(one) for key, one in value.items()}
