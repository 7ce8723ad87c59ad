"""Whose calls a recording of another tool holds: processes of several hosts, ranks in several groups, nodes."""

import json
import sqlite3
from contextlib import closing

import pytest
import recordings_made as made
from command import invoke
from dynamiccl.envs.replay.recordings import named, on_cluster
from dynamiccl.traces.importers.found import rank_in_name
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.queries.costs import slot_costs


def calls_of(trace):
    return slot_costs(trace.events, {0}, {1})["calls"].tolist()


def test_processes_of_two_hosts_with_one_number_are_two(tmp_path):
    """Containers. Before: one process with twice the calls, and twice the share of the step."""
    folder = made.kineto(tmp_path / "profiles")
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        document["distributedInfo"]["pid"] = 77
        path.write_text(json.dumps(document))
    exports = tmp_path / "exports"
    exports.mkdir()
    for rank in (0, 1):
        made.nsys(exports / f"rank{rank}.sqlite", ranks=(rank,))
    with closing(sqlite3.connect(exports / "rank1.sqlite")) as base:
        for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME"):
            base.execute(f"UPDATE {table} SET globalTid = globalTid - (1 << 24)")
        base.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = globalPid - (1 << 24)")
        base.commit()
    for recorded in (folder, exports):
        trace = read_recording([recorded])
        assert calls_of(trace) == [2, 1] and trace.events["pid"].nunique() == 2
        assert set(trace.steps["pid"]) == set(trace.events["pid"])


@pytest.mark.parametrize("kind", ["inspector", "log"])
def test_logs_of_two_hosts_with_one_number_of_process_are_two(tmp_path, kind):
    """Before: an Inspector's two processes were one, and two hosts' logs of NCCL were refused as one log twice."""
    if kind == "inspector":
        folder = made.inspector(tmp_path / "a")
        for path in folder.iterdir():
            text = path.read_text()
            if '"rank": 1' in text:
                path.write_text(text.replace("node7", "node8").replace('"pid": 501', '"pid": 500'))
    else:
        folder = tmp_path / "a"
        folder.mkdir()
        text = made.nccl_log(folder / "node7.log").read_text()
        other = text.replace("node7", "node8").replace(" rank 0 ", " rank 8 ").replace(" rank 1 ", " rank 9 ")
        (folder / "node8.log").write_text(other)
    trace = read_recording([folder])
    n_processes = 2 if kind == "inspector" else 4
    assert trace.events["pid"].nunique() == n_processes
    told = json.loads(invoke(["advise", str(folder), "--json"]).stdout)
    assert told["slots"][0]["calls"] == 2 * made.N_STEPS


def test_the_nodes_that_a_recording_tells_stay(tmp_path):
    """Before: 8 ranks on 8 nodes were 8 ranks on one wherever --cluster was given."""
    folder = made.inspector(tmp_path / "a")
    for path in folder.iterdir():
        text = path.read_text().replace('"n_ranks": 16', '"n_ranks": 8')
        path.write_text(text.replace('"nnodes": 2', '"nnodes": 8'))
    trace = read_recording([folder], ranks_per_node=8)
    assert set(trace.events["n_nodes"]) == {8}
    assert not any("assumed packed" in note for note in trace.header["notes"])


def test_nodes_of_a_group_whose_ranks_are_not_told_are_said_to_be_assumed(tmp_path):
    told = read_recording([made.kineto(tmp_path / "a")], ranks_per_node=8)
    untold = read_recording([made.nsys(tmp_path / "b.sqlite")], ranks_per_node=8)
    note = "on which nodes the ranks of a group lie: assumed packed on as few as hold them"
    assert note in untold.header["notes"] and note not in told.header["notes"]
    assert set(untold.events["n_nodes"]) == {2}


def of_groups(path, ranks, job=False):
    """The made export of these processes of 16, whose communicators are those of HSDP: 8 ranks that shard, 2 that
    hold the same; ``job``: and one of all."""
    made.nsys(path, ranks=ranks, told_ranks=False)
    with closing(sqlite3.connect(path)) as base:
        for rank in ranks:
            groups = [(100 + rank // 8, 8, rank % 8), (200 + rank % 8, 2, rank // 8)] + [(1, 16, rank)] * job
            for number, size, place in groups:
                told = {"NCCL communicator ID": number, "No. of ranks": size, "Rank": place}
                when = (made.BASE - 9000, made.BASE - 1000)
                row = (*when, None, "ncclCommInitRank", ((500 + rank) << 24) + 1, json.dumps(told))
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        base.commit()
    return path


def test_a_jobs_ranks_are_those_of_the_files_names_not_of_a_group(tmp_path):
    """HSDP. Before: rank 8 was rank 0 of its shard group, "both hold step 0 of rank 0", whatever its file was named."""
    for rank in (0, 8):
        of_groups(tmp_path / f"rank{rank}.sqlite", (rank,))
    assert set(read_recording([tmp_path]).events["rank"]) == {0, 8}
    for rank in (0, 8):
        (tmp_path / f"rank{rank}.sqlite").rename(tmp_path / f"{'ab'[rank // 8]}.sqlite")
    trace = read_recording([tmp_path])  # one tells no rank that all its communicators agree on
    left_out = f"left out: {tmp_path / 'b.sqlite'} does not say which rank it is of: name the files rank0"
    assert set(trace.events["rank"]) == {0} and any(n.startswith(left_out) for n in trace.header["notes"])


def test_a_process_without_communicators_is_no_fault_of_the_export(tmp_path):
    """Before: "a field is not what an export of Nsight Systems holds there", of a whole file."""
    path = made.nsys(tmp_path / "job.sqlite", ranks=(0, 1))
    with closing(sqlite3.connect(path)) as base:
        kernel = "shortName FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE gridX = 132"
        (name,) = base.execute(f"SELECT {kernel}").fetchone()
        columns = "start, end, globalPid, deviceId, shortName, gridX, correlationId"
        row = made.BASE, made.BASE + 1000, 900 << 24, 2, name, 132, 999999
        base.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        base.commit()
    assert {0, 1} <= set(read_recording([path]).events["rank"])


def test_the_communicator_of_the_whole_job_tells_ranks(tmp_path):
    """It has all processes that are given; the widest of one process alone may be any group."""
    for node in (0, 1):
        of_groups(tmp_path / f"node{node}.sqlite", (8 * node, 8 * node + 1), job=True)
    assert set(read_recording([tmp_path]).events["rank"]) == {0, 1, 8, 9}


def test_without_the_ranges_that_made_communicators_sizes_are_those_of_the_cluster(tmp_path):
    """Before: the bytes of one rank were taken for the whole, and another call's settings were advised."""
    traces = []
    for told in (True, False):
        read = read_recording([made.nsys(tmp_path / f"{told}.sqlite", ranks=(0,), told_ranks=told)])
        traces.append(on_cluster(read, named("dgx-h100-2x8")))
    sizes = [
        sorted(set(zip(t.events["func"], t.events["n_bytes"], t.events["n_ranks"], strict=True)))
        for t in traces
    ]
    assert sizes[0] == sizes[1]
    notes = [" ".join(trace.header["notes"]) for trace in traces]
    assert "not told: taken to be all 16 of the cluster" in notes[1] and "not told" not in notes[0]


def test_a_number_that_two_names_share_is_no_rank(tmp_path):
    """nsys -o %h_%p on a host of rack 12. Before: "both hold step 0 of rank 12"."""
    for rank in (0, 1):
        made.nsys(tmp_path / f"r12-node3_50{rank}.sqlite", ranks=(rank,))
    assert set(read_recording([tmp_path]).events["rank"]) == {0, 1}


def test_a_date_in_a_name_is_no_rank(tmp_path):
    """Before: all calls were dropped, "none says which collective it is"."""
    folder = made.flight(tmp_path / "dumps")
    dump = sorted(folder.iterdir())[0]
    dated = tmp_path / "trace_20261128"
    dated.write_bytes(dump.read_bytes())
    assert rank_in_name(tmp_path / "rank20261128.json") is None
    assert len(read_recording([dated]).events)


#: How releases of NCCL tell of the n-th communicator that was split off another one, after "parent ADDRESS".
SPLITS = {
    "2.18 to 2.20": lambda n: "color 77 key 0 commId 0x5eed",
    "2.21 to 2.29": lambda n: f"splitCount {n} color 77 key 0",
    "2.30 and later": lambda n: f"childCount {n} color 77 key 0",
}


def log_of_splits(folder, said):
    """A log each of two ranks: two communicators split off the same one, with one all_gather on the first of them and
    two on the second. Addresses differ between the processes."""
    folder.mkdir()
    for rank in (0, 1):
        who = f"node7:{500 + rank}:{500 + rank} [{rank}] NCCL INFO "
        place = f"rank {rank} nranks 2 cudaDev {rank} nvmlDev {rank} busId 1b000"
        lines = [f"ncclCommInitRankConfig comm 0xa{rank} {place} commId 0xabc - Init START"]
        for n in (1, 2):
            child = f"ncclCommSplit comm 0x{n}{rank} {place} parent 0xa{rank} {said(n)}"
            lines += [f"{child}- Init START", f"{child} - Init COMPLETE"]
        for n in (1, 2, 2):
            made_of = "count 1048576 datatype 7 op 0 root 0"
            lines.append(
                f"AllGather: opCount 0 sendbuff 0x1 {made_of} comm 0x{n}{rank} [nranks=2] stream 0x3"
            )
        (folder / f"rank{rank}.log").write_text("".join(f"{who}{line}\n" for line in lines))
    return folder


@pytest.mark.parametrize("release", SPLITS)
def test_a_split_communicator_is_one_on_all_ranks_and_no_other(tmp_path, release):
    """Before: one for each rank, because its parent's address is of one process; and all splits of a rank in one."""
    events = read_recording([log_of_splits(tmp_path / "logs", SPLITS[release])]).events
    calls = events.groupby("comm_id").apply(lambda e: list(zip(e["rank"], e["seq"], strict=True)))
    assert sorted(sorted(each) for each in calls) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (1, 0)]]


def test_a_grown_communicator_keeps_the_number_that_all_its_ranks_tell(tmp_path):
    """Of its last line ranks of the communicator that it grew from tell their parent, new ranks do not."""
    path = made.nccl_log(tmp_path / "log")
    lines = path.read_text().splitlines()
    place = "rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 1b000"
    grown = f"ncclCommGrow comm 0x550 {place} parent 0x77 childCount 1 color 0 key 0 - Init COMPLETE"
    lines.insert(3, f"node7:500:600 [0] NCCL INFO {grown}")
    path.write_text("\n".join(lines) + "\n")
    events = read_recording([path]).events
    assert set(events["comm_id"]) == {made.COMM} and set(events["rank"]) == {0, 1}
