"""The probe in the job: sees each optimizer step end, says how long it took, and starts its rank's agreement.

It hangs on PyTorch's hook after every optimizer step; steps.py says which count. It never raises into the job. It loads
the plugin at the first step, or a process group's first backward pass, not at import.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import struct
import sys
import weakref
from pathlib import Path
from typing import Any

from ....traces.here import machine
from ....traces.outside import TraceError, atomically
from ....traces.reasons import NotAgreeing, NotTuning, Why
from ....traces.records import RECORD_BYTES, STATE, UNSET, AgreementState
from .. import life
from ..agreement.agreement import Agreement
from ..agreement.mailbox import TableMailbox
from ..agreement.sources import DIGEST
from ..plugin.bindings import Plugin, name_where_no_path_is_taken, take_slots_back
from ..run_folder import NCCL, SAID, WORD
from ..steps import clock as step_clock
from ..steps.steps import Steps
from ..steps.words import say
from .connection import StoreConnections

_STATE = struct.Struct("<QBBBBBBHQQIIII80s")
_ASK_NO_TUNER = ("gloo", "mpi", "ucc")  # backends of PyTorch's own that do without NCCL


class Probe:
    """One process's probe. Called by PyTorch after every optimizer step."""

    def __init__(self, run: str) -> None:
        """``run`` is the run folder of the job; on other nodes than rank 0's it need not exist."""
        self._run = Path(run)
        self._steps = Steps(self._asked)
        self._torch: Any = None
        self._plugin: Plugin | None = None
        self._recorder: step_clock.StepRecorder | None = None
        self._world: Any = _nobody  # a reference to the default group: it must go when the job destroys it
        self._rank = _told_rank()  # until there is a group
        self._backend = ""  # of torch.distributed
        self._agreement: Agreement | None = None
        self._left: list[Agreement] = []  # of groups that were destroyed
        self._off = self._without_group = False

    def __call__(self, optimizer: Any, *_args: Any) -> None:
        """An optimizer has stepped. Whatever goes wrong here is said once, and the probe is off from then on."""
        if self._off:
            return
        try:
            if self._steps.stepped(optimizer):
                self._step_ended(optimizer)
        except Exception as error:
            self._breaks(error)

    def _breaks(self, error: Exception) -> None:
        """Steps are seen no more. The agreement goes on: it needs none."""
        self._off = True
        say(f"probe off: {type(error).__name__}: {error}")

    def _step_ended(self, optimizer: Any) -> None:
        world = _default_group()
        if self._torch is None and not self._begins(world):
            return
        cuda = self._torch.cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            return  # a step captured into a CUDA graph: nothing runs now
        now = step_clock.now_ns()
        if world is not self._world():
            self._attach(world)
        elif world is None and not self._without_group and self._plugin is not None and self._plugin.tuners():
            self._without_group = True
            self._tell(AgreementState.SHUT, NotAgreeing.NO_GROUP())
        self._record(now, optimizer, world is None and self._is_beside())

    def _record(self, now: int, optimizer: Any, is_beside: bool) -> None:
        if self._recorder is not None and not is_beside:
            self._recorder.ended(self._rank, now, optimizer)

    def _begins(self, world: Any) -> bool:
        """The first step. False in the child of a fork that trains with its parent's group: it is no rank."""
        if world is not None and world is self._world():
            return False
        self._load()
        return True

    def _is_beside(self) -> bool:
        """Of a process without a group: whether it may be another program than the job, whose rank 0 is here."""
        if self._plugin is not None and self._plugin.tuners():
            return False
        is_of_job = self._agreement is not None or bool(self._left)
        return not is_of_job and (self._run / NCCL).exists()

    def _asked(self) -> int:
        """Collectives of which NCCL has asked the tuner in this process. Called in backward passes: never raises."""
        # A forked child that has backward passes may be no rank (a data loader's worker): it waits for a step.
        if self._torch is None and not self._off and not _inherited:
            try:
                if sys.modules["torch"].distributed.is_initialized():
                    self._load()
            except Exception as error:
                self._breaks(error)
        return self._plugin.asked() if self._plugin is not None else 0

    def _load(self) -> None:
        import torch

        self._torch = torch
        try:
            self._plugin = Plugin.load()
            self._plugin.open()
            self._recorder = step_clock.StepRecorder(torch, self._plugin)
        except Exception as error:
            say(f"no plugin in this process: {error}")

    def _attach(self, world: Any) -> None:
        """The default process group is another than at the last step: take part in the agreement of its ranks."""
        if self._agreement is not None:
            self._agreement.close()
            self._left = [*(left for left in self._left if left.is_alive()), self._agreement]
            self._agreement = None
        self._world = weakref.ref(world) if world is not None else _nobody
        if world is None:
            return
        dist = self._torch.distributed
        self._rank, self._backend = dist.get_rank(), dist.get_backend()
        release = _nccl(self._torch)
        if self._rank == 0:
            _note(self._run / NCCL, release)
        if self._plugin is None:
            self._tell(AgreementState.SHUT, NotAgreeing.NO_PLUGIN(rank=self._rank))
            return
        _is_a_rank(self._run)
        store = StoreConnections(dist.distributed_c10d)
        size, published = (self._rank, dist.get_world_size()), TableMailbox(self._run / "table")
        # The machine counts too: what the plugin closes to tables depends on it.
        alike = f"code {DIGEST} NCCL {release} on {machine() or 'a machine not known'}"
        self._agreement = Agreement(*size, self._plugin, self._steps, published, store, alike, self._tell)

    def _tell(self, state: AgreementState | None, why: Why | None, generation: int = 0) -> None:
        """A word of the agreement: for the daemon, and for the user where it is not what he expects."""
        if state is None and _default_group() is None:
            return  # the job has left its group: nothing is wrong with this rank
        is_no_switch = state in (AgreementState.WAITING, AgreementState.LOSING, AgreementState.SHUT)
        if (
            is_no_switch
            and self._backend in _ASK_NO_TUNER
            and not (self._plugin is not None and self._plugin.tuners())
        ):
            why = NotTuning.OTHER_BACKEND(backend=self._backend)
        packed = _packed(why)
        _note(self._run / WORD, packed)
        if state is not None and self._plugin is not None:
            # A tuner may come when the ring has gone round.
            _note(self._run / SAID, f"{life.own()} {int(state)}")
            step = self._recorder.step if self._recorder else 0
            head = (0, STATE, UNSET, UNSET, UNSET, 0, UNSET, 0, 0, 0, step, generation, self._rank, state)
            self._plugin.emit(_STATE.pack(*head, packed.encode()[:80]) + bytes(RECORD_BYTES - _STATE.size))
        if state in (None, AgreementState.SHUT, AgreementState.CLOSED):
            say(str(why) + ("; NCCL decides alone" if state is AgreementState.SHUT else ""))

    def close(self) -> None:
        """The interpreter exits."""
        agreements = [*self._left, self._agreement] if self._agreement else self._left
        for agreement in agreements:
            agreement.close()
        for agreement in agreements:
            agreement.join()
        if self._recorder:
            self._recorder.close()

    def after_fork(self) -> None:
        """In the child of a fork: its threads, connections and ring are the parent's. It begins anew if it trains.

        What it inherited is kept: destructors would wait for threads that are not there.
        """
        _inherited.append(vars(self).copy())
        steps = self._steps
        self.__init__(str(self._run))  # type: ignore[misc]
        self._steps = steps  # the engine counts for it
        if (world := _default_group()) is not None:
            self._world = weakref.ref(
                world
            )  # the parent is that group's rank: only a group made here is this one's


def _packed(why: Why | None) -> str:
    return why.packed() if why else ""


def _note(path: Path, text: str) -> None:
    """Leave a word for the tuner, which never finds it half written; on other nodes than its own nobody reads it."""
    with contextlib.suppress(TraceError):
        atomically(path, lambda draft: draft.write_text(text))


def _nccl(torch: Any) -> str:
    """The version of the NCCL that is loaded in this process, which may not be what PyTorch was built with."""
    with contextlib.suppress(Exception):
        library, number = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD), ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without it
        return "-"


def _default_group() -> Any:
    dist = sys.modules["torch"].distributed
    return dist.distributed_c10d._world.default_pg if dist.is_available() else None


def _told_rank() -> int:
    """The rank that the launcher has given this process, 0 where it gave none."""
    told = os.environ.get("RANK", "")
    return int(told) if told.isascii() and told.isdigit() else 0


def _is_a_rank(run: Path | str) -> None:
    """What this process starts from now on is not of its job, whatever it inherits: see dynamiccl_autoload."""
    os.environ["DYNAMICCL_WITHIN"] = f"{os.getpid()}:{run}"


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

    life.announce()
    for variable, value in take_slots_back().items():
        if os.environ.get("RANK", "0") == "0":
            say(str(NotTuning.SLOT_TAKEN(variable=variable, value=value)))
    name_where_no_path_is_taken(_nccl(sys.modules["torch"]))
    probe = _probe = Probe(os.environ["DYNAMICCL_RUN"])
    if (
        "RANK" in os.environ and "LOCAL_RANK" in os.environ
    ):  # a scheduler may give a node's launcher a RANK alone
        _is_a_rank(os.environ["DYNAMICCL_RUN"])
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
    probe._steps.watch(torch)
    register_optimizer_step_post_hook(hook)
    atexit.register(probe.close)
    os.register_at_fork(after_in_child=probe.after_fork)
