"""Tables at their edges: what is just still one, and what is none."""

import json

import pytest
from dynamiccl.envs.nccl import tables
from dynamiccl.envs.nccl.table_json import to_json
from dynamiccl.envs.nccl.tables import MAX_BYTES, MAX_TEXT, from_csv, load_table, to_csv
from dynamiccl.traces.records import Decision, Rule, Table

ROW = {"func": "all_gather", "algo": "ring", "proto": "ll"}


def loaded(tmp_path, row, **more):
    """The rule of a table of one row."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"dynamiccl_table": 1, "rules": [row]}))
    (rule,) = load_table(str(path), **more).rules
    return rule


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (0, 0, 0, MAX_BYTES, 0)),
        ({"min_bytes": 8, "max_bytes": 8}, (0, 0, 8, 8, 0)),
        ({"max_bytes": MAX_BYTES, "n_channels": 1}, (0, 0, 0, MAX_BYTES, 1)),
        ({"min_bytes_per_rank": 4, "max_bytes_per_rank": 8, "n_ranks": 16, "n_nodes": 2}, (16, 2, 64, 128, 0)),
        ({"n_ranks": 2**32 - 1, "n_nodes": 1}, (2**32 - 1, 1, 0, MAX_BYTES, 0)),
        (dict.fromkeys(["min_bytes", "max_bytes"]) | {"min_bytes_per_rank": 0, "max_bytes_per_rank": 1, "n_channels": 2,
         "n_ranks": 8, "n_nodes": 1}, (8, 1, 0, 8, 2)),
    ],
)  # fmt: skip
def test_a_row_is_read_to_its_last_byte(tmp_path, more, expected):
    rule = loaded(tmp_path, ROW | more)
    found = rule.n_ranks, rule.n_nodes, rule.min_bytes, rule.max_bytes, rule.decision.n_channels
    assert found == expected


def test_the_ranks_of_all_rows_turn_bytes_per_rank_into_bytes_where_a_row_names_none(tmp_path):
    assert loaded(tmp_path, ROW | {"max_bytes_per_rank": 4}, n_ranks=8).max_bytes == 32
    with pytest.raises(ValueError, match="give n_ranks, or --ranks"):
        loaded(tmp_path, ROW | {"max_bytes_per_rank": 4})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (["func"], "may have algo"),
        (ROW | {"size": 1}, "may have algo"),
        (ROW | {"n_channels": 2**32}, "whole numbers"),
        (ROW | {"n_channels": -1}, "whole numbers"),
        (ROW | {"n_channels": True}, "whole numbers"),
        (ROW | {"n_ranks": 2**32, "n_nodes": 1}, "whole numbers"),
        (ROW | {"n_ranks": 2}, "together or not at all"),
        (ROW | {"max_bytes": MAX_BYTES + 1}, "whole number of bytes"),
        (ROW | {"min_bytes": True}, "whole number of bytes"),
        (ROW | {"min_bytes": 9, "max_bytes": 8}, "sizes 9 to 8 are no range"),
    ],
)
def test_a_row_beyond_its_edge_is_refused(tmp_path, row, words):
    with pytest.raises(ValueError, match=f"rule 1: .*{words}"):
        loaded(tmp_path, row)


def test_a_file_may_be_as_long_as_it_is_said_and_no_longer(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text("#" * MAX_TEXT)
    assert load_table(path).rules == () and MAX_TEXT == 4 * 1024**2
    path.write_text("#" * (MAX_TEXT + 1))
    with pytest.raises(ValueError, match="over 4 MiB is no table"):
        load_table(path)


def test_a_folder_of_results_stands_for_the_table_in_it(tmp_path):
    with pytest.raises(ValueError, match="the run has confirmed no table"):
        load_table(tmp_path)
    assert tables.TABLE == "table.json" and loaded(tmp_path, ROW) == load_table(tmp_path).rules[0]
    (tmp_path / "env").write_text("export NCCL_ALGO='allgather:ring'\nexport NCCL_PROTO='allgather:ll'\n")
    assert load_table(tmp_path / "env").rules[0].decision == Decision("ring", "ll")


LINE = "allgather,0,{high},ring,ll,{channels},{nodes},{ranks}{rest}"


def line(high=-1, channels=-1, nodes=-1, ranks=-1, rest=""):
    return LINE.format(high=high, channels=channels, nodes=nodes, ranks=ranks, rest=rest)


def test_a_line_of_nvidias_is_read_to_its_edges():
    whole = Rule(0, 0, "all_gather", 0, MAX_BYTES, Decision("ring", "ll"))
    assert from_csv(line()).rules == from_csv(line(high=MAX_BYTES, rest=",1,0")).rules == (whole,)
    assert from_csv(line(rest=",2")).rules == from_csv(line(rest=",1,1")).rules == ()  # groups, registered buffers
    assert from_csv(line(rest=",-1,-1")).rules == (whole,)
    assert from_csv(line(nodes=1, ranks=2**32 - 1)).rules[0].n_ranks == 2**32 - 1
    # The first line counts, byte by byte.
    parts = from_csv("\n".join([line(high=7), "allgather,7,8,tree,ll,-1,-1,-1"])).rules
    assert [(rule.min_bytes, rule.max_bytes) for rule in parts] == [(0, 7), (8, 8)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(rest=",1,0,0"), "11 fields"),
        (line(nodes=1, ranks=2**32), "no communicator"),
        (line(nodes=0, ranks=8), "no communicator"),
        (line(nodes=-2, ranks=8), "no communicator"),
        (line(high=MAX_BYTES + 1), "are no range"),
        ("allgather,5,4,ring,ll,-1,-1,-1", "sizes 5 to 4 are no range"),
    ],
)
def test_a_line_of_nvidias_beyond_its_edge_is_refused(text, words):
    with pytest.raises(ValueError, match=f"line 1: .*{words}"):
        from_csv(text)


def test_what_a_line_lies_around_keeps_both_its_ends():
    parts = from_csv("\n".join(["allgather,8,15,tree,ll,-1,-1,-1", line(high=31)])).rules
    assert [(rule.min_bytes, rule.max_bytes) for rule in parts] == [(8, 15), (0, 7), (16, 31)]


@pytest.mark.parametrize("given", [{"nodes": 2}, {"ranks": 16}])
def test_a_line_that_names_nodes_or_ranks_alone_is_completed_or_refused(given):
    (rule,) = from_csv(line(**given), n_ranks=16, n_nodes=2).rules
    assert (rule.n_ranks, rule.n_nodes) == (16, 2)
    with pytest.raises(ValueError, match="alone: say how many"):
        from_csv(line(**given))


CLASS = Rule(16, 2, "reduce_scatter", 8, 4096, Decision("tree", "simple", 4))
ANY = Rule(0, 0, "all_gather", 0, MAX_BYTES, Decision("ring", "ll"))


def test_a_table_comes_back_from_either_format(tmp_path):
    path = tmp_path / "table.json"
    channels = Rule(8, 1, "all_gather", 0, 7, Decision(None, None, 2))
    path.write_text(to_json(Table(1, (ANY, CLASS, channels))))
    assert load_table(path).rules == (ANY, CLASS, channels)
    assert from_csv(to_csv(Table(1, (ANY, CLASS)))).rules == (CLASS, ANY)  # a class comes first
    with pytest.raises(ValueError, match="cannot set channels alone"):
        to_csv(Table(1, (channels,)))
