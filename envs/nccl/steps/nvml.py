"""NVML, opened in one place. Asking it takes milliseconds; PyTorch would take seconds to count GPUs."""

from __future__ import annotations

from typing import Any


def nvml() -> Any:
    """The library ``pynvml``, ready to be asked; None without it, a driver, or the permission: no GPU can be used."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def gpus() -> list[str]:
    """Names of the GPUs here."""
    if (library := nvml()) is None:
        return []
    try:
        handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
        names = [library.nvmlDeviceGetName(handle) for handle in handles]
    except library.NVMLError:
        return []
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def driver() -> str:
    """The driver's version; empty without one."""
    library = nvml()
    return str(library.nvmlSystemGetDriverVersion()) if library else ""
