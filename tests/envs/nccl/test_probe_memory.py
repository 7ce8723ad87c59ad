"""How full the GPU is, which there are and which is the rank's, against stand-ins for torch.cuda and NVML."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.envs.nccl.steps import clock
from dynamiccl.envs.nccl.steps.clock import EVERY_S, Memory, StepRecorder
from dynamiccl.envs.nccl.steps.nvml import driver, gpus
from dynamiccl.traces.records import STEP_DTYPE

GIB = 2**30


class Cuda:
    """80 GiB, of which one more is used at each look; lost after ``looks`` of them."""

    def __init__(self, looks: int) -> None:
        self.asked, self.looks = 0, looks

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.asked += 1
        if self.asked > self.looks:
            raise RuntimeError("CUDA error: device lost")
        return (80 - self.asked) * GIB, 80 * GIB


def test_memory_is_looked_at_now_and_then_and_not_again_once_it_failed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cuda = Cuda(looks=2)
    mine = Memory(cuda, 0)
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


class Gpus:
    """torch.cuda of a process that has tensors on the GPUs of ``reserved`` (bytes), with GPU 0 as its current one."""

    def __init__(self, **reserved: int) -> None:
        self.current, self.reserved, self.touched = 0, reserved, set()

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self.current

    def memory_reserved(self, device: int) -> int:
        return self.reserved.get(f"gpu{device}", 0)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.touched.add(device)
        return (80 - device) * GIB, 80 * GIB

    @contextmanager
    def device(self, device: int):
        before, self.current = self.current, device
        yield
        self.current = before

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        def touch(*_: object) -> float:
            self.touched.add(self.current)
            return 5.0  # ms

        return SimpleNamespace(record=touch, query=touch, elapsed_time=touch)


class Seen:
    """A plugin that keeps the STEP records which it is given."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def ended(self) -> SimpleNamespace:
        return SimpleNamespace(generation=0, is_whole=True, block=0, trial=0)

    def emit(self, record: bytes) -> None:
        self.records.append(record)

    def boundary(self, record: bytes | None, step: int, sampled: bool) -> None:
        self.records += [record] if record else []


def optimizer_on(*places: int | None) -> SimpleNamespace:
    """An optimizer with a parameter on each of these GPUs; None: on the host."""
    found = [SimpleNamespace(is_cuda=at is not None, device=SimpleNamespace(index=at)) for at in places]
    return SimpleNamespace(param_groups=[{"params": []}, {"params": found}])


@pytest.mark.parametrize(
    ("places", "reserved", "touched", "used_gib", "ms"),
    [
        ((None, 3), {"gpu3": 1}, {3}, 3, 5.0),
        ((None,), {"gpu0": 1}, {0}, 0, 5.0),  # its part is on the host
        (
            (None,),
            {"gpu3": 1},
            set(),
            0,
            2.0,
        ),  # and nobody has set the device: the host's clock, memory unknown
    ],
)
def test_the_clock_and_the_memory_are_those_of_the_gpu_that_steps(places, reserved, touched, used_gib, ms):
    """Before: of the current device, on which each rank made itself a context, and an idle stream was timed."""
    cuda, plugin = Gpus(**reserved), Seen()
    recorder = StepRecorder(SimpleNamespace(cuda=cuda), plugin)
    for step in range(1, 4):
        recorder.ended(0, step * 2_000_000, optimizer_on(*places))
    recorder.close()
    assert cuda.touched == touched
    (record, _) = np.frombuffer(b"".join(plugin.records), STEP_DTYPE)
    assert record["duration_ns"] == ms * 1e6
    assert record["memory_used"] == used_gib * GIB and bool(record["memory_total"]) is bool(touched)


class Broken(Gpus):
    """After a device-side assert every call of CUDA fails."""

    is_broken = False

    def Event(self, enable_timing: bool) -> SimpleNamespace:
        event = super().Event(enable_timing)
        return SimpleNamespace(record=event.record, query=self.asks)

    def asks(self) -> bool:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return False


def test_a_job_that_dies_of_a_cuda_error_has_the_last_word(capfd):
    """Before: a second traceback, ours, at the end of each rank's output."""
    cuda = Broken(gpu0=1)
    recorder = StepRecorder(SimpleNamespace(cuda=cuda), Seen())
    for step in range(1, 4):
        recorder.ended(0, step, optimizer_on(0))
    cuda.is_broken = True
    recorder.close()
    assert capfd.readouterr().err == ""


def test_a_clock_that_has_failed_is_not_asked_again():
    cuda = Broken(gpu0=1)
    recorder = StepRecorder(SimpleNamespace(cuda=cuda), Seen())
    for step in range(1, 4):
        cuda.is_broken = step == 3
        recorder.ended(0, step, optimizer_on(0))
    cuda.asks = pytest.fail
    recorder.close()
    assert not recorder._works


def test_the_clock_of_the_gpu_begins_with_the_first_optimizer_that_has_one():
    cuda, plugin = Gpus(gpu2=1), Seen()
    recorder = StepRecorder(SimpleNamespace(cuda=cuda), plugin)
    for step, place in enumerate([None, None, 2, 2, None], 1):
        recorder.ended(0, step * 2_000_000, optimizer_on(place))
    durations = np.frombuffer(b"".join(plugin.records), STEP_DTYPE)["duration_ns"]
    assert durations.tolist() == [2e6, 5e6, 5e6] and cuda.touched == {2}
