"""What NVML and the CUDA driver say of this process's GPU: memory, utilisation, power. All of it optional."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NAN = float("nan")


@dataclass(frozen=True)
class Reading:
    """One look at the gauges; 0 bytes and NaN mean unknown."""

    memory_used: int = 0
    memory_total: int = 0
    sm_utilization: float = _NAN  # 0 to 1, over NVML's own window
    power_w: float = _NAN


class Gauges:
    """Reads the gauges of the current CUDA device. A gauge that fails once is not asked again."""

    def __init__(self, cuda: Any) -> None:
        """``cuda`` is torch.cuda, initialised."""
        self._cuda = cuda
        self._nvml, self._device = _open(cuda)
        self._dead: set[str] = set()

    def read(self) -> Reading:
        """A look; some tens of microseconds in the driver, so not at every step. Never raises."""
        free, total = self._ask("memory", self._cuda.mem_get_info) or (0, 0)
        rates = self._ask("utilization", "nvmlDeviceGetUtilizationRates")
        milliwatts = self._ask("power", "nvmlDeviceGetPowerUsage")
        return Reading(
            total - free,
            total,
            _NAN if rates is None else rates.gpu / 100,
            _NAN if milliwatts is None else milliwatts / 1000,
        )

    def _ask(self, gauge: str, call: Any) -> Any:
        if gauge in self._dead or (isinstance(call, str) and self._nvml is None):
            return None
        try:
            return getattr(self._nvml, call)(self._device) if isinstance(call, str) else call()
        except Exception:  # not supported, not permitted, lost: unknown from now on
            self._dead.add(gauge)
            return None


def _open(cuda: Any) -> tuple[Any, Any]:
    """NVML and its handle of the current CUDA device, found by UUID since CUDA_VISIBLE_DEVICES renumbers."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name.encode())
    except Exception:
        return None, None
