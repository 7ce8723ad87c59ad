"""The GPU's gauges, against stand-ins for NVML and torch.cuda: whatever fails is unknown and asked no more."""

import math
import sys
import time
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.steps import gauges
from dynamiccl.envs.nccl.steps.gauges import Gauges
from dynamiccl.envs.nccl.steps.nvml import driver, gpus


class Nvml:
    """NVML with one device; `broken` names the calls and counters that raise. Links carry 3 GB between two looks."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES, NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 198, 197
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 139, 138

    def __init__(self, *broken: str) -> None:
        self.broken, self.asked, self.times = set(broken), [], {}

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args):
            self.asked.append((name, *args))
            if name in self.broken:
                raise RuntimeError("Not Supported")
            values = {
                "nvmlDeviceGetHandleByUUID": "device",
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=60 * 2**30, total=80 * 2**30),
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
                "nvmlDeviceGetPowerUsage": 412_500,
                "nvmlDeviceGetClockInfo": {1: 1980, 2: 2619}.get(args[-1] if args else None),
                "nvmlDeviceGetCurrentClocksEventReasons": 0x44,
                "nvmlDeviceGetCurrentClocksThrottleReasons": 0x44,
            }
            return values.get(name)

        return self._field if name == "nvmlDeviceGetFieldValues" else call

    def _field(self, device, fields):
        ((number, scope),) = fields
        self.asked.append(("field", number, scope))
        self.times[number] = self.times.get(number, 0) + 1
        unit = 1024 if number < 190 else 1
        value = SimpleNamespace(ullVal=(7 + 3 * self.times[number]) * 10**9 // unit)
        return [SimpleNamespace(nvmlReturn=3 if str(number) in self.broken else 0, value=value)]


def cuda(**calls):
    properties = SimpleNamespace(uuid="0bad-cafe")
    base = {
        "mem_get_info": lambda: (20 * 2**30, 80 * 2**30),
        "current_device": lambda: 0,
        "get_device_properties": lambda _: properties,
    }
    return SimpleNamespace(**(base | calls))


@pytest.fixture
def seconds(monkeypatch):
    """A clock that goes on by two seconds a look."""
    now = iter(range(0, 10**6))
    monkeypatch.setattr(gauges, "time", SimpleNamespace(monotonic=lambda: next(now) / 2))


def test_all_gauges(monkeypatch, seconds):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    mine = Gauges(cuda())
    first, second = mine.read(), mine.read()
    assert math.isnan(first.pcie_rx_gbs) and math.isnan(first.nvlink_tx_gbs)  # no look before it
    # Four counters are read in each look, half a second apart: one counter every two seconds.
    links = [pytest.approx(1.5, rel=1e-6)] * 4
    assert list(vars(second).values()) == [60 * 2**30, 80 * 2**30, 0.75, 412.5, 1980, 2619, 0x44, *links]
    assert ("nvmlDeviceGetHandleByUUID", b"GPU-0bad-cafe") in nvml.asked
    assert ("field", 139, 0xFFFFFFFF) in nvml.asked and ("field", 198, 0) in nvml.asked


@pytest.mark.parametrize(
    ("broken", "field", "unknown"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w", math.nan),
        ("nvmlDeviceGetUtilizationRates", "sm_utilization", math.nan),
        ("nvmlDeviceGetMemoryInfo", "memory_total", 0),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz", 0),
        ("198", "pcie_rx_gbs", math.nan),
    ],
)
def test_a_gauge_that_fails_is_asked_once_and_the_others_go_on(monkeypatch, seconds, broken, field, unknown):
    nvml = Nvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    mine = Gauges(cuda())
    for _ in range(3):
        reading = vars(mine.read())
    assert [name for name, *_ in nvml.asked].count(broken) <= 2  # two clocks
    assert nvml.asked.count(("field", 198, 0)) == (1 if broken == "198" else 3)
    assert reading[field] == unknown or (math.isnan(unknown) and math.isnan(reading[field]))
    assert reading["pcie_tx_gbs"] > 0 and reading["throttle"] == 0x44


def test_reasons_for_a_low_clock_by_their_older_name(monkeypatch):
    nvml = Nvml("nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Gauges(cuda()).read().throttle == 0x44


def test_a_counter_that_starts_again_gives_no_rate(monkeypatch, seconds):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    mine = Gauges(cuda())
    mine.read()
    nvml.times[198] = -2
    assert math.isnan(mine.read().pcie_rx_gbs)
    assert mine.read().pcie_rx_gbs > 0


def test_the_training_thread_only_picks_up_what_the_reading_thread_has_left(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gauges, "EVERY_S", 0.01)
    mine = Gauges(cuda())
    first = mine.latest()
    asked = len(nvml.asked)
    assert mine.latest() is first or len(nvml.asked) > asked
    deadline = time.monotonic() + 5
    while mine.latest() is first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert mine.latest() is not first and mine.latest().power_w == 412.5
    mine.close()
    assert not mine._thread.is_alive()


def test_without_nvml_there_is_still_memory(monkeypatch):
    for obstacle in (None, Nvml("nvmlInit"), Nvml("nvmlDeviceGetHandleByUUID")):
        monkeypatch.setitem(sys.modules, "pynvml", obstacle)
        reading = Gauges(cuda()).latest()
        assert reading.memory_used == 60 * 2**30 and math.isnan(reading.power_w)


def test_gpus_are_named_where_there_are_any(monkeypatch):
    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        NVMLError=RuntimeError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda handle: b"H100" if handle else "H200",
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert gpus() == ["H200", "H100"] and driver() == "580.1"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == [] and driver() == ""


def test_nothing_at_all(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = Gauges(cuda(mem_get_info=lost)).latest()
    assert (reading.memory_used, reading.memory_total) == (0, 0) and math.isnan(reading.power_w)
