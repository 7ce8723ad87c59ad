"""Steps of real models: what the recordings hold against what ZeRO and the models say, and how they become ops."""

import pytest
from dynamiccl.envs.sim import workloads
from dynamiccl.envs.sim.step import COMPUTE
from dynamiccl.envs.sim.workloads import Recording, recordings
from make_steps import shape_of

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
    attended = 3 * 2 * shape.layers * shape.seq**2 * width  # both products, causal, forward and twice that backward
    assert flops == pytest.approx(6 * active * shape.seq + attended, rel=0.15)


@pytest.mark.parametrize("name", sorted(recordings()))
def test_a_recorded_step_runs(name):
    recording = recordings()[name]
    for prefetch in (1, 2):
        work = recording.workload(prefetch)
        for each in (work, work.on_one_communicator()):
            assert all(0 <= j < i for i, op in enumerate(each.ops) for j in op.after), "nothing waits for what is later"
        scatters = [i for i, op in enumerate(work.ops) if op.func == "reduce_scatter"]
        optimizer = next(op for op in work.ops if op.name == "optimizer")
        assert set(scatters) <= set(optimizer.after)
        assert all(any(not work.ops[j].func for j in work.ops[i].after) for i in scatters), "gradients are computed"
    if "-3" in name:
        early, late = (
            sum(max(op.after, default=0) for op in recording.workload(k).ops if op.func == "all_gather") for k in (2, 1)
        )
        assert early < late, "further ahead, sooner"


def test_gathers_wait_for_a_buffer():
    """Three units, gathered, computed, scattered in reverse."""
    ops = [("all_gather", 64, set()), ("compute", 4e8, {0}), ("all_gather", 64, set()), ("compute", 4e8, {2})]
    ops += [("all_gather", 64, set()), ("compute", 4e8, {4}), ("reduce_scatter", 64, {5}), ("optimizer", 0.0, {6})]
    work = Recording.of("three", ops).workload()
    assert [work.ops[i].after for i in (0, 2, 4)] == [(), (), (1,)]
    assert [work.ops[i].after for i in (0, 2, 4)] != [op.after for op in Recording.of("three", ops).workload(2).ops][
        :5:2
    ]
    assert [op.us for op in work.ops if not op.func] == pytest.approx([1, 1, 1, 0.15])
    assert work.ops[7].stream == COMPUTE and work.slots() == {("all_gather", 6): [0, 2, 4], ("reduce_scatter", 6): [6]}


def test_replication_reduces_every_shard_before_the_optimizer():
    work = recordings()["gpt2 fsdp2-3"].workload()
    both = workloads.hybrid(work)
    extra = both.ops[len(work.ops) :]
    assert len(extra) == sum(op.func == "reduce_scatter" for op in work.ops)
    assert sum(op.n_bytes for op in extra) == pytest.approx(moved(work, "reduce_scatter") / 8, rel=1e-3)
    optimizer = next(op for op in both.ops if op.name == "optimizer")
    assert set(range(len(work.ops), len(both.ops))) <= set(optimizer.after)


def test_a_file_that_holds_none_is_refused(tmp_path):
    path = tmp_path / "steps.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="make_steps"):
        recordings(path)


def test_zero_steps_move_what_zero_moves():
    """Per step and rank: stage 3 gathers the parameters twice and scatters gradients once, stages 1 and 2 each once."""
    units = workloads.llama_units(2048, 8, 32000, 5632)
    for stage, gathers in ((1, 1), (2, 1), (3, 2)):
        work = workloads.zero_step(stage, units, 16)
        assert moved(work, "all_gather") == pytest.approx(gathers * sum(units), rel=1e-3)
        assert moved(work, "reduce_scatter") == pytest.approx(sum(units), rel=1e-3)
    with pytest.raises(ValueError, match="stage is 1, 2 or 3"):
        workloads.zero_step(0, units, 16)


def test_a_public_stream_becomes_a_step(tmp_path):
    path = tmp_path / "stream.csv"
    head = "comm_type,comm_group,comm_group_size,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count"
    rows = [
        ("all_gather", 4096, "init._allgather_params"),
        *[("all_gather", 2**25, "forward.allgather_fn")] * 3,
        *[("all_gather", 2**25, "backward.allgather_fn")] * 3,
        ("reduce_scatter", 3 * 2**25, "backward.reduce_scatter_fn"),
        ("all_gather", 8192, "step.allgather_fn"),
    ]
    lines = [f"CommType.{f},CommGroup.dp_group,16,{size},{where},,,,,,,1" for f, size, where in rows]
    path.write_text("\n".join(["[rank0 ~ rank15]", head, *lines, "CommType.epoch_end,,,0,,,,,,,,1"]))
    work = workloads.from_aicb(path)
    assert {k: len(v) for k, v in work.slots().items()} == {
        ("all_gather", 25): 6,
        ("reduce_scatter", 27): 1,
        ("all_gather", 13): 1,
    }
    assert sum(not op.func for op in work.ops) == 6
    path.write_text("not a stream\n")
    with pytest.raises(ValueError, match="no AICB stream"):
        workloads.from_aicb(path)
