"""How full the GPU is and which there are, against stand-ins for torch.cuda and NVML."""

import sys
from types import SimpleNamespace

from dynamiccl.envs.nccl.steps import clock
from dynamiccl.envs.nccl.steps.clock import EVERY_S, Memory
from dynamiccl.envs.nccl.steps.nvml import driver, gpus

GIB = 2**30


class Cuda:
    """80 GiB, of which one more is used at each look; lost after ``looks`` of them."""

    def __init__(self, looks: int) -> None:
        self.asked, self.looks = 0, looks

    def mem_get_info(self) -> tuple[int, int]:
        self.asked += 1
        if self.asked > self.looks:
            raise RuntimeError("CUDA error: device lost")
        return (80 - self.asked) * GIB, 80 * GIB


def test_memory_is_looked_at_now_and_then_and_not_again_once_it_failed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cuda = Cuda(looks=2)
    mine = Memory(cuda)
    assert mine.latest() == mine.latest() == (GIB, 80 * GIB) and cuda.asked == 1
    now[0] += EVERY_S + 0.1
    assert mine.latest() == (2 * GIB, 80 * GIB)
    for _ in range(3):
        now[0] += EVERY_S + 0.1
        assert mine.latest() == (0, 0) and cuda.asked == 3


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
