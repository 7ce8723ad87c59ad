"""Importers of NVIDIA's own tools: NCCL Inspector and nccl-tests."""

import json

import pytest
from dynamiccl.traces.files import Trace
from dynamiccl.traces.importers import import_files

# Inspector ----------------------------------------------------------------------------------------


def inspector(verbose, marker, rank=2):
    head = {"id": "0x7f8c496ae9f661", "comm_name": "dp", "rank": rank, "n_ranks": 8, "nnodes": 1}
    meta = {"inspector_output_format_version": "v4.3" if marker else "v4.0", "hostname": "node7", "pid": 1639453}
    own = {"header": head, "metadata": {**meta, "dump_timestamp_us": 1748030377748202}}
    lines = [{**own, "dump_stats": {"coll_records": 2, "coll_dropped_since_last_dump": 5}}] if marker else []
    for sn, (coll, us) in enumerate([("ReduceScatter", 41057), ("AllGather", 40000), ("AllReduce", 50000)]):
        size = 2147483648
        whole = size * (1 if coll == "AllReduce" else 8)
        perf = {"coll": coll, "coll_algo": "RING", "coll_proto": "SIMPLE", "coll_sn": 1231 + sn}
        perf |= {"coll_msg_size_bytes": size, "coll_exec_time_us": us, "coll_timing_source": "kernel_gpu"}
        perf |= {"coll_algobw_gbs": whole / us / 1e3}
        if verbose:
            at = 1752867229235000 + sn * 100_000
            kernels = [{"channel_id": c, "kernel_start_ts": at + 181 + c, "kernel_stop_ts": at + us} for c in range(4)]
            perf["event_trace_ts"] = {"coll_start_ts": at + 59, "coll_stop_ts": at + 64, "kernel_events": kernels}
        lines.append(({} if marker else own) | {"coll_perf": perf})
    return "\n".join(json.dumps(line) for line in lines) + "\n"


@pytest.mark.parametrize("marker", [True, False])
def test_inspector_verbose(tmp_path, marker):
    (tmp_path / "a.log").write_text(inspector(verbose=True, marker=marker))
    result = import_files("inspector", [tmp_path / "a.log"], tmp_path / "t")
    assert result.n_timed == 3 and not any("end to end" in n for n in result.notes)
    assert any("dropped 5 calls" in n for n in result.notes) == marker
    trace = Trace.read(tmp_path / "t")
    row = trace.events.iloc[0]
    assert (row["comm_id"], row["rank"], row["n_ranks"], row["n_nodes"]) == (0x7F8C496AE9F661, 2, 8, 1)
    assert (row["func"], row["algo"], row["proto"], row["n_channels"]) == ("reduce_scatter", "ring", "simple", 4)
    assert row["seq"] == 1231 and row["pid"] == 1639453 and trace.header["host"] == "node7"
    assert row["enqueue_ns"] == 1752867229235059_000 and row["start_ns"] == 1752867229235181_000
    assert row["end_ns"] - row["start_ns"] == 41057_000
    # One rank's share is logged for these two, the whole buffer is what NCCL's tuner is asked about.
    assert trace.events["n_bytes"].tolist() == [8 * 2147483648, 8 * 2147483648, 2147483648]


def test_inspector_plain_lays_calls_end_to_end(tmp_path):
    whole = inspector(verbose=False, marker=False)
    (tmp_path / "a.log").write_text(whole + '{"header": {"id": "0x7f')
    result = import_files("inspector", [tmp_path / "a.log"], tmp_path / "t")
    assert any("end to end" in n for n in result.notes) and any("1 lines were not whole" in n for n in result.notes)
    events = Trace.read(tmp_path / "t").events
    assert (events["end_ns"] - events["start_ns"]).tolist() == [41057_000, 40000_000, 50000_000]
    assert events["start_ns"].tolist()[1:] == events["end_ns"].tolist()[:-1]


def test_inspector_that_logs_the_whole_buffer(tmp_path):
    line = json.loads(inspector(verbose=False, marker=False).splitlines()[0])
    line["coll_perf"]["coll_algobw_gbs"] /= 8
    (tmp_path / "a.log").write_text(json.dumps(line))
    import_files("inspector", [tmp_path / "a.log"], tmp_path / "t")
    assert Trace.read(tmp_path / "t").events["n_bytes"].tolist() == [2147483648]


# nccl-tests ---------------------------------------------------------------------------------------

TEXT = """\
# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: reduce_scatter_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8388608 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   6899 on     node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6900 on     node-b device  0 [0000:05:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        131072     float     sum      -1    35.21   29.78   14.89      0    34.90   30.04   15.02      0
  8589934592    1073741824     float     sum      -1  1.2e+05   71.58   35.79    N/A    96000   89.48   44.74    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 27.6
"""


def test_nccl_tests_text(tmp_path):
    (tmp_path / "out.txt").write_text(TEXT)
    import_files("nccl-tests", [tmp_path / "out.txt"], tmp_path / "t")
    trace = Trace.read(tmp_path / "t")
    assert trace.header["nccl"] == "2.28.9" and trace.header["host"] == "node-a"
    events = trace.events
    assert (events["end_ns"] - events["start_ns"]).tolist() == [35_210, 34_900, 120_000_000, 96_000_000]
    assert events["n_bytes"].tolist() == [1 << 20] * 2 + [1 << 33] * 2
    assert set(events["func"]) == {"reduce_scatter"} and set(events["dtype"]) == {"float32"}
    assert set(events["n_ranks"]) == {2} and set(events["n_nodes"]) == {2} and set(events["algo"]) == {"unknown"}


def test_nccl_tests_json(tmp_path):
    devices = [{"rank": 0, "hostname": "node-a", "device": 0}]
    results = [
        {"size": 1 << 20, "type": "bfloat16", "out_of_place": {"time": 35.5}, "in_place": {"time": 34.5}},
        {"size": 1 << 21, "type": "bfloat16", "out_of_place": None, "in_place": {"time": 50.0}},
    ]
    results[1]["in_place_per_iter"] = {"min_us": 49.0, "times_us": [49.0, 51.0]}
    document = {"version": 2, "args": ["./build/all_gather_perf", "-g", "8"], "nccl_version": 22809}
    document |= {"env": ["HOME=/root", "NCCL_ALGO=Ring", "NCCL_PROTO=^LL"], "results": results}
    document["config"] = {"nthreads": 1, "ngpus": 8, "devices": devices}
    (tmp_path / "r.json").write_text(json.dumps(document))
    import_files("nccl-tests", [tmp_path / "r.json"], tmp_path / "t")
    events = Trace.read(tmp_path / "t").events
    assert (events["end_ns"] - events["start_ns"]).tolist() == [35_500, 34_500, 49_000, 51_000]
    assert set(events["n_ranks"]) == {8} and set(events["func"]) == {"all_gather"}
    assert set(events["algo"]) == {"ring"} and set(events["proto"]) == {"unknown"}  # '^LL' forbids one, forces none


def test_nccl_tests_csv(tmp_path):
    text = "section,collective,size_bytes,dtype,oop_time_us,ip_time_us\nA,all_gather,1048576,float,2189.16,2190.15\n"
    (tmp_path / "r.csv").write_text(text + "B,alltoall,1,float,1,1\nC,reduce_scatter,2097152,half,,100\n")
    import_files("nccl-tests", [tmp_path / "r.csv"], tmp_path / "t")
    events = Trace.read(tmp_path / "t").events
    assert (events["end_ns"] - events["start_ns"]).tolist() == [2_189_160, 2_190_150, 100_000]
    assert events["func"].tolist() == ["all_gather", "all_gather", "reduce_scatter"]
