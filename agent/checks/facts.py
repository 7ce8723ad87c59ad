"""What is known of a machine and a job before it starts: what the traps are asked about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...envs.nccl.variables import Narrowing, narrowing
from .interpreter import Interpreter

if TYPE_CHECKING:  # numpy with it, which a job that is to be started does not wait for
    from ...traces.records import Table

#: The release that a cure names, and the packages that have it. Tried: PyTorch 2.8.0 for CUDA 12.8, which comes with
#: 2.27.3, loads it; pip says that the two are not compatible, and installs it.
_TUNABLE, _TUNABLE_WHEELS = "2.28.9", ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Facts:
    """What is known of the machine and the job. Everything may be unknown (None)."""

    env: Mapping[str, str] = field(default_factory=dict)  # NCCL's configuration files are merged into it
    nccl: tuple[int, int, int] | None = None
    n_gpus: int | None = None
    ranks_per_node: int | None = None
    shm_free: int | None = None  # bytes
    has_compiler: bool = True  # or what it would compile is there
    table: Table | None = None
    machine: str | None = None  # x86_64, aarch64
    copies: tuple[str, ...] = ()  # every NCCL in sight, in words
    switched_off: str | None = None  # what turns the tuner off here, in words
    python: Interpreter = field(default_factory=Interpreter)  # the command's, as far as it is known
    plugin_fault: str = ""  # why the plugin that is there cannot be loaded, in the loader's words
    wheel: str = ""  # the package of the NCCL that PyTorch loads
    all_reduce: str = ""  # the job's option

    @property
    def newer(self) -> str:
        """How the job gets an NCCL that can be tuned, which fits the installed PyTorch."""
        if self.machine == "aarch64":  # older ones are refused there, see the trap "proxy slots"
            return "use NCCL 2.29.3 or newer"
        if self.wheel in _TUNABLE_WHEELS:
            return f"pip install {self.wheel}=={_TUNABLE} (PyTorch loads it in place of its own)"
        return "use NCCL 2.28.3 or newer, which PyTorch 2.11 and newer bring"

    @property
    def narrowing(self) -> Narrowing:
        """What NCCL_ALGO and NCCL_PROTO take out of NCCL's offer."""
        return narrowing(self.env)

    def release(self, first: tuple[int, ...], below: tuple[int, ...] = (99,)) -> bool:
        """Whether NCCL is known to be of the release ``first`` or newer, and older than ``below``."""
        return self.nccl is not None and first <= self.nccl < below
