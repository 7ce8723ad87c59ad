"""All reasons that the product gives, by name. The words of each reason stand only here.

Four kinds: a run is over or has lost its table (:class:`RunEnds`), nothing is tuned (:class:`NotTuning`), a row of a
table is refused (:class:`RowRefused`), the ranks change no table (:class:`NotAgreeing`). A member is a text with gaps.
Call it with its facts to get the words. Words travel as text, between ranks and into JSON. :func:`names` finds the
reasons in a text. ``OPERATING.md`` explains each member.

Standard library only: the probe in a job imports this.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import cache
from typing import Any

#: Facts that may contain another reason.
_INNER = ("ended", "why", "error")
_NUMBERS = ("rank", "other", "seconds", "status", "tried", "n", "of", "count")


class Reason(Enum):
    """One reason: its text, with gaps for facts."""

    def __call__(self, **facts: Any) -> str:
        """Returns the words. Raises KeyError if a fact is missing."""
        return str(self.value).format(**facts)

    @property
    def title(self) -> str:
        """Its name in JSON and in the documentation, e.g. ``no-plugin``."""
        return self.name.lower().replace("_", "-")

    def facts(self, text: str) -> dict[str, str] | None:
        """Returns the facts in ``text``, or None if these are not this reason's words."""
        found = _pattern(str(self.value)).fullmatch(text)
        return found.groupdict() if found else None


class RunEnds(Reason):
    """Why a run is over, or has lost its kept table."""

    JOB_ENDED = "the job has ended"
    JOB_STATUS = "the job ended with status {status}"
    BEFORE_A_SWITCH = "{ended}, before its ranks switched tables: {why}"
    ONCE = "the verdict is reached: tuning ends here, as --once requests"
    STOPPED = "stopped by `dynamiccl stop`"
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

    NOTHING = "the job runs no all_gather or reduce_scatter that a tuner can reach: nothing to tune"
    TOO_SMALL = (
        "the all_gather and reduce_scatter that a tuner can reach take {share:.1%} of a step: "
        "too small a share to tune"
    )
    NOT_LOADED = (
        "NCCL has not loaded the plugin in any process here, so nothing can be tuned: keep the job's variables that "
        "begin with NCCL_ and DYNAMICCL_, and look for TUNER/Plugin in the output of NCCL_DEBUG=INFO"
    )
    NO_JOB_GROUP = (
        "no process here has made a group of torch.distributed, "
        "and NCCL has not loaded the plugin: nothing to tune"
    )
    NOT_LOADED_AS_TOLD = NOT_LOADED + "; rank 0 says: {why}"
    NOT_ASKED = (
        "NCCL runs all_gather or reduce_scatter but never asks the tuner (symmetric kernels, copy engines, another "
        "tuner): `dynamiccl doctor` names the variables that cause this"
    )
    NOT_TOLD = (
        "NCCL asks the tuner but tells the profiler of no collective, so none can be compared: keep the job's "
        "NCCL_PROFILER_PLUGIN, and use NCCL 2.27 or newer"
    )
    OUTSIDE = (
        "{slot} is left alone: NCCL runs {ran} there, which it does not offer to a tuner (a symmetric kernel or a copy "
        "engine)"
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
    NO_STEP_OF_RANK_0 = "the first step of rank 0"
    ELSEWHERE = "rank 0 is on another node: the tuner there tunes, and this one only serves the job"
    NO_SWITCH_YET = "the ranks do not switch tables yet: {why}"
    NOT_ON_ALL = "not all ranks switch tables at present: {why}"
    NOT_ALL_THERE = "not every rank has taken its first step, or NCCL has not loaded the tuner there"
    NEXT_STEP = "the next steps of the job"
    PAUSED = "the job has taken no step for {seconds:.0f} s: it pauses, or is about to end"
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
        "no collectives are counted yet: NCCL tells the profiler of none (NCCL_PROFILER_PLUGIN, NCCL before 2.27), or "
        "the job has run too few"
    )
    NOT_ALL_VOTED = (
        "{n} of {of} ranks of a communicator of rank {rank} take part: the others have no tuner, count nothing, or "
        "answer late"
    )
    NOT_ALIKE = "rank {rank} has {what}, rank {other} has {others}"
    NOT_SERVED = "a communicator of rank {rank} does not have the table yet that is there to stay"
    NO_COMMON_COUNT = (
        "rank {rank} has issued {count} collectives on a communicator, but the number of rank {other} differs so much "
        "that they cannot be compared"
    )
    OTHER_CALLS = (
        "the first {count} collectives of rank {rank} and rank {other} on their communicator are not the same"
    )
    NO_CLOCK = (
        "NCCL reports the collectives of rank {rank} late ({why}), so the ranks share no count: "
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


VOCABULARY: tuple[type[Reason], ...] = (RunEnds, NotTuning, RowRefused, NotAgreeing)


def names(text: str) -> list[str]:
    """Returns the names of the reasons in a text, the outermost first; [] if there is none.

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
