"""NCCL's view: against plans of the real library, figures worked out by hand, and its own invariants."""

import csv
import itertools
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dynamiccl.envs.nccl_model import clusters, cost_model
from dynamiccl.envs.nccl_model.channels import heuristic_channels, planned_channels
from dynamiccl.envs.nccl_model.clusters import Cluster, ClusterArrays, Graph, cluster, preset_names, resize
from dynamiccl.traces.records import ALGOS, PAIRS, PROTOS, pair_costs
from paths import DATA

FUNCS = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
REAL = [("1x8", "2.28.9"), ("1x8", "2.30.7"), ("2x8", "2.28.9")]


@pytest.mark.parametrize(("layout", "release"), REAL)
def test_equals_the_plans_of_the_real_library(layout, release):
    c = clusters.resize(cluster(f"dgx-h100-{layout}"), nccl=release)
    rows = list(csv.DictReader((DATA / f"nccl_decisions_h100_{layout}_{release}.csv").open()))
    assert len(rows) == 46
    for row in rows:
        func, n_bytes = FUNCS[row["coll"]], int(row["nBytes"])
        table = cost_model.cost_table(c, func, n_bytes)
        for key, value in row.items():
            if key.startswith("us_"):
                algo, proto = key[3:].lower().rsplit("_", 1)
                got = table[ALGOS.index(algo), PROTOS.index(proto)]
                assert got == pytest.approx(float(value), rel=1e-5), (func, n_bytes, key)
        assert (table >= 0).sum() == sum(key.startswith("us_") for key in row)
        chosen = cost_model.choice(c, func, n_bytes)
        assert chosen == (row["algo"].lower(), row["proto"].lower())
        assert cost_model.channels(c, func, n_bytes, *chosen) == (int(row["nChannels"]), int(row["nWarps"]))


def ring_cluster(nodes, per_node, generation, channels, bw, kind, inter="PIX", cpu="intel", comm=24):
    graph = Graph(channels, bw, bw, kind, inter)
    return Cluster("by-hand", nodes, per_node, generation, graph, graph, comm, cpu=cpu)


# Worked out by hand from the constants of NCCL 2.30.7 src/graph/tuning.cc; us at 64 KiB, 1, 16 and 256 MiB.
BY_HAND = [
    (ring_cluster(1, 8, "H", 12, 30, "NVL"), "ll", (11.21, 17.31, 114.91, 1676.62)),
    (ring_cluster(1, 8, "H", 12, 30, "NVL"), "ll128", (27.47, 30.07, 71.62, 736.48)),
    (ring_cluster(1, 8, "H", 12, 30, "NVL"), "simple", (32.36, 34.75, 72.98, 684.65)),
    (ring_cluster(1, 8, "A", 12, 20, "NVL"), "ll", (11.45, 21.26, 178.19, 2689.03)),
    (ring_cluster(1, 8, "A", 12, 20, "NVL"), "ll128", (27.56, 31.46, 93.79, 1091.07)),
    (ring_cluster(1, 8, "A", 12, 20, "NVL"), "simple", (32.44, 36.02, 93.37, 1010.87)),
    (ring_cluster(1, 2, "H", 2, 12, "PHB"), "ll", (10.33, 51.29, 706.65, 11192.41)),
    (ring_cluster(1, 2, "H", 2, 12, "PHB"), "simple", (15.47, 35.95, 363.63, 5606.51)),
    (ring_cluster(2, 8, "H", 8, 48, "NVL"), "ll", (24.88, 48.51, 426.60, 6476.08)),
    (ring_cluster(2, 8, "H", 8, 48, "NVL"), "ll128", (44.81, 47.95, 98.17, 901.75)),
    (ring_cluster(2, 8, "H", 8, 48, "NVL"), "simple", (70.16, 72.56, 110.96, 725.36)),
    (ring_cluster(4, 1, "H", 1, 1.2, "LOC", "SYS"), "ll", (103.52, 1332.32, 20993.12, 335565.92)),
    (ring_cluster(4, 1, "H", 1, 1.2, "LOC", "SYS"), "simple", (91.36, 705.76, 10536.16, 167822.56)),
]


@pytest.mark.parametrize(("c", "proto", "expected"), BY_HAND)
def test_costs_worked_out_by_hand(c, proto, expected):
    sizes = (2**16, 2**20, 2**24, 2**28)
    got = [cost_model.cost_table(c, "all_gather", b)[ALGOS.index("ring"), PROTOS.index(proto)] for b in sizes]
    assert got == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("proto", "n_bytes", "limit", "threads"),
    [
        ("simple", 2**12, 1, 96),
        ("ll128", 2**12, 1, 320),
        ("simple", 2**16, 2, 544),
        ("ll", 2**16, 2, 512),
        ("ll128", 2**16, 12, 640),
        ("simple", 2**20, 24, 544),
        ("ll", 2**20, 24, 512),
    ],
)
def test_channel_heuristic_worked_out_by_hand(proto, n_bytes, limit, threads):
    fleet = ClusterArrays.of([cluster("dgx-h100-1x8")])
    pair = PAIRS.index(("ring", proto))
    channels, warps = heuristic_channels(fleet, np.array(n_bytes), np.array(pair))
    assert (int(channels[0]), int(warps[0]) * 32) == (limit, threads)


def test_masks_follow_the_topology():
    def offered(name):
        costs = pair_costs(cost_model.cost_table(cluster(name), "all_gather", 2**20))
        return {"/".join(p) for p, cost in zip(PAIRS, costs, strict=True) if cost >= 0}

    ring = {"ring/ll", "ring/ll128", "ring/simple"}
    assert offered("dgx-h100-1x8") == ring | {"nvls/simple"}
    assert offered("dgx-h100-4x8") == ring
    assert offered("dgx-a100-1x8") == ring
    assert offered("pcie-1x4") == ring - {"ring/ll128"}
    assert offered("one-gpu-per-node-8x1") == ring | {"pat/simple"}
    assert offered("one-gpu-2ranks-socket") == {"ring/ll", "ring/simple", "pat/simple"}


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("func", FUNCS.values())
def test_every_preset_has_costs_that_rise_and_channels_within_bounds(name, func):
    c = cluster(name)
    tables = [cost_model.cost_table(c, func, 2**k) for k in range(10, 33)]
    for smaller, larger in itertools.pairwise(tables):
        assert ((smaller >= 0) == (larger >= 0)).all()
        assert (larger[larger >= 0] > smaller[smaller >= 0]).all()
    for k, table in zip(range(10, 33), tables, strict=True):
        assert cost_model.choice(c, func, 2**k) == cost_model.choice(c, func, 2**k, table)
        for algo, proto in PAIRS:
            if table[ALGOS.index(algo), PROTOS.index(proto)] < 0:
                continue
            most = c.nvls_channels if algo == "nvls" else c.comm_channels
            for asked in (0, 1, 4, 16, 64):
                n, warps = cost_model.channels(c, func, 2**k, algo, proto, asked)
                assert 1 <= n <= (min(most, asked) if asked else most) and 3 <= warps <= 20


def test_a_tuner_moves_the_choice_and_only_lowers_channels_from_2_31_on():
    c = cluster("dgx-h100-2x8")
    table = cost_model.cost_table(c, "all_gather", 2**26).copy()
    table[ALGOS.index("ring"), PROTOS.index("ll")] = 0
    assert cost_model.choice(c, "all_gather", 2**26, table) == ("ring", "ll")
    with pytest.raises(ValueError, match="offers nothing"):
        cost_model.choice(c, "all_gather", 2**26, np.full((7, 3), -1.0))
    small = 2**17  # NCCL's own heuristic uses 2 channels here
    for release, expected in (("2.30.7", 16), ("2.31.2", 2)):
        got = cost_model.channels(clusters.resize(c, nccl=release), "all_gather", small, "ring", "ll", 16)[0]
        assert got == expected, release


def test_the_batch_path_equals_the_scalar_path():
    presets = [cluster(name) for name in preset_names()]
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(10, 32, len(presets))).astype(np.int64)
    fleet = ClusterArrays.of(presets)
    rows = cost_model.pair_cost_rows(fleet, sizes)
    for c, b, row in zip(presets, sizes, rows, strict=True):
        assert (pair_costs(cost_model.cost_table(c, "reduce_scatter", int(b))) == row).all()
    pair = np.where(rows >= 0, rows, np.inf).argmin(axis=1)
    own, _ = heuristic_channels(fleet, sizes, pair)
    planned = planned_channels(fleet, sizes, pair, own)
    for i, (c, b) in enumerate(zip(presets, sizes, strict=True)):
        assert cost_model.channels(c, "all_gather", int(b), *PAIRS[pair[i]])[0] == planned[i]


@pytest.mark.timing
def test_a_call_is_quick_enough_to_stand_in_for_the_library():
    c = cluster("dgx-h100-2x8")
    sizes = [3_000_000 + 16 * i for i in range(50)]

    def ask():
        for b in sizes:
            cost_model.cost_table(c, "all_gather", b)
            cost_model.channels(c, "all_gather", b, *cost_model.choice(c, "all_gather", b))

    ask()  # a job repeats its message sizes: what counts is the call with a known size
    best = min(_timed(ask) for _ in range(5)) / len(sizes)
    assert best < 30e-6, f"{best * 1e6:.1f} us a call"


def _timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize(("name", "plateau"), [("dgx-h100-1x8", 1.0), ("dgx-h100-2x8", 1.4)])
def test_an_all_reduce_is_priced_as_its_two_halves_on_the_ring(name, plateau):
    """But for the latency of Simple over nodes, which NCCL counts 1.4 times."""
    c, n_bytes = cluster(name), 2**26
    whole, half = (cost_model.cost_table(c, func, n_bytes)[1] for func in ("all_reduce", "all_gather"))
    least = cost_model.cost_table(c, "all_gather", 1)[1]  # the latencies alone
    both = 2 * half - [6.6, 14.0, 8.4]
    more = (plateau - 1) * (2 * least[2] - 8.4)
    assert whole == pytest.approx(both + np.array([0, 0, more]), rel=1e-5)
    ran = [cost_model.channels(c, func, n_bytes, "ring", "simple") for func in ("all_reduce", "all_gather")]
    assert ran[0] == ran[1]


def test_all_reduces_are_priced_as_nccl_s_library_does():
    """Of 2.28.9, one GPU a node, over sockets; GPU, driver and kernels replaced by CPU code. It has no LL128 there, and
    its tree of two nodes has twice the bandwidth of the ring."""
    preset = cluster("one-gpu-2ranks-socket")
    rows = pd.read_csv(DATA / "nccl_on_cpu" / "all_reduce_prices.csv")
    assert len(rows) == 38 and set(rows["nodes"]) == {2, 4}
    for row in rows.itertuples():
        c = resize(preset, int(row.nodes), nccl="2.28.9")
        c = replace(c, tree=replace(c.tree, bw_intra=2 * c.ring.bw_intra))
        tree, ring = cost_model.cost_table(c, "all_reduce", int(row.bytes))[:2]
        told = [row.us_tree_ll, -1, row.us_tree_simple, row.us_ring_ll, -1, row.us_ring_simple]
        assert [*tree, *ring] == pytest.approx(told, rel=1e-6)


def test_small_all_reduces_go_over_trees_and_large_ones_over_the_switch():
    """By the formulas of NCCL 2.28.9 for graphs of DGX H100. No table reaches NVLS and NVLS Tree."""
    one, two = cluster("dgx-h100-1x8"), cluster("dgx-h100-2x8")
    assert cost_model.choice(two, "all_reduce", 2**16) == ("tree", "ll")
    assert cost_model.choice(two, "all_reduce", 2**20) == ("tree", "ll128")
    assert cost_model.choice(one, "all_reduce", 2**25) == ("nvls", "simple")
    assert cost_model.choice(two, "all_reduce", 2**25) == ("nvls_tree", "simple")
    assert cost_model.choice(cluster("one-gpu-per-node-8x1"), "all_reduce", 2**28) == ("ring", "simple")
    with pytest.raises(ValueError, match="no channels of all_reduce with nvls/simple: only of ring/ll"):
        cost_model.channels(one, "all_reduce", 2**28, "nvls", "simple")


def test_cluster_files_and_what_is_wrong_with_them(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "dgx-h100-2x8"\nn_nodes = 3\nring = { channels = 4, bw_intra = 48.0, bw_inter = 40.0 }\n'
    )
    c = cluster(str(path))
    assert (c.name, c.n_ranks, c.ring.channels, c.comm_channels) == ("mine", 24, 4, 16)
    cases = {
        "n_nodes = 1\n": "missing gpus_per_node",
        'like = "dgx-h100-2x8"\nn_node = 3\n': "did you mean 'n_nodes'",
        'like = "dgx-h100-2x8"\nn_nodes = 0\n': "n_nodes must lie",
        'like = "dgx-h100-2x8"\nnccl = "new"\n': "'new' is no release of NCCL: give one like 2.28.9",
        'like = "dgx-h100-2x8"\nring = { channels = 4, bw_intra = nan, bw_inter = 40.0 }\n': "bw_intra",
        "like = [": "not TOML",
    }
    for i, (text, message) in enumerate(cases.items()):
        bad = tmp_path / f"bad{i}.toml"
        bad.write_text(text)
        with pytest.raises(ValueError, match=message):
            cluster(str(bad))
    with pytest.raises(ValueError, match="did you mean dgx-h100-"):
        cluster("dgx-h10-2x8")
    with pytest.raises(ValueError, match="cannot read"):
        cluster(str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(("release", "has_pat"), [("2.22.3", False), ("2.23.4", True)])
def test_pat_came_with_2_23_for_one_gpu_a_node(release, has_pat):
    c = clusters.resize(clusters.find("one-gpu-per-node-8x1", None), nccl=release)
    tables = [cost_model.cost_table(c, func, 2**k) for func in FUNCS.values() for k in range(10, 33)]
    assert {bool(table[ALGOS.index("pat"), PROTOS.index("simple")] >= 0) for table in tables} == {has_pat}


def test_a_preset_that_has_several_sizes_is_named_with_one():
    with pytest.raises(ValueError, match="presets are"):
        clusters.find("dgx-h200", None)
