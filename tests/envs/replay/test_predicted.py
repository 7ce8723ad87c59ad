"""Times that a recording predicts: those of one size of communicator say nothing of another's."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import recordings_made
from dynamiccl.agent.advice.advise import Advice
from dynamiccl.envs.nccl_model.clusters import cluster
from dynamiccl.envs.replay.decisions import load
from dynamiccl.envs.replay.predicted import Network, Times, cluster_of
from dynamiccl.envs.replay.recordings import named, on_cluster
from dynamiccl.traces.files import Trace, TraceError
from dynamiccl.traces.header import OF_ONE_RANK
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.writer import TraceWriter
from synthetic_trace import GATHER, LAYER_BYTES, write_run


def test_communicators_of_two_sizes_are_predicted_each_by_its_own_calls(tmp_path):
    """Tensor parallelism in pairs beside 16 ranks of FSDP: the same bytes, other networks. Before: one median."""
    trace = write_run(tmp_path / "trace", search=4, final=2)[1]
    profiles = load(trace).profiles
    wide = next(p for p in profiles if p.slot == GATHER)
    narrow = replace(wide, slot=replace(GATHER, n_ranks=2, n_nodes=1))
    events = trace.events
    in_pairs = events.assign(n_ranks=2, n_nodes=1, comm_id=1)
    in_pairs["end_ns"] = in_pairs["start_ns"] + (in_pairs["end_ns"] - in_pairs["start_ns"]) // 10
    both = pd.concat([in_pairs, events], ignore_index=True)
    own = ("ring", "ll")
    alone = Times(trace, events, [wide]).us(GATHER, own, LAYER_BYTES, 8)
    times = Times(trace, both, [wide, narrow])
    assert times.us(GATHER, own, LAYER_BYTES, 8) == pytest.approx(alone)
    assert times.us(narrow.slot, own, LAYER_BYTES, 8) < 0.3 * alone


def placed(tmp_path, cluster, n_ranks=16, n_nodes=2, nccl=None):
    """The made job on a cluster, its communicator of that size."""
    trace = read_recording([recordings_made.kineto(tmp_path / "profiles")])
    trace.events = trace.events.assign(n_ranks=n_ranks, n_nodes=n_nodes)
    return on_cluster(trace, named(str(cluster), nccl))


def test_the_network_of_a_size_is_of_that_size(tmp_path):
    """Before: that of the header's preset for a communicator of any size, 16 ranks of two nodes for 8 of one."""
    trace = placed(tmp_path, "dgx-h100-2x8")
    sizes = [(16, 2), (8, 1), (32, 4), (2, 1)]
    networks = [Network.of(trace, *size).cluster for size in sizes]
    assert [(c.n_ranks, c.n_nodes) for c in networks] == sizes
    assert networks[1].ring == cluster("dgx-h100-1x8").ring


def test_bytes_of_one_rank_become_those_of_all_but_for_sums(tmp_path):
    """Where ranks are not told: Nsight gives an all-gather's bytes by rank; of a sum all ranks have the same."""
    trace = read_recording([recordings_made.kineto(tmp_path / "profiles")])
    gathers = trace.events[trace.events["func"] == "all_gather"].head(2)
    trace.events = pd.concat([gathers, gathers.assign(func="all_reduce")], ignore_index=True).assign(
        n_ranks=0
    )
    trace.header |= {OF_ONE_RANK: True, "all_reduce": "protocol"}
    found = on_cluster(trace, named("dgx-h100-2x8")).events
    times = found["n_bytes"].to_numpy() / trace.events["n_bytes"].to_numpy()
    assert times.tolist() == [16, 16, 1, 1] and (found["n_ranks"] == 16).all()


def test_a_cluster_of_a_file_is_kept_in_the_recording(tmp_path):
    """Before: its name alone, which names no preset: an H100 stood in, and --nccl was lost."""
    file = tmp_path / "mine.toml"
    file.write_text('like = "dgx-a100-2x8"\nnic_gbs = 7.0\n')
    trace = placed(tmp_path, file, nccl="2.27.5")
    with TraceWriter(tmp_path / "written", trace.header):
        file.unlink()
    for header in (trace.header, Trace.read(tmp_path / "written").header):
        trace.header = header
        found = cluster_of(trace, 16, 2)
        assert (found.name, found.generation, found.nic_gbs, found.nccl) == ("mine", "A", 7.0, "2.27.5")


def test_channels_are_those_of_the_slots_own_communicator(tmp_path):
    """Before: those of the named preset for a communicator of any size."""
    one, two = (cluster(f"dgx-h100-{nodes}x8") for nodes in (1, 2))
    trace = placed(tmp_path, "dgx-h100-2x8", 8, 1)
    trace.events["n_channels"] = 2
    assert set(load(trace).fingerprint.comm_channels) == {one.comm_channels} != {two.comm_channels}


def test_slots_that_run_outside_the_offer_are_no_tasks(tmp_path):
    """Symmetric kernels. Before: a table was advised for them that takes them away."""
    folder = recordings_made.kineto(tmp_path / "a")
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        for event in document["traceEvents"]:
            if event["name"].startswith("ncclDev") and event["args"]["Collective name"] == "all_gather":
                event["name"] = "ncclSymkDevKernel_AllGather_LLMC"
        path.write_text(json.dumps(document))
    trace = on_cluster(read_recording([folder]), named("dgx-h100-2x8"))
    recorded = load(trace)
    assert {slot.func for slot in recorded.slots} == {"reduce_scatter"}
    assert [(slot.func, ran) for slot, ran in recorded.outside.items()] == [
        ("all_gather", "a kernel of another kind")
    ]
    notes = Advice(trace, named("dgx-h100-2x8")).as_dict()["unknown"]
    assert any("all_gather 33-64 MiB: NCCL runs a kernel of another kind there" in note for note in notes)
    for path in folder.iterdir():
        path.write_text(
            path.read_text().replace("ncclDevKernel_Generic", "ncclSymkDevKernel_ReduceScatter_LD")
        )
    with pytest.raises(TraceError, match="that a tuner can reach; NCCL runs a kernel of another kind for"):
        load(on_cluster(read_recording([folder]), named("dgx-h100-2x8")))
