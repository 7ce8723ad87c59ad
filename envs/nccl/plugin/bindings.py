"""The plugin's control functions, by ctypes.

ctypes and NCCL open the same file, so both get the same library: what is activated here is what NCCL is answered by.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Any

from ....traces.reasons import RowRefused
from ....traces.records import RECORD_BYTES, TABLE_VERSION
from .build import LIBRARY, PluginBuildError, named, plugin_path, takes_no_path


class Plugin:
    """The plugin in this process."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self.shared_object = library
        # Calls of less than a microsecond keep the interpreter's lock: who took it in between would keep it far longer.
        quick = ctypes.PyDLL(library._name, handle=library._handle)
        message = [ctypes.c_char_p, ctypes.c_size_t]
        self._activate = _typed(library.dynamiccl_activate, ctypes.c_int64, message)
        self._stage = _typed(library.dynamiccl_stage, ctypes.c_int64, message)
        self._flip = _typed(quick.dynamiccl_flip, ctypes.c_int64, [])
        self._generation = _typed(quick.dynamiccl_generation, ctypes.c_uint32, [])
        arguments = [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_int]
        self._boundary = _typed(quick.dynamiccl_boundary, ctypes.c_int64, arguments)
        self._emit = _typed(quick.dynamiccl_emit, None, [ctypes.c_char_p])
        self._sample = _typed(quick.dynamiccl_sample, None, [ctypes.c_int])
        self._tuners = _typed(quick.dynamiccl_tuners, ctypes.c_uint32, [])
        self._widest = _typed(quick.dynamiccl_widest, ctypes.c_uint32, [])
        self._asked = _typed(quick.dynamiccl_asked, ctypes.c_uint64, [])
        self._untold = _typed(quick.dynamiccl_untold, ctypes.c_int, [])
        self._abi = _typed(quick.dynamiccl_abi, ctypes.c_uint32, [])
        numbers = ctypes.POINTER(ctypes.c_uint64)
        self._counts = _typed(quick.dynamiccl_counts, ctypes.c_uint32, [numbers, numbers, ctypes.c_uint32])
        self._room = (ctypes.c_uint64 * 256)(), (ctypes.c_uint64 * 256)()  # as many as the plugin has seats
        self._old: set[int] = set()
        self._build = _typed(library.dynamiccl_build, ctypes.c_char_p, [])

    @classmethod
    def load(cls, path: Path | None = None) -> Plugin:
        """Open the plugin, building it first if needed. Raises PluginBuildError, or OSError for a bad ``path``."""
        path = path or plugin_path()
        return cls(ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOW | os.RTLD_LOCAL), Path(path))

    def open(self) -> bool:
        """Open this process's ring in the folder that DYNAMICCL_RUN names; True if there is one."""
        return bool(self.shared_object.dynamiccl_open())

    def activate(self, message: bytes) -> int:
        """Make a table message (:func:`dynamiccl.envs.nccl.shm.encode_table`) the active table; its generation.

        Raises ValueError on a message that is not a sound table; the active table then stays.
        """
        return _accepted(self._activate(message, len(message)))

    def stage(self, message: bytes) -> int:
        """Check a table message and lay it ready for :meth:`flip`; its generation. Raises ValueError as `activate`."""
        return _accepted(self._stage(message, len(message)))

    def flip(self) -> int:
        """Make the table that was staged last the active table; its generation. Raises ValueError if there is none."""
        return _accepted(self._flip())

    @property
    def generation(self) -> int:
        """Generation of the active table; 0 before the first."""
        return int(self._generation())

    def boundary(self, ended: bytes | None, next_step: int, sample: bool = False, flip: bool = False) -> int:
        """A step has ended: emit ``ended`` (one of STEP_DTYPE), if given, under the active generation.

        What comes after belongs to ``next_step``, with kernel times if ``sample``, and with ``flip`` under the table
        that was staged last. Returns the generation that is active then. Raises ValueError if no table was staged; the
        rest is done all the same.
        """
        generation: int = self._boundary(ended and _whole(ended), next_step, sample, flip)
        return generation if generation >= 0 else _accepted(generation)

    def emit(self, record: bytes) -> None:
        """Write one 128-byte record as it is."""
        self._emit(_whole(record))

    def sample(self, on: bool) -> None:
        """Kernel times on or off for the collectives enqueued from now on."""
        self._sample(on)

    @property
    def tuners(self) -> int:
        """Communicators on which NCCL has initialised our tuner in this process so far."""
        return int(self._tuners())

    @property
    def widest(self) -> int:
        """Ranks of the largest of them; 0 if there was none."""
        return int(self._widest())

    @property
    def asked(self) -> int:
        """Questions that NCCL has asked the tuner in this process so far."""
        return int(self._asked())

    @property
    def untold(self) -> bool:
        """Whether NCCL asks the tuner about all_gather or reduce_scatter and has told the profiler of no collective."""
        return bool(self._untold())

    @property
    def abi(self) -> tuple[int, int]:
        """Versions of the tuner's and the profiler's interface that NCCL uses, 0 = not loaded."""
        return divmod(int(self._abi()), 256)

    def counts(self) -> dict[int, int]:
        """Collectives that the profiler has seen, by communicator, since it was made; empty without a profiler."""
        ids, counts = self._room
        n = min(int(self._counts(ids, counts, len(ids))), len(ids))
        return {comm: count for comm, count in zip(ids[:n], counts[:n], strict=True) if comm not in self._old}

    def forget_communicators(self) -> None:
        """Count no more on those that there are: NCCL may never say that they are gone."""
        self._old |= self.counts().keys()

    def identity(self) -> str:
        """What must be equal on all ranks before they decide together: our sources, the table's format, the ABI."""
        tuner, profiler = self.abi
        return f"{self._build().decode()} table {TABLE_VERSION} tuner {tuner} profiler {profiler}"


def name_where_no_path_is_taken(release: str) -> None:
    """Before NCCL of ``release`` ("2.27.3") loads plugins: where it takes names alone, lead it to ours by such a name.

    The library is loaded now, so that its name is known in this process wherever LD_LIBRARY_PATH leads.
    """
    ours = [variable for kind in ("TUNER", "PROFILER") if named(os.environ.get(variable := f"NCCL_{kind}_PLUGIN", ""))]
    if takes_no_path(tuple(int(part) for part in release.split(".") if part.isdigit())) and ours:
        with contextlib.suppress(OSError, PluginBuildError):
            Plugin.load()
            os.environ.update(dict.fromkeys(ours, LIBRARY))


def _typed(function: Any, result: Any, arguments: list[Any]) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _accepted(generation: int) -> int:
    if generation < 0:
        raise ValueError(RowRefused.PLUGIN_REFUSES(error=os.strerror(-generation)))
    return generation


def _whole(record: bytes) -> bytes:
    if len(record) != RECORD_BYTES:
        raise ValueError(f"a record has {RECORD_BYTES} bytes, not {len(record)}")
    return record
