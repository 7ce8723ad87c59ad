"""Tables at their edges: what is just still one, and what is none."""

import json

import pytest
from dynamiccl.envs.nccl import tables
from dynamiccl.envs.nccl.tables import MAX_BYTES, MAX_TEXT, load_table, to_json
from dynamiccl.traces.records import Decision, Rule, Table

ROW = {"func": "all_gather", "algo": "ring", "proto": "ll"}


def loaded(tmp_path, row):
    """The rule of a table of one row."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"dynamiccl_table": 1, "rules": [row]}))
    (rule,) = load_table(str(path)).rules
    return rule


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (0, 0, 0, MAX_BYTES, 0)),
        ({"min_bytes": 8, "max_bytes": 8}, (0, 0, 8, 8, 0)),
        ({"max_bytes": MAX_BYTES, "n_channels": 1}, (0, 0, 0, MAX_BYTES, 1)),
        ({"n_ranks": 16, "n_nodes": 2}, (16, 2, 0, MAX_BYTES, 0)),
        ({"n_ranks": 2**32 - 1, "n_nodes": 1}, (2**32 - 1, 1, 0, MAX_BYTES, 0)),
    ],
)
def test_a_row_is_read_to_its_last_byte(tmp_path, more, expected):
    rule = loaded(tmp_path, ROW | more)
    found = rule.n_ranks, rule.n_nodes, rule.min_bytes, rule.max_bytes, rule.decision.n_channels
    assert found == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["func"], "may have algo"),
        (ROW | {"size": 1}, "may have algo"),
        (ROW | {"n_channels": 2**32}, "n_channels is a whole number"),
        (ROW | {"n_channels": -1}, "n_channels is a whole number"),
        (ROW | {"n_channels": True}, "n_channels is a whole number"),
        (ROW | {"n_ranks": 2**32, "n_nodes": 1}, "n_ranks is a whole number"),
        (ROW | {"n_ranks": 2}, "together or not at all"),
        (ROW | {"max_bytes": MAX_BYTES + 1}, "max_bytes is a whole number"),
        (ROW | {"min_bytes": True}, "min_bytes is a whole number"),
        (ROW | {"min_bytes": 9, "max_bytes": 8}, "sizes 9 to 8 are no range"),
    ],
)
def test_a_row_beyond_its_edge_is_refused(tmp_path, row, words):
    with pytest.raises(ValueError, match=f"rule 1: .*{words}"):
        loaded(tmp_path, row)


def test_a_file_may_be_as_long_as_it_is_said_and_no_longer(tmp_path):
    path = tmp_path / "long.json"
    text = to_json(Table(1, (ANY,)))
    path.write_text(text + " " * (MAX_TEXT - len(text)))
    assert load_table(path).rules == (ANY,) and MAX_TEXT == 4 * 1024**2
    path.write_text(text + " " * (MAX_TEXT - len(text) + 1))
    with pytest.raises(ValueError, match="over 4 MiB is no table"):
        load_table(path)


def test_a_folder_of_results_stands_for_the_table_in_it(tmp_path):
    with pytest.raises(ValueError, match="the run has confirmed no table"):
        load_table(tmp_path)
    assert tables.TABLE == "table.json" and loaded(tmp_path, ROW) == load_table(tmp_path).rules[0]


CLASS = Rule(16, 2, "reduce_scatter", 8, 4096, Decision("tree", "simple", 4))
ANY = Rule(0, 0, "all_gather", 0, MAX_BYTES, Decision("ring", "ll"))


def test_a_table_comes_back(tmp_path):
    path = tmp_path / "table.json"
    channels = Rule(8, 1, "all_gather", 0, 7, Decision(None, None, 2))
    path.write_text(to_json(Table(1, (ANY, CLASS, channels))))
    assert load_table(path).rules == (ANY, CLASS, channels)
