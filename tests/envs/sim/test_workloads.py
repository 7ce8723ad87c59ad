"""Steps of real models: what the recordings hold against what ZeRO and the models say, and how they become ops."""

import numpy as np
import pytest
import workloads
from dynamiccl.envs.sim.workloads import recorded_works
from make_steps import shape_of
from workloads import COMPUTE, Recording, recordings

RANKS = 16


def moved(work, func):
    return sum(op.n_bytes for op in work.ops if op.func == func)


@pytest.mark.parametrize("name", sorted(recordings()))
def test_a_recorded_step_moves_what_its_stage_moves_and_computes_what_its_model_computes(name):
    model, engine = name.split(" ", 1)
    shape, work = shape_of(model), recordings()[name].workload()
    width, gated = shape.width, bool(shape.hidden)
    kv = width * (shape.kv_heads or shape.heads) // shape.heads
    attention = width * (2 * width + 2 * kv)
    one_mlp = 3 * width * shape.hidden if gated else 8 * width * width
    block = attention + one_mlp * max(shape.experts, 1)
    embed = shape.vocab * width
    n_params = shape.layers * block + embed * (2 if gated else 1)
    gathers = 2 if engine.startswith(("zero-3", "fsdp2-3")) else 1
    # The last unit stays gathered, the root is not gathered twice by all: up to an embedding less.
    assert 2 * gathers * n_params * 1.03 + 4e6 >= moved(work, "all_gather")
    assert moved(work, "all_gather") >= 2 * (gathers * n_params - (gathers - 1) * (2 * embed + block)) * 0.97
    assert moved(work, "reduce_scatter") == pytest.approx(2 * n_params, rel=0.04)
    flops = sum(op.us for op in work.ops if not op.func) * workloads.FLOPS_A_US / 1.05
    active = shape.layers * (attention + one_mlp * (2 if shape.experts else 1)) + embed
    attended = (
        3 * 2 * shape.layers * shape.seq**2 * width
    )  # both products, causal, forward and twice that backward
    assert flops == pytest.approx(6 * active * shape.seq + attended, rel=0.15)


@pytest.mark.parametrize("name", sorted(recordings()))
def test_a_recorded_step_runs(name):
    recording = recordings()[name]
    for prefetch in (1, 2):
        work = recording.workload(prefetch)
        for each in (work, work.on_one_communicator()):
            assert all(0 <= j < i for i, op in enumerate(each.ops) for j in op.after), (
                "nothing waits for what is later"
            )
        scatters = [i for i, op in enumerate(work.ops) if op.func == "reduce_scatter"]
        optimizer = next(op for op in work.ops if op.name == "optimizer")
        assert set(scatters) <= set(optimizer.after)
        assert all(any(not work.ops[j].func for j in work.ops[i].after) for i in scatters), (
            "gradients are computed"
        )
    if "-3" in name:
        early, late = (
            sum(max(op.after, default=0) for op in recording.workload(k).ops if op.func == "all_gather")
            for k in (2, 1)
        )
        assert early < late, "further ahead, sooner"


def test_gathers_wait_for_a_buffer():
    """Three units, gathered, computed, scattered in reverse."""
    ops = [("all_gather", 64, set()), ("compute", 4e8, {0}), ("all_gather", 64, set()), ("compute", 4e8, {2})]
    ops += [
        ("all_gather", 64, set()),
        ("compute", 4e8, {4}),
        ("reduce_scatter", 64, {5}),
        ("optimizer", 0.0, {6}),
    ]
    work = Recording.of("three", ops).workload()
    assert [work.ops[i].after for i in (0, 2, 4)] == [(), (), (1,)]
    assert [work.ops[i].after for i in (0, 2, 4)] != [
        op.after for op in Recording.of("three", ops).workload(2).ops
    ][:5:2]
    assert [op.us for op in work.ops if not op.func] == pytest.approx([1, 1, 1, 0.15])
    assert work.ops[7].stream == COMPUTE and work.slots() == {
        ("all_gather", 6): [0, 2, 4],
        ("reduce_scatter", 6): [6],
    }


def test_replication_reduces_every_shard_before_the_optimizer():
    work = recordings()["gpt2 fsdp2-3"].workload()
    both = workloads.hybrid(work)
    extra = both.ops[len(work.ops) :]
    assert len(extra) == sum(op.func == "reduce_scatter" for op in work.ops)
    assert sum(op.n_bytes for op in extra) == pytest.approx(moved(work, "reduce_scatter") / 8, rel=1e-3)
    optimizer = next(op for op in both.ops if op.name == "optimizer")
    assert set(range(len(work.ops), len(both.ops))) <= set(optimizer.after)


def test_the_product_has_the_steps_that_are_made_of_the_recordings():
    shipped, made = recorded_works(), workloads.made()
    for ours, theirs in ((shipped, made), (shipped.steps, made.steps)):
        for name, values in vars(theirs).items():
            if name != "steps":
                assert getattr(ours, name).dtype == values.dtype, name
                np.testing.assert_array_equal(getattr(ours, name), values, err_msg=name)
