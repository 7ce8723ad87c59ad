"""Upgrades: every changed cell of two releases' plans is found and no other; tables are checked and travel."""

import csv
import json
from pathlib import Path

import pytest
import recordings_made
from dynamiccl.agent.cli import app
from dynamiccl.envs import upgrade
from dynamiccl.envs.nccl.table_env import from_env, to_env
from dynamiccl.envs.nccl.tables import load_table, to_json
from dynamiccl.envs.sim.clusters import cluster
from dynamiccl.traces.records import Decision, Rule, Table
from typer.testing import CliRunner

DATA = Path(__file__).parent / "data"
FUNCS = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
ALL = 2**63 - 1


def plans(release):
    """What the real library planned: (func, bytes) -> (algo/proto/channels, offered pairs, price of the choice)."""
    found = {}
    for row in csv.DictReader((DATA / f"nccl_decisions_h100_1x8_{release}.csv").open()):
        ran = f"{row['algo']}/{row['proto']}/{row['nChannels']}".lower()
        offered = {k[3:].lower() for k, v in row.items() if k.startswith("us_") and v}
        price = float(row[f"us_{row['algo']}_{row['proto']}"])
        found[FUNCS[row["coll"]], int(row["nBytes"])] = ran, offered, price
    return found


def test_every_changed_cell_of_two_real_releases_is_found_and_no_other():
    old, new = plans("2.28.9"), plans("2.30.7")
    messages = [upgrade.Message(8, 1, func, n_bytes) for func, n_bytes in old]
    found = {
        (x.message.func, x.message.n_bytes): x
        for x in upgrade.changes(messages, cluster("dgx-h100-1x8"), "2.28.9", "2.30.7")
    }
    assert set(found) == set(old) == set(new)
    really = {k for k in old if old[k][:2] != new[k][:2]}
    assert {k for k, x in found.items() if x.is_change} == really
    for key, x in found.items():
        assert (x.before, x.after) == (old[key][0], new[key][0])
        assert x.price == pytest.approx(new[key][2] / old[key][2], rel=1e-4)


def test_a_new_algorithm_is_seen():
    """PAT came with 2.23, for one GPU a node."""
    messages = [upgrade.Message(8, 8, func, 1 << k) for func in FUNCS.values() for k in range(10, 32)]
    found = upgrade.changes(messages, cluster("one-gpu-per-node-8x1"), "2.22.3", "2.23.4")
    assert all(x.new == ("pat/simple",) and x.is_change and not x.gone for x in found)
    back = upgrade.changes(messages, cluster("one-gpu-per-node-8x1"), "2.23.4", "2.22.3")
    assert all(x.gone == ("pat/simple",) and not x.after.startswith("pat") for x in back)
    assert not any(x.is_change for x in upgrade.changes(messages, cluster("one-gpu-per-node-8x1"), "2.30.7", "2.30.7"))


def test_rules_are_checked_under_the_new_release():
    c = cluster("dgx-h100-1x8")

    def state(rule, messages=None):
        (row,) = upgrade.holds(Table(1, (rule,)), c, "2.30.7", messages)
        return row["state"]

    big = (1 << 27) + 1, 1 << 28
    assert state(Rule(8, 1, "all_gather", *big, Decision("ring", "ll128", 8))) == "holds"
    assert state(Rule(8, 1, "all_gather", *big, Decision("pat", "simple"))) == "refused"
    assert state(Rule(8, 1, "all_gather", 1 << 30, 1 << 30, Decision("ring", "ll"))) in ("refused", "holds")
    assert state(Rule(8, 1, "all_gather", *big, Decision("ring", "simple", 32))) in ("fewer", "holds")
    own = upgrade.changes([upgrade.Message(8, 1, "all_gather", 1 << 28)], c, "2.30.7", "2.30.7")[0].before.split("/")
    assert state(Rule(0, 0, "all_gather", 1 << 28, 1 << 28, Decision(own[0], own[1]))) == "same"
    other = [upgrade.Message(8, 1, "all_gather", 1 << 20)]
    assert state(Rule(8, 1, "all_gather", *big, Decision("ring", "ll128")), other) == "unmatched"


def test_diff_of_a_table_and_of_a_recording(tmp_path):
    rules = (Rule(16, 2, "all_gather", (1 << 27) + 1, 1 << 28, Decision("ring", "ll128", 8)),)
    (tmp_path / "t.json").write_text(to_json(Table(1, rules)))
    args = ["--nccl", "2.28.9", "--nccl", "2.30.7", "--cluster", "dgx-h100-2x8"]
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "t.json"), *args, "--json"])
    told = json.loads(result.stdout)
    assert told["rules"][0]["state"] == "holds" and told["messages"] == 2
    log = recordings_made.nccl_log(tmp_path / "a.log")
    result = CliRunner().invoke(app, ["diff", str(log), *args, "--table", str(tmp_path / "t.json")])
    assert result.exit_code == 0 and "unmatched" in result.stdout and "2 messages" in result.stdout
    for wrong, says in ((["--nccl", "2.28.9"], "two releases"), (args[:4], "--cluster")):
        result = CliRunner().invoke(app, ["diff", str(log), *wrong])
        assert result.exit_code == 2 and says in result.stderr


def test_a_table_goes_to_nccls_variables_and_back_with_what_is_lost(tmp_path):
    whole = Table(1, (Rule(0, 0, "all_gather", 0, ALL, Decision("nvls", "simple")),
                      Rule(0, 0, "reduce_scatter", 0, ALL, Decision("ring", "ll"))))  # fmt: skip
    variables, lost = to_env(whole)
    assert variables == {
        "NCCL_ALGO": "allgather:nvls;reducescatter:ring",
        "NCCL_PROTO": "allgather:simple;reducescatter:ll",
    }
    assert len(lost) == 1 and "no longer choose" in lost[0]
    (tmp_path / "e").write_text("".join(f"export {k}='{v}'\n" for k, v in variables.items()))
    assert load_table(tmp_path / "e").rules == whole.rules
    part = Table(1, (Rule(16, 2, "all_gather", 0, 1 << 20, Decision("ring", "ll128", 8)),
                     Rule(16, 2, "all_gather", (1 << 20) + 1, ALL, Decision("ring", "simple"))))  # fmt: skip
    variables, lost = to_env(part)
    assert variables["NCCL_PROTO"] == "allgather:ll128,simple"
    said = " ".join(lost)
    for word in ("for all sizes", "16 ranks", "8 channels", "LL128 is safe", "one mask"):
        assert word in said
    with pytest.raises(ValueError, match="are a mask"):
        from_env("NCCL_ALGO=allgather:ring\nNCCL_PROTO=allgather:ll128,simple")
    with pytest.raises(ValueError, match="not for one collective"):
        from_env("NCCL_ALGO=ring\nNCCL_PROTO=ll")


@pytest.mark.parametrize("text", ['{"dynamiccl_table": ' + "[" * 200_000, "{" + " " * (5 << 20)])
def test_a_hostile_table_is_one_line(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    result = CliRunner().invoke(app, ["apply", str(tmp_path / "t.json"), "--convert", "csv"])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
