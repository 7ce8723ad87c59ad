"""The plugin's control functions, by ctypes.

ctypes and NCCL open the same file, so both get the same library: what is activated here is what NCCL is answered by.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

from ....traces.reasons import NotAgreeing, RowRefused, Why
from ....traces.records import TABLE_VERSION
from .build import (
    ALL_REDUCE_VARIABLE,
    LIBRARY,
    PluginBuildError,
    named,
    names_none,
    plugin_path,
    takes_no_path,
)

#: Of an emulated job: processes of a communicator, by id. Each of them stands for several ranks of the cluster.
PROCESSES: dict[int, int] = {}


class Plan(NamedTuple):
    """What a communicator will answer on one rank from its next call on, see struct dccl_comm_view of plugin.h.

    The rows that stay hold from ``since`` on, but for the trial. What holds before is not told.
    """

    made: int = 0  # collectives so far
    stays: int = 0  # hash of the rows that stay, see `dynamiccl.envs.nccl.shm.rows_hash`; 0: NCCL decides
    since: int = 0
    trial: int = 0  # hash of what is tried; 0: there is no trial
    first: int = 0  # the trial holds at collectives from `first` until `last`; it may be over
    last: int = 0
    gave_up: bool = False  # it has waited at a limit for too long: it takes no switch any more

    @property
    def tries(self) -> bool:
        """Whether a trial is not over."""
        return self.trial > 0 and self.made < self.last


class CommView(NamedTuple):
    """A communicator as its rank knows it."""

    n_ranks: int  # its processes
    n_nodes: int
    made: int  # collectives so far
    marks: dict[int, int]  # hash of the first so many of them
    no_clock: str = ""  # why the number of its collectives is not the same on all ranks
    a_step: int = 0  # collectives of a step; 0: the last steps differed
    offset: int = (
        0  # collectives at the end of the last step, less `a_step` for each step since the ranks joined
    )
    steps: int = 0  # since the ranks joined
    plan: Plan = Plan()


class StepEnd(NamedTuple):
    """A step that has ended, see struct dccl_step_end of plugin.h."""

    generation: int  # of the table that answered in it; records.MIXED: several
    trial: int  # generation of the trial in which it began, 0: in none
    is_whole: (
        bool  # it is one table's turn or a part of it; of agreed steps: all made just one step's collectives
    )
    block: int  # of turns of agreed steps, in which the next step is; 0: there are none


class Span(NamedTuple):
    """The collectives of a communicator at which a table holds, see struct dccl_span of plugin.h."""

    since: int
    until: int = 0  # 0: it is there to stay
    length: int = 0  # collectives of a turn; 0: it holds throughout
    a_step: int = 0  # of a step, where a turn is so many whole steps; 0: no steps are agreed
    one_of: int = 0  # it holds in one turn of so many
    swap: int = 0  # of two turns the other one begins


class _Span(ctypes.Structure):
    """struct dccl_span."""

    _fields_ = (
        ("since", ctypes.c_uint64),
        ("until", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("a_step", ctypes.c_uint64),
        ("one_of", ctypes.c_uint32),
        ("swap", ctypes.c_uint32),
    )


class _StepEnd(ctypes.Structure):
    """struct dccl_step_end."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in StepEnd._fields)


class _View(ctypes.Structure):
    """struct dccl_comm_view."""

    _fields_ = (
        ("comm_id", ctypes.c_uint64),
        ("n_ranks", ctypes.c_uint32),
        ("n_nodes", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
        ("a_step", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("steps", ctypes.c_uint64),
        ("clock", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        ("stays", ctypes.c_uint64),
        ("since", ctypes.c_uint64),
        ("trial", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("marks", ctypes.c_uint64 * 2 * 24),
    )


_GAVE_UP = 1
#: Why a count is no clock, by the number that plugin.h gives it.
_NO_CLOCK = ("", "its NCCL is older than 2.28.3")

_MESSAGE = [ctypes.c_char_p, ctypes.c_size_t]
#: Functions of the library: what each returns and takes.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "abi": (ctypes.c_uint32, []),
    "activate": (ctypes.c_int64, _MESSAGE),
    "asked": (ctypes.c_uint64, []),
    "boundary": (None, [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int]),
    "build": (ctypes.c_char_p, []),
    "comms": (ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_uint32]),
    "emit": (None, [ctypes.c_char_p]),
    "ended": (None, [ctypes.POINTER(_StepEnd)]),
    "hold": (None, [ctypes.c_uint32]),
    "join": (ctypes.c_uint32, []),
    "lift": (None, [ctypes.c_uint32] * 2),
    "limit": (ctypes.c_int64, [ctypes.c_uint32, *[ctypes.c_uint64] * 2]),
    "open": (ctypes.c_bool, []),
    "part": (None, [ctypes.c_uint32]),
    "sample": (None, [ctypes.c_int]),
    "stage": (ctypes.c_int64, [ctypes.c_uint32, *_MESSAGE]),
    "started": (None, [ctypes.c_uint64]),
    "switch": (ctypes.c_int, [ctypes.c_uint32, ctypes.c_uint64, ctypes.POINTER(_Span)]),
    "tuners": (ctypes.c_uint32, []),
    "waiting": (ctypes.c_uint32, []),
}
#: The rest take less than a microsecond and keep the interpreter's lock: who took it in between would keep it far
#: longer.
_SLOW = ("activate", "stage", "open", "build")


class Refused(ValueError):
    """The plugin does not take a table."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


class NoRoom(Refused):
    """No buffer is left for another table. The message says so.

    A destroyed communicator holds none. One that rests holds two: its table that stays, and that of a trial that it has
    not ended. It holds more only if each of its last limits lay farther ahead than the one before, and eight at most.
    """


class Plugin:
    """The plugin in this process. ``plugin.waiting()`` is ``dynamiccl_waiting()`` of plugin.h; methods are the others.

    ``owner``: the number of an agreement, from ``join()``.
    """

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self.shared_object = library
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        self._call: dict[str, Any] = {}
        for name, (result, arguments) in _FUNCTIONS.items():
            function = self._call[name] = getattr(library if name in _SLOW else quick, f"dynamiccl_{name}")
            function.restype, function.argtypes = result, arguments
        self._views = (_View * 256)()  # as many as the plugin has places for communicators
        self._end = _StepEnd()

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise AttributeError(name)
        return self._call[name]

    @classmethod
    def load(cls, path: Path | None = None) -> Plugin:
        """Open the plugin, building it first if needed. Raises PluginBuildError, or OSError for a bad ``path``."""
        path = path or plugin_path()
        return cls(ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOW | os.RTLD_LOCAL), Path(path))

    def activate(self, message: bytes) -> int:
        """Make a table message (:func:`dynamiccl.envs.nccl.shm.encode_table`) the one that holds where nothing was
        agreed; its generation.

        Raises Refused on a message that is not a sound table; the table before then stays.
        """
        return _accepted(self._call["activate"](message, len(message)))

    def stage(self, owner: int, message: bytes) -> int:
        """Check a table message and lay it ready for the switches of ``owner``; its generation.

        Raises Refused; :class:`NoRoom` where all buffers hold tables that may still answer.
        """
        generation = int(self._call["stage"](owner, message, len(message)))
        if generation == -errno.ENOSPC:
            raise NoRoom(NotAgreeing.NO_ROOM(n=len(self.comms())))
        return _accepted(generation)

    def comms(self) -> dict[int, CommView]:
        """The communicators whose collectives are counted, by id; none without a profiler."""
        n = min(int(self._call["comms"](self._views, len(self._views))), len(self._views))
        found = {}
        for view in self._views[:n]:
            marks = {at: mark for at, mark in view.marks if at}  # without those that are not there yet
            n_ranks = PROCESSES.get(view.comm_id, view.n_ranks)
            why = _NO_CLOCK[view.clock]
            rhythm = view.a_step, view.offset, view.steps
            trial = view.trial, view.first, view.last
            plan = Plan(view.count, view.stays, view.since, *trial, bool(view.state & _GAVE_UP))
            found[view.comm_id] = CommView(n_ranks, view.n_nodes, view.count, marks, why, *rhythm, plan)
        return found

    def ended(self) -> StepEnd:
        """A step has ended. Call it once a step: steps are counted by it."""
        end = self._end
        self._call["ended"](end)
        return StepEnd(end.generation, end.trial, bool(end.is_whole), end.block)

    def limit(self, owner: int, comm: int, distance: int) -> int:
        """Answer no question on a communicator after so many more collectives; the limit that was set.

        0 where none was: the communicator is gone, its last switches are all ahead of it, or another agreement has set
        one.
        """
        return max(int(self._call["limit"](owner, comm, distance)), 0)

    def switch(self, owner: int, comm: int, *span: int) -> None:
        """The staged table holds at the collectives of ``Span(*span)``. Nothing where the communicator is gone: its
        other ranks have made all their calls before them, as this one has. Raises OSError.
        """
        error = -int(self._call["switch"](owner, comm, _Span(*span)))
        if error not in (0, errno.ENOENT):
            raise OSError(error, os.strerror(error))

    @property
    def abi(self) -> tuple[int, int]:
        """Versions of the tuner's and the profiler's interface that NCCL uses, 0 = not loaded."""
        return divmod(int(self._call["abi"]()), 256)

    def identity(self) -> str:
        """What must be equal on all ranks before they decide together: our sources, the table's format, the ABI."""
        build, (tuner, profiler) = self._call["build"]().decode(), self.abi
        pat = " pat" if os.environ.get("DYNAMICCL_TRY_PAT") == "1" else ""
        way = os.environ.get(ALL_REDUCE_VARIABLE)
        sums = f" all_reduce {way}" if way else ""
        return f"{build} table {TABLE_VERSION} tuner {tuner} profiler {profiler}{pat}{sums}"


def take_slots_back() -> dict[str, str]:
    """Before NCCL loads plugins: ours again where another was named after the launcher had named ours.

    Operators of clusters do that for every job: a Slurm TaskProlog or a SPANK plugin names NVIDIA's Inspector. NCCL
    loads one tuner and one profiler; a tuner of theirs is asked before ours. Returns what was named, by variable.
    """
    ours, theirs = os.environ.get("DYNAMICCL_PLUGIN", ""), dict[str, str]()
    for kind in ("TUNER", "PROFILER"):
        variable = f"NCCL_{kind}_PLUGIN"
        value = os.environ.get(variable, "")
        if ours and value and not names_none(value) and not named(value):
            theirs[variable], os.environ[variable] = value, ours
            if kind == "TUNER":
                os.environ["DYNAMICCL_NEXT_TUNER"] = value
    return theirs


def name_where_no_path_is_taken(release: str) -> None:
    """Before NCCL of ``release`` ("2.27.3") loads plugins: where it takes names alone, lead it to ours by such a name.

    The library is loaded now, so that its name is known in this process wherever LD_LIBRARY_PATH leads.
    """
    ours = [
        variable
        for kind in ("TUNER", "PROFILER")
        if named(os.environ.get(variable := f"NCCL_{kind}_PLUGIN", ""))
    ]
    if takes_no_path(tuple(int(part) for part in release.split(".") if part.isdigit())) and ours:
        with contextlib.suppress(OSError, PluginBuildError):
            Plugin.load()
            os.environ.update(dict.fromkeys(ours, LIBRARY))


def _accepted(generation: int) -> int:
    if generation < 0:
        raise Refused(RowRefused.PLUGIN_REFUSES(error=os.strerror(-generation)))
    return generation
