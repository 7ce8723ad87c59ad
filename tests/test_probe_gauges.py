"""The GPU's gauges, against stand-ins for NVML and torch.cuda: whatever fails is unknown and asked no more."""

import math
import sys
from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.gauges import Gauges, Reading


class Nvml:
    """NVML with one device; `broken` names the calls that raise."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.asked = set(broken), []

    def __getattr__(self, name):
        def call(*args):
            self.asked.append((name, *args))
            if name in self.broken:
                raise RuntimeError("Not Supported")
            values = {
                "nvmlDeviceGetHandleByUUID": "device",
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
                "nvmlDeviceGetPowerUsage": 412_500,
            }
            return values.get(name)

        return call


def cuda(**calls):
    properties = SimpleNamespace(uuid="0bad-cafe")
    base = {
        "mem_get_info": lambda: (20 * 2**30, 80 * 2**30),
        "current_device": lambda: 0,
        "get_device_properties": lambda _: properties,
    }
    return SimpleNamespace(**(base | calls))


def test_all_gauges(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Gauges(cuda()).read() == Reading(60 * 2**30, 80 * 2**30, 0.75, 412.5)
    assert ("nvmlDeviceGetHandleByUUID", b"GPU-0bad-cafe") in nvml.asked


@pytest.mark.parametrize("broken", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"])
def test_a_gauge_that_fails_is_asked_once(monkeypatch, broken):
    nvml = Nvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gauges = Gauges(cuda())
    for _ in range(3):
        reading = gauges.read()
    assert [name for name, *_ in nvml.asked].count(broken) == 1
    assert math.isnan(reading.power_w) == (broken == "nvmlDeviceGetPowerUsage")
    assert math.isnan(reading.sm_utilization) == (broken != "nvmlDeviceGetPowerUsage")
    assert reading.memory_total == 80 * 2**30


def test_without_nvml_there_is_still_memory(monkeypatch):
    for obstacle in (None, Nvml("nvmlInit"), Nvml("nvmlDeviceGetHandleByUUID")):
        monkeypatch.setitem(sys.modules, "pynvml", obstacle)
        reading = Gauges(cuda()).read()
        assert reading.memory_used == 60 * 2**30 and math.isnan(reading.power_w)


def test_nothing_at_all(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: device lost")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = Gauges(cuda(mem_get_info=lost)).read()
    assert (reading.memory_used, reading.memory_total) == (0, 0) and math.isnan(reading.power_w)
