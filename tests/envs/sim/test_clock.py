"""The clock of an emulated rank."""

import threading
from dataclasses import dataclass

import pytest
import torch
from dynamiccl.envs.sim.emulated.clock import BYTES_PER_NS, FLOPS_PER_NS, Clock, CountedWork


@dataclass
class Run:
    start_ns: int
    end_ns: int
    slowdown: float = 0.5


def elapsed(clock, since):
    return clock.now() - since


def test_work_and_waits_move_the_clock_and_nothing_else_does():
    clock = Clock()
    start = clock.now()
    assert clock.now() == start
    clock.count(1000)
    assert elapsed(clock, start) == 1000
    assert clock.wait_until(start + 500) == start + 1000, "it is over"
    assert clock.wait_until(start + 3000) - start == 3000


def test_compute_beside_a_collective_takes_longer():
    clock = Clock()
    start = clock.enqueued()
    clock.known(Run(start, start + 1000))
    clock.count(400)
    assert elapsed(clock, start) == 400 + 200
    clock.count(2000)  # of which 400 ns run beside it
    assert elapsed(clock, start) == 600 + 2000 + 200


def test_compute_beside_a_collective_that_was_not_known_yet_takes_longer_afterwards():
    clock = Clock()
    start = clock.enqueued()
    clock.count(1000)
    assert elapsed(clock, start) == 1000
    assert clock.known(Run(start + 200, start + 600)) - start == 1000 + 200
    clock.count(100)
    assert elapsed(clock, start) == 1300


@pytest.fixture
def counted():
    clock = Clock()
    with CountedWork(clock, 1e6):
        yield lambda run: count(clock, run)


def count(clock, run):
    start = clock.now()
    run()
    return (clock.now() - start) / 1e6


def test_an_operation_takes_the_longer_of_its_multiplications_and_its_memory(counted):
    a, b = torch.ones(1024, 1024), torch.ones(8, 8)
    assert counted(lambda: a @ a) == pytest.approx(2 * 1024**3 / FLOPS_PER_NS, rel=1e-3)
    assert counted(lambda: b @ b) == pytest.approx(3 * 8 * 8 * 4 / BYTES_PER_NS, rel=1e-3)
    assert counted(lambda: a + a) == pytest.approx(3 * 4 * 1024**2 / BYTES_PER_NS, rel=1e-3)
    assert counted(lambda: a.view(-1).unsqueeze(0).detach()) == counted(lambda: torch.empty(9)) == 0
    assert counted(lambda: torch._foreach_add([b, b], 1.0)) == pytest.approx(
        4 * 4 * 64 / BYTES_PER_NS, rel=1e-3
    )


def test_attention_and_backward_passes_are_counted(counted):
    q = torch.ones(2, 4, 64, 32, requires_grad=True)
    out = []
    forward = counted(
        lambda: out.append(torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    )
    assert forward >= 4 * 2 * 4 * 64 * 64 * 32 / FLOPS_PER_NS
    assert counted(lambda: out[0].sum().backward()) > forward


def test_nothing_is_counted_where_nothing_is_computed(counted):
    with torch.device("meta"):
        assert counted(lambda: torch.nn.Linear(512, 512)) == 0
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(64, 64)
        assert counted(lambda: fake @ fake) == 0


def test_tensors_of_several_parts_are_counted_by_what_is_done_to_their_parts(counted):
    """PyTorch's own two-part tensors stand for DTensor here, which needs a process group."""
    from torch.testing._internal.two_tensor import TwoTensor

    a = torch.ones(1024, 1024)
    pair = TwoTensor(a, a.clone())
    assert counted(lambda: pair @ pair) == pytest.approx(2 * 2 * 1024**3 / FLOPS_PER_NS, rel=1e-2)


def test_threads_share_the_clock():
    clock = Clock()
    start = clock.now()
    threads = [
        threading.Thread(target=lambda: [clock.wait_until(start + n) for n in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert elapsed(clock, start) == 999
