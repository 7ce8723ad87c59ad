"""What NVML and the CUDA driver say of this process's GPU: memory, power, clocks, links. All of it optional.

NVML is asked by a thread of its own: a call takes tens of microseconds, and far more where another process asks too.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from .nvml import nvml

_NAN = float("nan")
EVERY_S = 0.5


@dataclass(frozen=True)
class Reading:
    """One look at the gauges; 0 and NaN mean unknown. Fields in the order of the STEP record."""

    memory_used: int = 0  # bytes, by all processes on the GPU
    memory_total: int = 0
    sm_utilization: float = _NAN  # 0 to 1, over NVML's own window
    power_w: float = _NAN
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0
    throttle: int = 0  # NVML's bit mask of reasons for a lower clock
    pcie_rx_gbs: float = _NAN  # since the look before
    pcie_tx_gbs: float = _NAN
    nvlink_rx_gbs: float = _NAN
    nvlink_tx_gbs: float = _NAN


class Gauges:
    """Reads the gauges of the current CUDA device. A gauge that fails once is not asked again."""

    def __init__(self, cuda: Any) -> None:
        """``cuda`` is torch.cuda, initialised."""
        self._cuda = cuda
        self._nvml, self._device = _open(cuda)
        self._dead: set[str] = set()
        self._counts: dict[str, tuple[float, int]] = {}  # counter -> when it was read, bytes
        self._reading = Reading()
        self._read_s = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def latest(self) -> Reading:
        """What was read last, at most some half second ago; the first call starts the reading. Never raises.

        Without NVML the CUDA driver is asked for the memory, here and now: it must not be asked from another thread,
        which could break the capture of a graph.
        """
        if self._nvml is None:
            now = time.monotonic()
            if now - self._read_s > EVERY_S:
                self._read_s = now
                free, total = self._ask("memory", self._cuda.mem_get_info) or (0, 0)
                self._reading = Reading(total - free, total)
        elif self._thread is None:
            self._reading = self.read()
            self._thread = threading.Thread(target=self._run, name="dynamiccl-gauges", daemon=True)
            self._thread.start()
        return self._reading

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._reading = self.read()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def read(self) -> Reading:
        """A look at all that NVML tells. Never raises."""
        memory = self._call("nvmlDeviceGetMemoryInfo")
        rates = self._call("nvmlDeviceGetUtilizationRates")
        milliwatts = self._call("nvmlDeviceGetPowerUsage")
        reasons = self._call("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self._call("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Reading(
            memory.used if memory else 0,
            memory.total if memory else 0,
            _NAN if rates is None else rates.gpu / 100,
            _NAN if milliwatts is None else milliwatts / 1000,
            self._call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM") or 0,
            self._call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM") or 0,
            (reasons or 0) & 0xFFFFFFFF,
            self._rate("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", 1),
            self._rate("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", 1),
            self._rate("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 1024),
            self._rate("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 1024),
        )

    def _call(self, call: str, constant: str = "") -> Any:
        def ask() -> Any:
            more = [getattr(self._nvml, constant)] if constant else []
            return getattr(self._nvml, call)(self._device, *more)

        return self._ask(call + constant, ask)

    def _rate(self, counter: str, unit: int) -> float:
        """GB/s since the look before; NVML's counters count ``unit`` bytes and may start again."""

        def ask() -> int:
            all_links = 0xFFFFFFFF
            scoped = (getattr(self._nvml, counter), all_links if "NVLINK" in counter else 0)
            (value,) = self._nvml.nvmlDeviceGetFieldValues(self._device, [scoped])
            if value.nvmlReturn != 0:
                raise OSError(f"NVML error {value.nvmlReturn}")
            return int(value.value.ullVal) * unit

        count, now = self._ask(counter, ask), time.monotonic()
        if count is None:
            return _NAN
        then, before = self._counts.get(counter, (now, count))
        self._counts[counter] = now, count
        return (count - before) / (now - then) / 1e9 if now > then and count >= before else _NAN

    def _ask(self, gauge: str, call: Any) -> Any:
        if gauge in self._dead:
            return None
        try:
            return call()
        except Exception:  # not supported, not permitted, lost: unknown from now on
            self._dead.add(gauge)
            return None


def _open(cuda: Any) -> tuple[Any, Any]:
    """NVML and its handle of the current CUDA device, found by UUID since CUDA_VISIBLE_DEVICES renumbers."""
    library = nvml()
    try:
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return library, library.nvmlDeviceGetHandleByUUID(name.encode())
    except Exception:
        return None, None
