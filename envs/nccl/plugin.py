"""The plugin's control functions, by ctypes.

ctypes and NCCL open the same file, so both get the same library: what is activated here is what NCCL is answered by.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.records import RECORD_BYTES, STEP_DTYPE
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
        self._step.restype, self._step.argtypes = None, [ctypes.c_void_p]
        self._emit = library.dynamiccl_emit
        self._emit.restype, self._emit.argtypes = None, [ctypes.c_void_p]
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

    def step(self, record: np.ndarray[Any, Any]) -> None:
        """End a step: emit ``record`` (STEP_DTYPE, shape () or (1,)); its ``step`` is the one that ended."""
        if record.dtype != STEP_DTYPE or record.size != 1:
            raise ValueError("a step is one record of STEP_DTYPE")
        self._step(record.ctypes.data)

    def emit(self, record: np.ndarray[Any, Any]) -> None:
        """Write one 128-byte record as it is."""
        if record.nbytes != RECORD_BYTES:
            raise ValueError(f"a record has {RECORD_BYTES} bytes")
        self._emit(record.ctypes.data)

    def sample(self, on: bool) -> None:
        """Kernel times on or off for the collectives enqueued from now on."""
        self.library.dynamiccl_sample(int(on))
