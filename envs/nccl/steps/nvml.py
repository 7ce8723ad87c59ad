"""NVML, opened in one place. Asking it takes milliseconds; PyTorch would take seconds to count GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine as NVML names it."""

    index: int
    name: str
    uuid: str


def gpus() -> list[str]:
    """Names of the GPUs here; none without ``pynvml``, a driver, or the permission: no GPU can be used."""
    return [gpu.name for gpu in found_gpus()]


def visible_gpus() -> list[Gpu]:
    """The GPUs that a process with this environment can use, in the order of CUDA_VISIBLE_DEVICES."""
    return visible(found_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(found: list[Gpu], named: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by index or by the beginning of a UUID.

    As CUDA reads it: the first name that fits no GPU ends the list. ``None``: the variable is not set.
    """
    if named is None:
        return found
    left = []
    for word in named.split(","):
        fits = [gpu for gpu in found if _is_named(gpu, word.strip())]
        if not fits:
            break
        left.append(fits[0])
    return left


def _is_named(gpu: Gpu, word: str) -> bool:
    if word.isdigit():
        return gpu.index == int(word)
    return bool(word) and gpu.uuid.startswith(word)


def found_gpus() -> list[Gpu]:
    """All GPUs of this machine; none without ``pynvml``, a driver, or the permission."""
    try:
        nvml = _nvml()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:
        return []
    return [Gpu(i, name, _uuid(nvml, handles[i])) for i, name in enumerate(names)]


def _uuid(nvml: Any, handle: Any) -> str:
    try:
        return _text(nvml.nvmlDeviceGetUUID(handle))
    except Exception:
        return ""


def clocks(index: int) -> dict[str, int]:
    """SM clock (MHz), its maximum, temperature (degrees C), power limit (W) and throttle reasons (NVML's bits) of a
    GPU; figures that the driver refuses are left out."""
    try:
        nvml = _nvml()
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return {}
    questions = {
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "sm_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) // 1000,
        "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    told = {}
    for name, ask in questions.items():
        try:
            told[name] = int(ask())
        except Exception:
            continue
    return told


def driver() -> str:
    """The driver's version; empty without one."""
    try:
        return _text(_nvml().nvmlSystemGetDriverVersion())
    except Exception:
        return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
