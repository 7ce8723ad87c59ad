"""Every reason that is given for what is over or was not done, by name: the one place where its words stand.

Four questions: why a run is over or its table gone (:class:`RunEnds`), why nothing is tuned (:class:`NotTuning`), why a
row of a table is refused (:class:`RowRefused`), why the ranks change no table (:class:`NotAgreeing`). A member is a
text with gaps; called with its facts it gives the words. Words travel as text, between ranks and into JSON:
:func:`names` tells whose words a text has. ``OPERATING.md`` has a line on each member.

Standard library only: the probe in a job imports this.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Any

#: Facts that are a reason themselves, or hold one.
_INNER = ("ended", "why", "error")
_NUMBERS = ("rank", "other", "seconds", "status", "tried", "n", "of", "count")


class Reason(Enum):
    """One reason: its text, with gaps."""

    def __call__(self, **facts: Any) -> str:
        """The words. Raises KeyError where a fact is missing."""
        return str(self.value).format(**facts)

    @property
    def title(self) -> str:
        """Its name, as programs and the documentation write it: ``no-plugin``."""
        return self.name.lower().replace("_", "-")

    def facts(self, text: str) -> dict[str, str] | None:
        """The facts in ``text`` if these are this reason's words, as text; None if they are not."""
        found = _pattern(str(self.value)).fullmatch(text)
        return found.groupdict() if found else None


class RunEnds(Reason):
    """Why a run is over, or the table that it had confirmed is no more in force."""

    JOB_ENDED = "the job has ended"
    JOB_STATUS = "the job ended with status {status}"
    BEFORE_A_SWITCH = "{ended}, before its ranks switched tables: {why}"
    ONCE = "the verdict is there: the job is left alone, as --once asks"
    STOPPED = "stopped by `dynamiccl stop`"
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"
    NEVER_SWITCHED = "the ranks never switched tables: {why}"
    NO_MORE_SWITCHES = "the ranks switch no more tables: {why}"
    TWO_WAYS = "ranks ran one collective two ways ({example}): the table was withdrawn"
    SLOWER = "it was no faster than NCCL's own choice any more"
    NO_GAIN = "no gain beyond the noise: NCCL's own choice stays in force"
    CANNOT_WRITE = "what was seen cannot be written: {error}"


class NotTuning(Reason):
    """Why nothing is tuned: for good, or what is waited for."""

    NOTHING = "the job runs no all_gather or reduce_scatter that a tuner can reach: nothing to tune"
    TOO_SMALL = (
        "the all_gather and reduce_scatter that a tuner can reach take {share:.1%} of a step: "
        "too small a share to tune"
    )
    NOT_LOADED = (
        "NCCL has not loaded the plugin in any process here, so there is nothing to tune: let the job keep the "
        "variables that begin with NCCL_ and DYNAMICCL_, and look at NCCL_DEBUG=INFO for TUNER/Plugin"
    )
    NOT_LOADED_AS_TOLD = NOT_LOADED + "; rank 0 says: {why}"
    NOT_ASKED = (
        "NCCL runs all_gather or reduce_scatter but never asks the tuner (symmetric kernels, copy engines, another "
        "tuner): `dynamiccl doctor` names the variables that do that"
    )
    NOT_TOLD = (
        "NCCL asks the tuner and tells the profiler of no collective, so none can be compared: let the job keep "
        "NCCL_PROFILER_PLUGIN, and use NCCL 2.27 or newer"
    )
    OUTSIDE = (
        "{slot} is left alone: NCCL runs {ran} there, which is not in what it offers a tuner (a symmetric kernel or a "
        "copy engine)"
    )
    SLOT_TAKEN = (
        "{variable}={value} was set after our environment (by a Slurm TaskProlog or a SPANK plugin, say): NCCL loads "
        "one such plugin only, and ours takes the place back"
    )
    OTHER_BACKEND = "torch.distributed runs on {backend} here; only NCCL asks a tuner"
    NO_PROBE = "no process of the job has loaded the probe yet"
    NO_STEP = "the probe is loaded; no optimizer step yet"
    NO_STEP_OF_RANK_0 = "the first step of rank 0"
    ELSEWHERE = "rank 0 is on another node: the tuner there tunes; here the job is only seen to"
    NO_SWITCH_YET = "the ranks do not switch tables yet: {why}"
    NOT_ALL_THERE = "not every rank has taken its first step, or NCCL has not loaded the tuner there"
    NEXT_STEP = "the next steps of the job"
    PAUSED = "the job has taken no step for {seconds:.0f} s: it pauses, or is about to end"
    TOO_FEW_STEPS = "it took {count} steps, too few to try a table"


class RowRefused(Reason):
    """Why a row of a table, or a config of a slot, is not in force."""

    NOT_TRIED = "left to NCCL's {own}: no other config was tried"
    NOT_BETTER = "left to NCCL's {own}: {tried} other configs tried, none was faster for sure"
    NOT_OBEYED = "not obeyed: NCCL ran {ran} where the table says {decision} for {slot}"
    TOO_SLOW = "not tried again: {decision} for {slot} made steps over {times:g} times as long"
    PLUGIN_REFUSES = "the plugin refuses the table: {error}"


class NotAgreeing(Reason):
    """Why the ranks change no table, or not on all communicators."""

    NO_GROUP = "NCCL runs here, and no process group of torch.distributed through which its ranks could agree"
    NO_PLUGIN = "rank {rank} has no plugin"
    NOTHING_COUNTED = (
        "no collectives are counted yet: NCCL tells the profiler of none (NCCL_PROFILER_PLUGIN, NCCL before 2.27), or "
        "the job has run too few"
    )
    NOT_ALL_VOTED = (
        "{n} of {of} ranks of a communicator of rank {rank} take part: the others have no tuner, count nothing, or "
        "answer late"
    )
    NOT_ALIKE = "rank {rank} has {what}, rank {other} has {others}"
    NO_COMMON_COUNT = (
        "rank {rank} has issued {count} collectives on a communicator, and rank {other} so many more or fewer that "
        "they cannot be compared"
    )
    OTHER_CALLS = (
        "the first {count} collectives of rank {rank} and rank {other} on their communicator are not the same"
    )
    LATE_STORE = "a rank came to its limit before the job's store had answered"
    NO_STORE = "rank {rank}: the job's store is gone ({error}); what was to change stays as it is"
    NOT_CONNECTED = "no table changes until the job's store answers ({why})"
    DESTROYED = "the process group was destroyed"
    FAULT = "rank {rank}: {error}"


VOCABULARY: tuple[type[Reason], ...] = (RunEnds, NotTuning, RowRefused, NotAgreeing)


def names(text: str) -> list[str]:
    """Titles of the reasons that a text gives, the outermost first; [] where its words are nobody's.

    >>> names(RunEnds.NEVER_SWITCHED(why=NotAgreeing.NO_PLUGIN(rank=3)))
    ['never-switched', 'no-plugin']
    """
    found = [one for kind in VOCABULARY for one in kind if one.facts(text) is not None]
    if not found:
        return []
    one = max(
        found, key=lambda one: len(re.sub(r"\{.*?\}", "", str(one.value)))
    )  # most of the text is its own
    facts = one.facts(text) or {}
    return [one.title, *(title for key in _INNER if key in facts for title in names(facts[key]))]


@cache
def _pattern(template: str) -> re.Pattern[str]:
    def gap(found: re.Match[str]) -> str:
        return rf"(?P<{found[1]}>{'[0-9]+' if found[1] in _NUMBERS else '.*?'})"

    return re.compile(re.sub(r"\\\{(\w+).*?\\\}", gap, re.escape(template)), re.DOTALL)
