"""The step's schedule: against a brute-force simulation, laws of its own, and what it says about tuning."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from dynamiccl.agent.commands.oracle import oracle
from dynamiccl.envs.sim import schedule
from dynamiccl.envs.sim.clusters import cluster
from dynamiccl.envs.sim.fabric import Fabric
from dynamiccl.envs.sim.schedule import COMPUTE, Op, simulate
from dynamiccl.traces.records import CHANNELS, Decision

SMALL = schedule.llama_units(2048, 8, 32000, 5632)


def brute_force(ops, contention, dt):
    """Advance everything in small ticks of time; returns begin and end of each operation."""
    todo = {}
    for i, op in enumerate(ops):
        todo.setdefault(op.stream, []).append(i)
    worked, begun, ended, t = [0.0] * len(ops), [None] * len(ops), [None] * len(ops), 0.0
    while any(e is None for e in ended):
        running = []
        for queue in todo.values():
            while queue:
                i = queue[0]
                if any(ended[j] is None for j in ops[i].after):
                    break
                begun[i] = t if begun[i] is None else begun[i]
                if worked[i] < ops[i].us - 1e-12:
                    running.append(i)
                    break
                ended[i] = t
                queue.pop(0)
        busy = [i for i in running if ops[i].func]
        for i in running:
            if ops[i].func:
                worked[i] += dt / (1 + contention * (len(busy) - 1))
            else:
                worked[i] += dt / (1 + sum(ops[j].slowdown for j in busy))
        t += dt
        assert t < 1000, "never ends"
    return np.array(begun), np.array(ended)


def random_step(rng):
    ops = []
    for i in range(rng.randint(1, 9)):
        after = tuple(j for j in range(i) if rng.random() < 0.25)
        us = rng.choice([0.0, rng.uniform(0.1, 4.0), rng.uniform(0.1, 4.0)])
        stream = rng.choice([COMPUTE, COMPUTE, "gather", "scatter"])
        collective = stream != COMPUTE
        ops.append(Op(stream, us, after, "all_gather" if collective else "", 8, rng.uniform(0, 0.5) * collective))
    return ops


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_brute_force_simulation(seed):
    rng = random.Random(seed)
    ops, contention, dt = random_step(rng), rng.choice([0.0, 0.3, 1.0]), 0.002
    begun, ended = brute_force(ops, contention, dt)
    got = simulate(ops, contention)
    # Each operation on the critical path may be a tick late, twice where its pace changed.
    tolerance = dt * 3 * (len(ops) + 1)
    assert got.start == pytest.approx(begun, abs=tolerance)
    assert got.end == pytest.approx(ended, abs=tolerance)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_communication_it_is_the_compute_time_and_without_compute_the_sum_of_communication(stage):
    work = schedule.zero_step(stage, SMALL, 16)
    silent = simulate(work.ops)
    assert silent.total_us == pytest.approx(sum(op.us for op in work.ops))
    assert silent.exposed.sum() == 0
    # All collectives on one stream, as with one communicator.
    idle = [Op("nccl" if op.func else COMPUTE, 7.0 if op.func else 0.0, op.after, op.func, 8) for op in work.ops]
    got = simulate(idle)
    assert got.total_us == pytest.approx(7.0 * sum(bool(op.func) for op in work.ops))
    assert got.exposed.sum() == pytest.approx(got.total_us)


def test_channels_slow_the_compute_they_overlap():
    ops = [Op(COMPUTE, 10.0), Op("nccl", 4.0, (), "all_gather", 8, 0.25)]
    got = simulate(ops)
    assert got.end[1] == 4.0 and got.end[0] == pytest.approx(4.0 + (10.0 - 4.0 / 1.25))
    assert got.exposed.sum() == 0
    later = simulate([Op(COMPUTE, 2.0), Op("nccl", 4.0, (), "all_gather", 8)])
    assert later.exposed[1] == 2.0


def test_what_can_never_run_is_refused():
    with pytest.raises(ValueError, match="never ends"):
        simulate([Op(COMPUTE, 1.0, (1,)), Op(COMPUTE, 1.0)])
    with pytest.raises(ValueError, match="same step"):
        simulate([Op(COMPUTE, 1.0, (5,))])
    with pytest.raises(ValueError, match="duration"):
        simulate([Op(COMPUTE, float("nan"))])
    with pytest.raises(ValueError, match="stage is 1, 2 or 3"):
        schedule.zero_step(0, SMALL, 16)


def test_zero_steps_move_what_zero_moves():
    """Per step and rank: stage 3 gathers the parameters twice and scatters gradients once, stages 1 and 2 each once."""
    whole = sum(SMALL)
    for stage, gathers in ((1, 1), (2, 1), (3, 2)):
        moved = {"all_gather": 0, "reduce_scatter": 0}
        for op in schedule.zero_step(stage, SMALL, 16).ops:
            if op.func:
                moved[op.func] += op.n_bytes
        assert moved["all_gather"] == pytest.approx(gathers * whole, rel=1e-3)
        assert moved["reduce_scatter"] == pytest.approx(whole, rel=1e-3)


def test_prefetch_hides_gathers():
    c = cluster("dgx-h100-2x8")
    f = Fabric.of(c)
    times = [schedule.zero_step(3, SMALL, 16, us_per_mb=6.0, prefetch=k).run(c, f).total_us for k in (0, 1, 2)]
    assert times[0] > 1.1 * times[1] and times[1] >= times[2]


@pytest.mark.parametrize("exposed", [0.1, 0.3, 0.5])
def test_exposure_is_met(exposed):
    c = cluster("dgx-h100-1x8")
    f = Fabric.of(c)
    work = schedule.with_exposure(schedule.zero_step(3, SMALL, 8), c, f, exposed)
    assert schedule.shares(work.run(c, f), work.ops)["exposed"] == pytest.approx(exposed, abs=0.02)


@pytest.mark.parametrize("hidden", [2048, 4096])
def test_the_demo_preset_leaves_a_fifth_of_the_step(hidden):
    """A ZeRO-3 step of a 1B-like and a 7B-like model on two DGX H100 whose communication is half exposed."""
    c = cluster("dgx-h100-2x8")
    f = Fabric.of(c)
    units = SMALL if hidden == 2048 else schedule.llama_units(4096, 8, 32000, 11008)
    work = schedule.with_exposure(schedule.zero_step(3, units, 16), c, f, 0.5)
    best = schedule.best_step(work, c, f)
    saved = 1 - work.run(c, f, best).total_us / work.run(c, f).total_us
    assert saved > 0.2, saved
    # No single change of one slot makes it better: it is an optimum, not a lucky draw.
    optimum = work.run(c, f, best).total_us
    for key in best:
        for pair, k in ((("ring", "simple"), 4), (("ring", "ll128"), 16), (("ring", "simple"), 16), ((None, None), 8)):
            assert work.run(c, f, {**best, key: Decision(*pair, k)}).total_us >= optimum * 0.999
    # And one bad choice costs dearly.
    bad = {key: Decision("ring", "simple", 1) for key in best}
    assert work.run(c, f, bad).total_us > 2 * work.run(c, f).total_us


def test_tuning_each_collective_alone_is_worse_than_tuning_the_step():
    """Well hidden collectives should take few channels, although each alone would be quicker with more."""
    gains = {"step": [], "alone": []}
    for name in ("dgx-h100-1x8", "dgx-a100-2x8", "b200-1x8"):
        c = cluster(name)
        for seed in (0, 1, 2):
            f = Fabric.of(c, seed)
            work = schedule.with_exposure(schedule.zero_step(3, SMALL, c.n_ranks), c, f, 0.05)
            default = work.run(c, f).total_us
            for kind, chosen in (("step", schedule.best_step(work, c, f)), ("alone", schedule.best_alone(work, c, f))):
                gains[kind].append(1 - work.run(c, f, chosen).total_us / default)
    step, alone = np.array(gains["step"]), np.array(gains["alone"])
    assert (step >= alone - 1e-9).all()
    assert step.mean() > 1.5 * max(alone.mean(), 0.005), (step.mean(), alone.mean())


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
    work = schedule.from_aicb(path)
    assert {k: len(v) for k, v in work.slots().items()} == {
        ("all_gather", 25): 6,
        ("reduce_scatter", 27): 1,
        ("all_gather", 13): 1,
    }
    c = cluster("dgx-h100-2x8")
    timeline = work.run(c, Fabric.of(c))
    computes = [i for i, op in enumerate(work.ops) if not op.func]
    assert len(computes) == 6 and timeline.total_us > sum(work.ops[i].us for i in computes)
    path.write_text("not a stream\n")
    with pytest.raises(ValueError, match="no AICB stream"):
        schedule.from_aicb(path)


def test_candidates_are_what_the_mask_allows():
    c = cluster("dgx-h100-2x8")
    found = schedule.candidates(c, "all_gather", 2**28)
    assert Decision() in found and all(d.n_channels in CHANNELS and d.n_channels <= 16 for d in found)
    assert not any(d.proto == "ll" for d in found), "NCCL prices LL at nine times its best here"


def test_the_recorded_oracle_of_the_demo_is_what_its_command_says(capsys):
    recorded = json.loads((Path(__file__).parent / "data" / "modelled_oracle.json").read_text())
    command = recorded.pop("command").split()
    assert command[:2] == ["dynamiccl", "oracle"]
    options = dict(zip(command[2::2], command[3::2], strict=False))
    oracle(units=options["--units"], exposed=float(options["--exposed"]), json_=True)
    assert json.loads(capsys.readouterr().out) == recorded
    assert recorded["saved"] >= 0.15


def test_the_command_prints_the_room(capsys):
    oracle(cluster="dgx-h100-2x8", stage=3, hidden=2048, layers=4, exposed=0.5, json_=True)
    found = json.loads(capsys.readouterr().out)
    assert found["emulated"] is True and found["cluster"] == "dgx-h100-2x8"
    assert found["best_step_us"] <= found["best_alone_us"] and found["saved"] > 0.2
    assert {row["func"] for row in found["decisions"]} == {"all_gather", "reduce_scatter"}
    for bad in (
        {"units": "1,x"},
        {"units": "-3"},
        {"cluster": "nope"},
        {"stage": 7},
        {"exposed": 1.5},
        {"layers": 0},
        {"stream": Path("absent.csv")},
    ):
        with pytest.raises(SystemExit) as caught:
            oracle(**bad)
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: ")
