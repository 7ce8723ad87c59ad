"""The probe in the job: sees each optimizer step end, says how long it took, and takes part in the agreement.

It hangs on PyTorch's hook after every optimizer step, and counts backward passes; steps.py says which of the optimizer
steps is a boundary. It never raises into the job, and loads the plugin when the job trains, not at import: at the first
boundary, or the first backward pass of a process group. Where several ranks have to agree it has one thread
(agreement.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from ....traces.reasons import KEEP_CONFIRMED, NotAgreeing, NotTuning
from ....traces.records import FLAG_SAMPLED, RECORD_BYTES, STATE, STEP, UNSET, AgreementState
from ..agreement.agreement import Agreement
from ..agreement.published import EMPTY, SingleProcess, TableMailbox
from ..agreement.rounds import RankState
from ..agreement.tree import takes_connections
from ..plugin.bindings import Plugin, name_where_no_path_is_taken
from ..steps import clock as step_clock
from ..steps.gauges import Gauges, Reading
from ..steps.sampling import Sampling
from ..steps.steps import Steps
from ..steps.words import say

_STATE = struct.Struct("<QBBBBBBHQQIIII80s")
_ASK_NO_TUNER = ("gloo", "mpi", "ucc")  # backends of PyTorch's own that do without NCCL


class Probe:
    """One process's probe. Called by PyTorch after every optimizer step."""

    def __init__(self, run: str) -> None:
        """``run`` is the run folder of the job; on other nodes than rank 0's it need not exist."""
        self._run = run
        self._published = TableMailbox(Path(run) / "table")
        self._steps = Steps(self._asked)
        self._torch: Any = None
        self._dist: Any = None
        self._worlds: Any = None  # what holds the default group
        self._plugin: Plugin | None = None
        self._world: Any = _nobody  # a reference to the default group: it must go when the job destroys it
        self._attempts = 0
        self._since = time.time()  # when the default group of now, or else this process, began
        self._backend = ""  # of torch.distributed
        self._agreement: Agreement | SingleProcess | None = None
        self._rank = self._step = self._last_ns = self._generation = 0
        fixed = os.environ.get("DYNAMICCL_SAMPLE_EVERY")
        self._sampling = Sampling(int(fixed) if fixed else None)
        self._sampled = False  # kernel times are being taken
        self._clock: step_clock.CudaClock | None = None
        self._gauges: Gauges | None = None
        self._reading: Reading | None = None
        self._packed = step_clock.pack_gauges(Reading())
        self._left: list[Agreement] = []  # of groups that were destroyed
        self._before: RankState | None = None  # of the last of them
        self._off = self._broken = False
        self._measures = True
        self._uneven = 0  # depth of Join contexts: in them a rank may step more often than another

    def __call__(self, optimizer: Any, *_args: Any) -> None:
        """An optimizer has stepped. Whatever goes wrong here is said once, and the probe is off from then on."""
        if self._off:
            return
        try:
            if self._steps.stepped(optimizer):
                if self._broken:
                    self._leave()
                else:
                    self._boundary()
        except Exception as error:
            self._breaks(f"{type(error).__name__}: {error}")

    def _breaks(self, why: str) -> None:
        """Something went wrong here. What the ranks agree on they must go on agreeing on until it is taken back."""
        agreement = self._agreement
        self._off = bool(self._broken) or not isinstance(agreement, Agreement) or bool(agreement.stopped)
        self._broken = True
        say(f"probe off: {why}")
        if isinstance(agreement, Agreement) and not self._off:
            agreement.leave(NotAgreeing.PROBE_OFF(rank=self._rank, error=why))

    def _leave(self) -> None:
        """A boundary on the way out: nothing but the part in the last change, to the confirmed table."""
        agreement = self._agreement
        assert isinstance(agreement, Agreement) and self._plugin is not None
        if agreement.stopped:
            self._off = True
            return
        try:
            if agreement.boundary():
                self._plugin.flip()
        finally:
            agreement.proceed()

    @property
    def held_s(self) -> float:
        """The longest that an agreement has held up the training thread."""
        now = [] if self._agreement is None else [self._agreement]
        return max((agreement.held_s for agreement in (*self._left, *now)), default=0.0)

    def _boundary(self) -> None:
        if self._torch is None:
            self._load()
        cuda = self._clock is not None or self._torch.cuda.is_initialized()
        if cuda and self._torch.cuda.is_current_stream_capturing():
            return  # a step captured into a CUDA graph: nothing runs now
        now = step_clock.now_ns()
        world = self._worlds.default_pg if self._worlds is not None else None
        agreement = self._agreement if world is not None and world is self._world() else self._attached(world)
        if self._uneven:
            agreement = None  # boundaries that not all ranks have are none of its
        if agreement is None:
            if self._plugin is not None:
                self._pass(self._plugin, cuda, now, False)
            return
        try:
            flip = agreement.boundary()
            if self._plugin is not None:
                try:
                    self._pass(self._plugin, cuda, now, flip)
                except Exception:
                    if flip:  # the others change tables at this boundary, whatever goes wrong here
                        with contextlib.suppress(ValueError):  # it may have been done before
                            self._plugin.flip()
                    raise
        finally:
            agreement.proceed()

    def watch_backward_passes(self, torch: Any) -> None:
        """Count them from now on."""
        self._steps.watch(torch)

    def hold_tables_in(self, context: type) -> None:
        """Between ``__enter__`` and ``__exit__`` of the class ``context`` (PyTorch's ``Join``) no table changes.

        All ranks enter it and leave it at the same places of the program, however often each steps in between.
        """
        enter, leave = context.__enter__, context.__exit__  # type: ignore[attr-defined]

        def held(join: Any) -> Any:
            self._uneven += 1
            self._steps.pause(True)
            return enter(join)

        def released(join: Any, *error: Any) -> Any:
            try:
                return leave(join, *error)
            finally:
                self._uneven -= 1
                self._steps.pause(self._uneven > 0)

        context.__enter__, context.__exit__ = held, released  # type: ignore[attr-defined]

    def clear_tables_before_groups(self, c10d: Any) -> None:
        """Before a default group is made in the place of another, no table is in force.

        Its ranks may not all have been in the other one; they agree anew, and count from there.
        """
        make = c10d._new_process_group_helper

        def makes(*args: Any, **more: Any) -> Any:
            try:
                # Others make groups of no named ranks with this beside the default one, on some ranks only.
                if c10d.GroupMember.WORLD is None and len(args) > 2 and len(args[2]) == 0:
                    self._clear()
            except Exception as error:
                self._breaks(f"{type(error).__name__}: {error}")
            return make(*args, **more)

        c10d._new_process_group_helper = makes

    def _clear(self) -> None:
        self._since = time.time()
        self._leave_group()
        self._steps.restart()
        if self._plugin is not None:
            self._plugin.forget_communicators()
            self._plugin.activate(EMPTY)

    def _leave_group(self) -> None:
        """The default group was destroyed."""
        if isinstance(self._agreement, Agreement):
            self._agreement.close()
            self._left.append(self._agreement)
            self._before = self._agreement.desk
        self._agreement, self._world = None, _nobody

    def _pass(self, plugin: Plugin, cuda: bool, now: int, flip: bool) -> None:
        """The step is over: its record, its successor's number and table, in one call."""
        ended = None
        if self._measures:
            try:
                ended = self._measure(plugin, cuda, now)
            except Exception as error:  # the ranks go on agreeing: others must not switch without this one
                self._measures = self._sampled = False
                say(f"steps are no longer measured: {type(error).__name__}: {error}")
        self._generation = plugin.boundary(ended, self._step, self._sampled, flip)

    def _asked(self) -> int:
        """Collectives of which NCCL has asked the tuner in this process. Called in backward passes: never raises."""
        # A forked child that has backward passes may be no rank (a data loader's worker): it waits for a step.
        if self._torch is None and not self._off and not _inherited:
            try:
                if sys.modules["torch"].distributed.is_initialized():
                    self._load()
            except Exception as error:
                self._breaks(f"{type(error).__name__}: {error}")
        return self._plugin.asked if self._plugin is not None else 0

    def _load(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._worlds = dist.distributed_c10d._world if dist.is_available() else None
        try:
            self._plugin = Plugin.load()
            self._plugin.open()
        except Exception as error:
            say(f"no plugin in this process: {error}")

    def _measure(self, plugin: Plugin, cuda: bool, now: int) -> bytes | None:
        """The STEP record of the step that has ended, None if it is not known (yet); decides on the next step."""
        if self._clock is None and cuda:
            self._clock = step_clock.CudaClock(self._torch.cuda, plugin, self._sampling)
            self._gauges = Gauges(self._torch.cuda)
            self._last_ns = 0
        if self._gauges and (reading := self._gauges.latest()) is not self._reading:
            self._reading, self._packed = reading, step_clock.pack_gauges(reading)
        ended = None
        if self._last_ns:
            flags = FLAG_SAMPLED if self._sampled else 0
            which = (self._step, self._generation, self._rank, self._sampling.every, now)
            head = (0, STEP, UNSET, UNSET, UNSET, 0, UNSET, flags, 0, 0, *which)
            if self._clock:
                self._clock.mark(step_clock.Ended(head, self._packed, self._sampled, self._generation))
            else:
                ended = step_clock.STEP_PACKED.pack(*head, now - self._last_ns) + self._packed
                self._sampling.ended(self._sampled, now - self._last_ns, self._generation)
            self._step += 1
        elif self._clock:
            self._clock.mark(None)
        self._last_ns = now
        self._sampled = self._sampling.wants(self._step)
        return ended

    def _attached(self, world: Any) -> Agreement | SingleProcess | None:
        """The agreement of the process group of now, ``world``, which is not that of the last boundary."""
        dist = self._dist
        if isinstance(self._agreement, Agreement):
            self._leave_group()
        self._world = weakref.ref(world) if world is not None else _nobody
        if world is None:
            if self._attempts == 0 and self._agreement is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
                self._agreement = SingleProcess(self._plugin, self._published, self._tell)
            return self._agreement
        self._rank = dist.get_rank()
        self._attempts += 1
        if dist.get_world_size() == 1:
            self._agreement = SingleProcess(self._plugin, self._published)
        else:
            store = _PrivateStoreConnection(dist.distributed_c10d)
            size = self._rank, dist.get_world_size()
            versions = f"NCCL {_nccl(self._torch)}"
            self._backend = dist.get_backend()
            if self._rank == 0:
                _note(Path(self._run) / "nccl", _nccl(self._torch))
            self._agreement = Agreement(
                *(*size, self._plugin, self._steps, self._published, store, versions, self._before, self._tell),
                since=self._since,
            )
        return self._agreement

    def _tell(self, state: AgreementState | None, text: str) -> None:
        """A word of the agreement: for the daemon, and for the user where it is not what he expects."""
        waits = state in (AgreementState.WAITING, AgreementState.SHUT)
        if waits and self._backend in _ASK_NO_TUNER and not (self._plugin is not None and self._plugin.tuners):
            text = NotTuning.OTHER_BACKEND(backend=self._backend)
        _note(Path(self._run) / "agreement", text)
        if state is not None and self._plugin is not None:
            head = (0, STATE, UNSET, UNSET, UNSET, 0, UNSET, 0, 0, 0, self._step, self._generation, self._rank, state)
            words = text.removesuffix(KEEP_CONFIRMED) if len(text.encode()) > 80 else text
            self._plugin.emit(_STATE.pack(*head, words.encode()[:80]) + bytes(RECORD_BYTES - _STATE.size))
        if state not in (AgreementState.WAITING, AgreementState.OPEN, AgreementState.LOSING):
            alone = "; NCCL decides alone" if state is AgreementState.SHUT else ""
            say(text + alone)

    def close(self) -> None:
        """The interpreter exits: what the GPU clock still owes is written if it is ready."""
        if isinstance(self._agreement, Agreement):
            self._agreement.close()
            self._left.append(self._agreement)
        for agreement in self._left:
            agreement.join()
        if self._gauges:
            self._gauges.close()
        if self._clock:
            self._clock.settle()

    def after_fork(self) -> None:
        """In the child of a fork: its threads, connections and ring are the parent's. It begins anew if it trains.

        What it inherited is kept: destructors would wait for threads that are not there.
        """
        if isinstance(self._agreement, Agreement):
            self._agreement.close_inherited()
        _inherited.append(vars(self).copy())
        steps = self._steps
        self.__init__(self._run)  # type: ignore[misc]
        self._steps = steps  # the engine counts for it


class _PrivateStoreConnection:
    """Connections of our own to the job's store: with the job's own we would keep its server alive after its group is
    gone, and wait where the job wants to ask.
    """

    def __init__(self, c10d: Any) -> None:
        self._c10d, self._store, self._is_first = c10d, c10d._get_default_store(), True
        base = getattr(self._store, "_underlying_non_prefix_store", self._store)
        self._host = getattr(base, "host", "") or os.environ.get("MASTER_ADDR", "")
        self._port = getattr(base, "port", 0)

    def __call__(self) -> tuple[Any, str]:
        """A new connection and the store's host; from the second on, who asks may be training."""
        if self._port:
            takes_connections(self._host, self._port, patiently=self._is_first)
        self._store, self._is_first = self._store.clone(), False
        return self._c10d.PrefixStore("dynamiccl", self._store), self._host


def _note(path: Path, text: str) -> None:
    """Leave a word for the tuner; on other nodes than its own there is nobody to read it."""
    with contextlib.suppress(OSError):
        path.write_text(text)


def _nccl(torch: Any) -> str:
    """The version of NCCL in this process."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without it
        return "-"


def _nobody() -> None:
    """A reference to nothing."""


_probe: Probe | None = None
_inherited: list[Any] = []


def install() -> None:
    """Hang the probe on PyTorch's optimizer hook; once a process."""
    global _probe
    if _probe is not None:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    name_where_no_path_is_taken(_nccl(sys.modules["torch"]))
    probe = _probe = Probe(os.environ["DYNAMICCL_RUN"])
    call: Any = None
    compiling: Any = None

    def hook(*args: Any) -> None:
        nonlocal call, compiling
        if call is None:
            # Inside a compiled step the hook runs between graphs, and the compiler must not follow it. Optimizers
            # import the compiler, so nothing is imported here that the job would not.
            dynamo = sys.modules.get("torch._dynamo")
            disable = getattr(dynamo, "disable", None)
            call = disable(probe.__call__) if disable else probe.__call__
            frames = sys.modules.get("torch._C._dynamo.eval_frame")
            compiling = getattr(frames, "get_eval_frame_callback", None)
        if compiling is not None and compiling() is None:
            probe(*args)  # no compiler is at work: the way around it costs tens of microseconds
        else:
            call(*args)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch = sys.modules["torch"]
    probe.watch_backward_passes(torch)
    join = sys.modules.get("torch.distributed.algorithms.join")  # `import torch` brings it where there is one
    if join is not None:
        probe.hold_tables_in(join.Join)
    if hasattr(c10d := sys.modules.get("torch.distributed.distributed_c10d"), "_new_process_group_helper"):
        probe.clear_tables_before_groups(c10d)
    register_optimizer_step_post_hook(hook)
    atexit.register(probe.close)
    os.register_at_fork(after_in_child=probe.after_fork)
