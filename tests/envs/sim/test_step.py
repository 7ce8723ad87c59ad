"""The event loop in C: against a brute-force simulation, and laws of its own."""

import random

import numpy as np
import pytest
from dynamiccl.envs.sim.step import N_PORTS, Calls, Law
from workloads import COMPUTE, MAX_STREAMS, Op, flattened


def brute_force(ops, calls, law, scale, dt):
    """Advance everything in small ticks of time; returns begin and end of each operation."""
    us, slow, near, far, crowd, channels, port = calls
    todo = {}
    for i, op in enumerate(ops):
        todo.setdefault(op.stream, []).append(i)
    lines = {name: k for k, name in enumerate(todo)}
    full = [op.us * (us[op.slot] if op.slot >= 0 else scale) for op in ops]
    worked, begun, ended, t = [0.0] * len(ops), [None] * len(ops), [None] * len(ops), 0.0
    while any(e is None for e in ended):
        running = []
        for queue in todo.values():
            while queue:
                i = queue[0]
                if any(ended[j] is None for j in ops[i].after):
                    break
                begun[i] = t if begun[i] is None else begun[i]
                if worked[i] < full[i] - 1e-12:
                    running.append(i)
                    break
                ended[i] = t
                queue.pop(0)
        called = sorted(
            (i for i in running if ops[i].slot >= 0), key=lambda i: (begun[i], lines[ops[i].stream])
        )
        together = sum(channels[ops[i].slot] for i in called)
        computes = len(called) < len(running)
        if len(called) > 1 and 0 < law.serial < together:
            running = [i for i in running if i not in called[1:]]
            called, together = called[:1], 0.0
        busy = [ops[i].slot for i in called]
        for i in running:
            k = ops[i].slot
            if k < 0:
                s = sum(slow[b] for b in busy)
                pace = 1 + s + law.saturation * s * s
            else:
                loads = [sum(use[b] for b in busy) for use in (near, far) if use[k] > 0]
                pace = max([1.0, *loads]) ** law.power * (
                    1 + law.crowd * (sum(crowd[b] for b in busy) - crowd[k])
                )
                pace *= 1 + law.drag * computes
                if len(busy) > 1 and 0 < law.budget < together:
                    pace *= 1 + law.squeeze * (together / law.budget - 1)
                if port[k] and [port[b] for b in busy].count(port[k]) > 1:
                    pace *= 1 + law.port
            worked[i] += dt / pace
        t += dt
        assert t < 1000, "never ends"
    return np.array(begun), np.array(ended)


def random_step(rng):
    ops = []
    for i in range(rng.randint(1, 9)):
        after = tuple(j for j in range(i) if rng.random() < 0.25)
        stream = rng.choice([COMPUTE, COMPUTE, "gather", "scatter", "far"])
        us = rng.choice([0.0, rng.uniform(0.1, 4.0), rng.uniform(0.1, 4.0)])
        ops.append(Op(stream, us, after, -1 if stream == COMPUTE else rng.randrange(3)))
    return ops


def random_calls(rng):
    return [
        [rng.choice([0.0, 1.0]) * rng.uniform(0, 1) if part else rng.uniform(0.5, 2) for _ in range(3)]
        for part in range(6)
    ] + [[float(rng.randrange(N_PORTS)) for _ in range(3)]]


def timeline(steps, which, calls, scale, law):
    """One step: begin, end and exposed part of every operation, and what ``run`` returns."""
    times = np.zeros((3, int(steps.op_at[which + 1] - steps.op_at[which])))
    return times, steps.run(np.array([which]), calls.rows(), np.array([scale]), law, times)


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_brute_force_simulation(seed):
    rng = random.Random(seed)
    ops, calls, dt, scale = random_step(rng), random_calls(rng), 0.004, rng.uniform(0.5, 2)
    law = Law(*(rng.choice([zero, zero + rng.random()]) for zero in (0.0, 1.0, *[0.0] * 6)))
    begun, ended = brute_force(ops, calls, law, scale, dt)
    steps, rows = flattened([random_step(rng), ops]), Calls(*(np.array([part]) for part in calls))
    (start, end, exposed), (total, spent, bare) = timeline(steps, 1, rows, scale, law)
    # Each operation on the critical path may be a tick late, twice where its pace changed.
    tolerance = dt * 4 * (len(ops) + 1)
    assert start == pytest.approx(begun, abs=tolerance)
    assert end == pytest.approx(ended, abs=tolerance)
    assert total[0] == end.max()
    for k in range(3):
        mine = [i for i, op in enumerate(ops) if op.slot == k]
        assert spent[0, k] == pytest.approx((end - start)[mine].sum())
        assert bare[0, k] == pytest.approx(exposed[mine].sum())


def one(ops, us, slow=0.0, near=0.0, far=0.0, **law):
    """When each operation ended, and the part of it that no compute ran beside."""
    k = np.ones((1, len(us)))
    calls = Calls(np.array([us]), slow * k, near * k, far * k, k, 8 * k, k)
    (_, end, exposed), _ = timeline(flattened([ops]), 0, calls, 1.0, Law(**law))
    return end, exposed


def test_channels_slow_the_compute_they_overlap():
    end, exposed = one([Op(COMPUTE, 10.0), Op("nccl", 1.0, (), 0)], [4.0], slow=0.25)
    assert end[1] == 4.0 and end[0] == pytest.approx(4.0 + (10.0 - 4.0 / 1.25))
    assert exposed.sum() == 0
    assert one([Op(COMPUTE, 2.0), Op("nccl", 1.0, (), 0)], [4.0])[1][1] == 2.0


def test_two_communicators_share_a_link_and_no_more_than_it():
    ops = [Op("gather", 1.0, (), 0), Op("scatter", 1.0, (), 1)]
    assert one(ops, [4.0, 4.0], near=0.5)[0].max() == 4.0
    assert one(ops, [4.0, 4.0], near=0.8)[0].max() == pytest.approx(6.4)
    assert one(ops, [4.0, 4.0], far=1.0)[0].max() == pytest.approx(8.0), "as long as one after the other"
    assert one(ops, [4.0, 4.0], crowd=0.5)[0].max() == pytest.approx(6.0)


def test_calls_side_by_side_share_channels_wait_and_meet_at_a_port():
    ops = [Op("gather", 1.0, (), 0), Op("scatter", 1.0, (), 1)]
    assert one(ops, [4.0, 4.0], budget=16.0, squeeze=1.0)[0].max() == 4.0
    assert one(ops, [4.0, 4.0], budget=8.0, squeeze=1.0)[0].max() == pytest.approx(8.0)
    assert (
        one(ops, [4.0, 4.0], serial=15.0)[0].tolist() == [4.0, 8.0]
        and one(ops, [4.0, 4.0], serial=16.0)[0].max() == 4
    )
    assert one(ops, [4.0, 4.0], port=0.5)[0].max() == pytest.approx(6.0)


def test_what_can_never_run_is_refused():
    with pytest.raises(ValueError, match="never ends"):
        one([Op(COMPUTE, 1.0, (1,)), Op(COMPUTE, 1.0)], [1.0])
    with pytest.raises(ValueError, match="of its step"):
        flattened([[Op(COMPUTE, 1.0, (5,))]])
    with pytest.raises(ValueError, match="duration"):
        flattened([[Op(COMPUTE, float("nan"))]])
    with pytest.raises(ValueError, match="streams"):
        flattened([[Op(str(k), 1.0) for k in range(MAX_STREAMS + 1)]])
    with pytest.raises(ValueError, match="2 kinds of call"):
        one([Op("nccl", 1.0, (), 1)], [1.0])
    with pytest.raises(ValueError, match="below 0"):
        one([Op("nccl", 1.0, (), 0)], [-1.0])
