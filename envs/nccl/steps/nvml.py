"""NVML, opened in one place. Asking it takes milliseconds; PyTorch would take seconds to count GPUs."""

from __future__ import annotations

from typing import Any


def gpus() -> list[str]:
    """Names of the GPUs here; none without ``pynvml``, a driver, or the permission: no GPU can be used."""
    try:
        nvml = _nvml()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [nvml.nvmlDeviceGetName(handle) for handle in handles]
    except Exception:
        return []
    return [name.decode() if isinstance(name, bytes) else str(name) for name in names]


def driver() -> str:
    """The driver's version; empty without one."""
    try:
        return str(_nvml().nvmlSystemGetDriverVersion())
    except Exception:
        return ""


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
