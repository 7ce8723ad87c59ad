"""The plugin's control functions, by ctypes.

ctypes and NCCL open the same file, so both get the same library: what is activated here is what NCCL is answered by.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from ...traces.records import RECORD_BYTES
from .build import plugin_path


class Plugin:
    """The plugin in this process."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self.library = library
        self._activate = library.dynamiccl_activate
        self._activate.restype, self._activate.argtypes = ctypes.c_int64, [ctypes.c_char_p, ctypes.c_size_t]
        self._generation = library.dynamiccl_generation
        self._generation.restype, self._generation.argtypes = ctypes.c_uint32, []
        self._step = library.dynamiccl_step
        self._step.restype, self._step.argtypes = None, [ctypes.c_char_p]
        self._emit = library.dynamiccl_emit
        self._emit.restype, self._emit.argtypes = None, [ctypes.c_char_p]
        library.dynamiccl_begin_step.restype, library.dynamiccl_begin_step.argtypes = None, [ctypes.c_uint32]
        library.dynamiccl_sample.restype, library.dynamiccl_sample.argtypes = None, [ctypes.c_int]

    @classmethod
    def load(cls, path: Path | None = None) -> Plugin:
        """Open the plugin, building it first if needed. Raises PluginBuildError, or OSError for a bad ``path``."""
        path = path or plugin_path()
        return cls(ctypes.CDLL(os.fspath(path), mode=os.RTLD_NOW | os.RTLD_LOCAL), Path(path))

    def open(self) -> bool:
        """Open this process's ring in the folder that DYNAMICCL_RUN names; True if there is one."""
        return bool(self.library.dynamiccl_open())

    def activate(self, message: bytes) -> int:
        """Make a table message (:func:`dynamiccl.envs.nccl.shm.encode_table`) the active table; its generation.

        Raises ValueError on a message that is not a sound table; the active table then stays.
        """
        generation = int(self._activate(message, len(message)))
        if generation < 0:
            raise ValueError(f"the plugin refuses the table: {os.strerror(-generation)}")
        return generation

    @property
    def generation(self) -> int:
        """Generation of the active table; 0 before the first."""
        return int(self._generation())

    def step(self, record: bytes) -> None:
        """End a step: emit ``record`` (one of STEP_DTYPE) under the active generation; its ``step`` has ended."""
        self._step(_whole(record))

    def begin_step(self, step: int) -> None:
        """Later records belong to ``step``; for a caller that emits its STEP records late."""
        self.library.dynamiccl_begin_step(step)

    def emit(self, record: bytes) -> None:
        """Write one 128-byte record as it is."""
        self._emit(_whole(record))

    def sample(self, on: bool) -> None:
        """Kernel times on or off for the collectives enqueued from now on."""
        self.library.dynamiccl_sample(int(on))


def _whole(record: bytes) -> bytes:
    if len(record) != RECORD_BYTES:
        raise ValueError(f"a record has {RECORD_BYTES} bytes, not {len(record)}")
    return record
