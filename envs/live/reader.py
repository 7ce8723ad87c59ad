"""What the rings of a running job say: its steps, the state of its ranks' agreement, whether it is alive."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...traces.assemble import Assembler, as_records
from ...traces.outside import TraceError
from ...traces.reasons import NotAgreeing, NotTuning, RunEnds, Why
from ...traces.records import COLL, COLL_DTYPE, STATE, STATE_DTYPE, STEP, STEP_DTYPE, AgreementState
from ...traces.segments import Coverage
from ..nccl.rings import Ring
from ..nccl.run_folder import LAUNCHER, SAID, STATUS, STOP, WORD
from ..nccl.shm import RunFolder
from ..nccl.site_switch import switched_off
from .job_ends import FEWEST_STEPS, Closed
from .locks import is_locked
from .obedience import CallAudit, Obedience
from .sources import Source, Sources

log = logging.getLogger("dynamiccl.live")
logging.getLogger("dynamiccl").addHandler(logging.NullHandler())
#: An attached job without a launcher is over when none of its processes has lived for so long: they may be restarted.
RESTART_S = 60.0
#: Rank 0 counts as being on another node when ranks here have stepped for so long without it.
ELSEWHERE_S = 10.0


@dataclass
class HeardOfTurns:
    """What rank 0 has said of tables; of those that take turns by generation."""

    steady: set[int] = field(default_factory=set)  # all ranks have kept their rhythm in its turns
    refused: int = -1  # the last one whose turns were refused; 0 is no table
    why: Why | None = None
    has_switched: bool = False  # one of its steps has ended under a table, which may have been the default


class Reader:
    """The rings of a run folder, read; and ``process``, where the job was started here."""

    def __init__(self, run: RunFolder, process: subprocess.Popen[bytes] | None = None) -> None:
        self.run, self.process = run, process
        self.assembler = Assembler()
        self.audit = CallAudit()
        self.obedience = Obedience()
        self.damaged: dict[str, str] = {}  # rings that cannot be read any more, with the reason
        self.lost: dict[str, int] = {}  # records that each ring dropped because nobody read them in time
        self.held_ms = 0  # most that calls of one process were held back while the ranks agreed on tables
        self.last_step = 0
        self.ranks: set[int] = set()  # of those whose steps were seen
        self.state: tuple[AgreementState, Why | None] | None = (
            None  # of the ranks' agreement, as rank 0 said it last
        )
        self.heard = HeardOfTurns()
        self.sources = Sources(was_tuned=run.table.generation() > 0)
        self.on_disk: Callable[[], Coverage] | None = None  # what of the rings the trace has that is written
        self._fresh: list[np.ndarray[Any, Any]] = []
        self._alive_at = time.monotonic()

    @property
    def records_lost(self) -> int:
        """Records that the trace lacks: those that this tuner has lost, and the earlier ones that wrote the trace."""
        lost_here = sum(self.lost.values())
        return lost_here + self.sources.lost_before

    @property
    def status(self) -> int | None:
        """Exit status (128 + n after signal n), None while it runs or where nobody has told."""
        if self.process:
            code = self.process.poll()
            return 128 - code if code is not None and code < 0 else code
        with contextlib.suppress(OSError, ValueError):
            return int((self.run.path / STATUS).read_text())
        return None

    def is_alive(self) -> bool:
        """Whether the job runs: its process or its launcher; where there is neither, a process with a ring."""
        if self.process:
            return self.process.poll() is None
        if (self.run.path / LAUNCHER).exists():
            return self.status is None and is_locked(self.run.path / LAUNCHER)
        rings = self.run.rings()
        now = time.monotonic()
        if not rings or any(ring.is_alive() for ring in rings):
            self._alive_at = now
        return now - self._alive_at < RESTART_S

    def poll(self) -> None:
        """Take everything new out of the rings; remove those of processes that others have replaced."""
        rings = self.run.rings()
        silent = [ring for ring in rings if not self._take(ring)]
        self.sources.is_joining = False
        if len(rings) > 1 and silent:
            needless = []
            for ring in filter(self._is_over, silent):
                self.assembler.end(ring.process)
                if self._is_needless(ring):
                    needless.append(ring)
            with contextlib.suppress(TraceError):  # the run folder is full: they stay
                self.run.remove(needless)

    def _take(self, ring: Ring) -> bool:
        """Take everything new out of one ring; whether there was anything."""
        if ring.name in self.damaged:
            return False
        try:
            source = self.sources.by_name.get(ring.name)
            is_first = source is None
            if source is None:  # what was announced before we came
                source = self.sources.begin(ring, self._living())
                self.assembler.add(ring.known(), ring.process)
            source.start = ring.start()
            n_gaps = len(ring.gaps)
            self.held_ms = max(self.held_ms, ring.waited_ns() // 1_000_000)
            records = ring.drain()
        except (OSError, ValueError) as error:  # its process may have scribbled over it: the others go on
            self.damaged[ring.name] = str(error)
            log.warning("ring %s cannot be read any more: %s", ring.name, error)
            return False
        if is_first and ring.gaps:
            self.state = self.state or self._last_state(ring)
        if is_first or len(ring.gaps) > n_gaps:
            self.lost[ring.name] = source.n_lost
        if len(records):
            self._read(records, source)
        return len(records) > 0

    def _last_state(self, ring: Ring) -> tuple[AgreementState, Why | None] | None:
        """As a ring's process, if it lives, left it in the run folder: its record is gone where the ring went round."""
        with contextlib.suppress(OSError, ValueError):
            life, code = map(int, (self.run.path / SAID).read_text().split())
            if life == ring.life and ring.is_alive():
                state = AgreementState(code)
                return state, _why(self._word())
        return None

    def _is_over(self, ring: Ring) -> bool:
        """Whether nothing more can come from a ring. Asked in this order: a process may write until it ends."""
        if ring.is_alive():
            return False
        return ring.name in self.damaged or ring.is_read()

    def _is_needless(self, ring: Ring) -> bool:
        """Whether a ring from which nothing more comes has nothing for a later tuner either. Who writes no trace does
        not know."""
        if self.on_disk is None:
            return False
        return ring.name in self.damaged or self.sources.is_needless(ring, self.on_disk())

    def _read(self, records: np.ndarray[Any, Any], source: Source) -> None:
        rows = as_records(records, COLL_DTYPE)
        process = source.ring.process
        self.assembler.add(rows[source.is_unwritten(rows)], process)
        if source.is_past:
            return
        is_call = rows["kind"] == COLL
        calls = rows[is_call & source.is_news(rows)]
        self.audit.add(calls, process)
        self.obedience.add(calls)
        for row in rows[rows["kind"] == STATE].view(STATE_DTYPE):
            raw = bytes(row["text"]).split(b"\0", 1)[0]
            begun = raw.decode("utf-8", "ignore")
            word = self._word()
            text = word if word.startswith(begun) else begun
            why = _why(text)
            self.state = AgreementState(int(row["code"])), why
            self._hear(self.state[0], why, int(row["generation"]))
            log.info("the ranks' agreement is %s: %s", self.state[0].name, why or "")
        steps = rows[rows["kind"] == STEP].view(STEP_DTYPE)
        if len(steps):
            source.stepped_at = source.stepped_at or time.monotonic()
            source.ranks.update(map(int, np.unique(steps["rank"])))
            self.ranks |= source.ranks
            steps = steps[steps["rank"] == 0]
        if len(steps):
            self._fresh.append(steps)
            self.last_step = int(steps["step"][-1])
            self.heard.has_switched |= bool(steps["generation"].any())

    def _hear(self, state: AgreementState, why: Why | None, generation: int) -> None:
        """Of turns."""
        if state == AgreementState.NO_TURNS:
            self.heard.refused, self.heard.why = generation, why
        elif state == AgreementState.OPEN and generation:
            self.heard.steady.add(generation)

    def _word(self) -> str:
        """The last word of the ranks' agreement: a record holds 80 bytes of it."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.run.path / WORD).read_text()
        return ""

    def new_steps(self) -> list[np.ndarray[Any, Any]]:
        """STEP records of rank 0 since the last call, in pieces."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def no_switch(self) -> Why | None:
        """Why the ranks, or some of them, change no tables at present; None where they do, or have not said."""
        waits = AgreementState.WAITING, AgreementState.LOSING
        return self.state[1] if self.state and self.state[0] in waits else None

    def losing(self) -> Why | None:
        """Why not all ranks can follow rank 0, at present or ever, as it says; None where they can, or all run the
        default."""
        state, why = self.state or (None, None)
        is_kept = state == AgreementState.CLOSED and why is not None and why.reason is NotAgreeing.TABLE_STAYS
        return why if is_kept or state == AgreementState.LOSING else None

    def waits_for(self) -> Why:
        """What stands between the job and a step under our table."""
        if not self.run.rings():
            fault = next(iter(self.run.refused.values()), "")
            return NotTuning.NO_RING(why=fault) if fault else NotTuning.NO_PROBE()
        if not self.ranks:
            return NotTuning.NO_STEP()
        if 0 not in self._ranks_now():
            newest = max((one.stepped_at for one in self._living_sources()), default=0.0)
            is_late = time.monotonic() - newest >= ELSEWHERE_S
            return NotTuning.ELSEWHERE() if is_late else NotTuning.NO_STEP_OF_RANK_0()
        why = self.no_switch()
        if not why:
            return NotTuning.NEXT_STEP()
        if self.heard.has_switched:
            return NotTuning.NOT_ON_ALL(why=why)
        return NotTuning.NO_SWITCH_YET(why=why)

    def _few_steps(self) -> bool:
        """The job took its first steps, so all ranks were there, and took few."""
        return 1 < self.last_step < FEWEST_STEPS

    def _ranks_now(self) -> set[int]:
        """Ranks whose processes live, one that has told no step by the name of its ring; all that ever stepped here,
        where no process tells its rank."""
        found = set[int]()
        for one in self._living_sources():
            found |= one.ranks or one.named
        return found or self.ranks

    def _living_sources(self) -> list[Source]:
        return [one for ring in self._living() if (one := self.sources.by_name.get(ring.name)) is not None]

    def _living(self) -> list[Ring]:
        """Rings of processes that live."""
        return [ring for ring in self.run.rings() if ring.is_alive()]

    def _has_rank_0(self) -> bool:
        """Whether rank 0 runs on this node, or no rank has told yet where it runs."""
        ranks = self._ranks_now()
        return not ranks or 0 in ranks

    def check(self) -> None:
        """Raise Closed if something ends tuning while the job goes on."""
        two_ways = None
        if self.audit.mismatches:
            # A table is withdrawn in the file that the probe of rank 0 reads. Ours is read by nobody where it is not.
            reason = RunEnds.TWO_WAYS if self._has_rank_0() else RunEnds.TWO_WAYS_STILL
            two_ways = reason(example=self.audit.example)
        if two_ways and not self.audit.is_told:
            raise Closed(two_ways)
        if (self.run.path / STOP).exists():
            raise Closed(RunEnds.STOPPED())
        if where := switched_off():
            raise Closed(RunEnds.SWITCHED_OFF(why=where))
        if two_ways:
            raise Closed(two_ways)
        state, why = self.state or (None, None)
        if state == AgreementState.SHUT:
            raise Closed(RunEnds.NEVER_SWITCHED(why=why))
        if state == AgreementState.CLOSED:
            raise Closed(RunEnds.NO_MORE_SWITCHES(why=why))

    def ended(self) -> Why:
        """That the job is over, and why nothing came of it."""
        ended = RunEnds.JOB_ENDED() if self.status is None else RunEnds.JOB_STATUS(status=self.status)
        if self.heard.has_switched:  # whatever held up the last table
            return ended
        why = self.no_switch() or (None if self.ranks else self.waits_for())
        if why == NotTuning.NOT_ALL_THERE() and self.assembler.comms and self._few_steps():
            why = NotTuning.TOO_FEW_STEPS(count=self.last_step)
        return RunEnds.BEFORE_A_SWITCH(ended=ended, why=why) if why else ended


def _why(text: str) -> Why | None:
    """The reason in a word of the ranks' agreement; one of another release as a fault of rank 0's."""
    if not text:
        return None
    return Why.unpacked(text) or NotAgreeing.FAULT(rank=0, error=text)
