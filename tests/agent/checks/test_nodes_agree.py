"""`doctor --trace NODE0 --trace NODE1` compares the ranks of all nodes: a tuner sees those of its own node only."""

import json

import pandas as pd
import pytest
import recordings_made
from command import invoke
from synthetic_trace import write_run


@pytest.fixture
def nodes(tmp_path):
    """Results folders of two nodes with a rank each."""
    found = []
    for rank in (0, 1):
        folder = tmp_path / f"node{rank}"
        write_run(folder / "trace", search=4, final=2)
        for name in ("events-*", "steps-*", "comms-*"):
            (path,) = (folder / "trace").glob(f"{name}.parquet")
            rows = pd.read_parquet(path)
            rows[rows["rank"] == rank].to_parquet(path)
        found.append(folder)
    return found


def change(folder, **values):
    """Change the first call that a table answered."""
    (path,) = (folder / "trace").glob("events-*.parquet")
    rows = pd.read_parquet(path)
    row = rows.index[rows["table_generation"] > 0][0]
    for name, value in values.items():
        rows.loc[row, name] = value
    rows.to_parquet(path)


def doctor(*folders):
    asked = [part for folder in folders for part in ("--trace", folder)]
    told = json.loads(invoke(["doctor", *asked, "--json"]).stdout)
    return told["checked"]["settings"], [one for one in told["findings"] if one["name"] == "mismatch"]


def test_one_node_alone_says_that_it_cannot_know(nodes):
    found = "not known: no collective was recorded on two ranks"
    assert doctor(nodes[0]) == (found, [])  # an emulated job has fewer ranks than GPUs: no host lacks
    header = nodes[0] / "trace" / "header.json"
    header.write_text(header.read_text().replace('"emulated": true', '"emulated": false'))
    assert doctor(nodes[0]) == (f"{found}; give --trace for the results of each host of the job", [])


def test_nodes_that_agree(nodes):
    said, findings = doctor(*nodes)
    assert said.endswith("collectives compared, 0 with different settings") and not findings


def test_one_call_with_another_setting_is_found_and_shown(nodes):
    change(nodes[1], proto="ll", n_channels=3)
    said, (finding,) = doctor(*nodes)
    assert said.endswith(", 1 with different settings")
    assert "rank 1: ring/ll/3" in finding["what"] and finding["must_change"]


def test_a_folder_that_is_given_twice_hides_nothing(nodes):
    """Before: 0 with different settings, and one node alone was said to be compared."""
    change(nodes[1], n_channels=3)
    assert doctor(nodes[0], nodes[0], nodes[1])[0].endswith(", 1 with different settings")
    assert doctor(nodes[0], nodes[0])[0].startswith("not known")


def test_a_message_of_another_size_is_a_fault_of_the_job(nodes):
    change(nodes[1], n_bytes=17, n_channels=3)
    asked = ["doctor", "--trace", nodes[0], "--trace", nodes[1], "--json"]
    found = {one["name"]: one["cure"] for one in json.loads(invoke(asked).stdout)["findings"]}
    assert "fault of the job" in found["sizes"] and "mismatch" not in found


def test_communicators_with_captured_calls_are_not_compared(nodes):
    """NCCL does not count captured calls alike on all ranks: later numbers mean other calls."""
    for node, where in ((nodes[0], {"captured": True}), (nodes[1], {"n_channels": 3})):
        change(node, **where)
    assert "CUDA graphs" in doctor(*nodes)[0]


def test_recordings_of_other_tools_are_not_compared(tmp_path):
    said, findings = doctor(recordings_made.kineto(tmp_path / "kineto"))
    assert said == "not compared: another tool's recording does not number the calls" and not findings


def test_another_number_of_the_table_is_no_other_setting(nodes):
    change(nodes[1], table_generation=99)
    assert not doctor(*nodes)[1]


def test_a_slow_rank_of_another_node_is_looked_for(nodes):
    """One node alone has one rank here: too little to know. Kernels' durations need no common clock."""
    one, both = ([part for node in some for part in ("--trace", node)] for some in (nodes[:1], nodes))
    said = [
        json.loads(invoke(["doctor", *asked, "--json"]).stdout)["checked"]["ranks' times"]
        for asked in (one, both)
    ]
    assert said[0].startswith("not known") and "no rank" in said[1]
