"""``lab submit``: a small folder without a name in it, and the checker of what somebody gave."""

import json
import os
import shutil
import socket

import numpy as np
import pandas as pd
import pytest
from check_results import main
from command import invoke
from dynamiccl.agent.checks.results.checked import faults
from dynamiccl.agent.checks.results.submit import HEADER, MOST_BYTES, STEPS, SWEEP, build, calls_of
from dynamiccl.traces.records import size_class
from dynamiccl.traces.writer import TraceWriter
from gpu_results import folder
from paths import DATA
from restarted import restarted
from synthetic_trace import ROOT_BYTES, write_run

#: What must never leave: planted wherever a run could hold it.
SECRETS = ("secret-host-17", "jane.doe", "/home/jane/model", "10.1.2.3", "GPU-1b2c3d4e", "0xdeadbeef")


@pytest.fixture
def source(tmp_path):
    """A folder of gpu-check, with secrets in every field that is free text."""
    host, user, path, address, uuid, ident = SECRETS
    path = folder(
        tmp_path / "source",
        np.random.default_rng(0),
        host=host,
        user=user,
        out=path,
        gpu_id=ident,
        environment={
            "NCCL_SOCKET_IFNAME": address,
            "NCCL_IB_HCA": uuid,
            "NCCL_ALGO": path,
            "NCCL_MIN_CTAS": "8",
        },
        versions={"torch": "2.11.0", "nccl": "2.28.9", "python": f"3.12 {user}", "driver": f"580 {host}"},
    )
    (path / "log.txt").write_text(" ".join(SECRETS))
    return path


def words(where):
    return "".join(file.read_text() for file in where.iterdir())


def test_a_submission_holds_times_and_nobodys_name(source, tmp_path):
    sizes = build(source, tmp_path / "out")
    text = words(tmp_path / "out")
    assert set(sizes) == {HEADER, SWEEP, STEPS} and sum(sizes.values()) < MOST_BYTES
    for secret in (*SECRETS, socket.gethostname(), os.path.expanduser("~")):
        assert secret not in text
    header = json.loads((tmp_path / "out" / HEADER).read_text())
    assert header["gpu"] == "NVIDIA H100 80GB HBM3" and header["week"] == "2026-W48"
    assert header["settings"] == {"NCCL_MIN_CTAS": "8"}
    assert header["versions"] == {"torch": "2.11.0", "nccl": "2.28.9"}
    steps = pd.read_csv(tmp_path / "out" / STEPS)
    assert steps["relative"].median() == pytest.approx(1.0, abs=1e-3) and len(steps) == 450
    assert faults(tmp_path / "out") == []


def test_a_tuning_run_is_submitted_by_size_class(tmp_path):
    """The shape of a model stays at home: sizes are powers of two."""
    run = tmp_path / "run"
    shutil.copytree(DATA / "recordings" / "demo", run / "trace")
    build(run, tmp_path / "out")
    text = words(tmp_path / "out")
    header = json.loads((run / "trace" / "header.json").read_text())
    assert f'"{header["host"]}"' not in text and header["kernel"] not in text
    sweep = pd.read_csv(tmp_path / "out" / SWEEP)
    assert len(sweep) and all(size & (size - 1) == 0 for size in sweep["n_bytes"])
    assert faults(tmp_path / "out") == []
    assert main([tmp_path / "out"]) == 1  # the demo's times are emulated


def test_a_tuning_run_says_what_its_tables_asked_for_and_whether_ranks_agreed(tmp_path):
    """Before: what ran was called what was asked for, and each row was right, obeyed and alike."""
    trace = write_run(tmp_path / "run" / "trace", search=4, final=2)[1]
    build(tmp_path / "run", tmp_path / "out")
    sweep = pd.read_csv(tmp_path / "out" / SWEEP)
    assert sweep["right"].isna().all() and sweep["agreed"].all()
    assert set(sweep[sweep["n_bytes"] == ROOT_BYTES]["asked"]) == {"auto"}  # no table has a row for it
    assert (sweep["asked"] != "auto").any() and not [f for f in faults(tmp_path / "out") if "obedience" in f]
    changed = trace.events["proto"].mask(
        (trace.events["rank"] == 1) & (trace.events["seq"] % 3 == 0), "simple"
    )
    with TraceWriter(tmp_path / "bad" / "trace", trace.header) as writer:
        writer.write(trace.events.assign(proto=changed), trace.steps)
    build(tmp_path / "bad", tmp_path / "refused")
    assert any("ranks differ" in fault for fault in faults(tmp_path / "refused"))


def test_a_row_counts_as_the_plugin_reads_it(tmp_path):
    """Before: the first row that applies stood for one of the communicator's class, and channels alone, or a call of
    which NCCL asked nothing, were "not obeyed"."""
    trace = write_run(tmp_path / "run" / "trace", search=4, final=2)[1]

    def table_says(rows_for):
        """The sweep, where each table's rows are those that ``rows_for`` makes of one of its rows."""
        for line in trace.log:
            if line["kind"] == "table":
                rules = line["table"]["rules"]
                line["table"] = line["table"] | {"rules": [row for rule in rules for row in rows_for(rule)]}
        sweep = calls_of(trace)
        return sweep[sweep["n_bytes"] != 2 ** size_class(ROOT_BYTES)]

    of_any = {"n_ranks": 0, "n_nodes": 0, "decision": "tree/ll/4"}
    sweep = table_says(lambda rule: [rule | of_any, rule])
    assert sweep["obeyed"].all() and "tree/ll/4" not in set(sweep["asked"])
    sweep = table_says(lambda rule: [] if rule["n_ranks"] == 0 else [rule | {"decision": "auto/16"}])
    assert sweep["obeyed"].all() and {"auto", "auto/16"} == set(sweep["asked"])
    sweep = table_says(lambda rule: [rule | {"decision": "auto/4"}])
    assert not sweep[sweep["asked"] == "auto/4"]["obeyed"].any()  # 8 or 16 ran
    gathers = trace.events["func"] == "all_gather"
    trace.events["asked_bytes"] = trace.events["n_bytes"].mask(gathers, 0)
    sweep = calls_of(trace)
    assert set(sweep[sweep["func"] == "all_gather"]["asked"]) == {"auto"}


def test_a_communicator_that_was_captured_is_left_out(tmp_path):
    trace = write_run(tmp_path / "run" / "trace", search=4, final=2)[1]
    trace.events.loc[trace.events.index[0], "captured"] = True
    assert calls_of(trace).empty


def test_steps_of_a_job_that_was_started_again_stay_in_order(tmp_path):
    """Before: by their numbers, so that those of two lives took turns."""
    trace = restarted(((40, 100, 40, 20), (40, 80, 40, 21)))
    with TraceWriter(tmp_path / "trace", {"cluster": "h100-2x8", "emulated": True}) as writer:
        writer.write(trace.events, trace.steps)
    build(tmp_path, tmp_path / "out")
    relative = pd.read_csv(tmp_path / "out" / STEPS)["relative"].to_numpy()
    assert len(relative) == 80 and (relative[:40] > 1).all() and (relative[40:] < 1).all()


def test_the_command_prints_what_is_in_it_and_sends_nothing(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = invoke(["lab", "submit", source])
    assert told.exit_code == 0 and "nothing was sent" in told.stdout and '"week": "2026-W48"' in told.stdout
    assert (tmp_path / "submission" / HEADER).exists()
    again = invoke(["lab", "submit", source])
    assert again.exit_code == 2 and "submission" in again.stderr
    made = invoke(["lab", "submit", source, "--out", "another", "--json"])
    assert json.loads(made.stdout)["bytes"][SWEEP] > 0


def test_a_folder_without_times_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    told = invoke(["lab", "submit", tmp_path / "empty"])
    assert told.exit_code == 2 and told.stderr.startswith("error: ") and told.stderr.count("\n") == 1


def spoil_header(where, **changes):
    path = where / HEADER
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil(name, column, change):
    def change_it(where):
        table = pd.read_csv(where / name)
        table[column] = change(table[column])
        table.to_csv(where / name, index=False)

    return change_it


def turned(relative):
    place = np.arange(len(relative)) % 4
    return np.where((place == 1) | (place == 2), relative * 0.95, relative)


#: Damage -> what the checker calls it.
DAMAGES = {
    "a column less": (
        lambda where: pd.read_csv(where / SWEEP).drop(columns="ran").to_csv(where / SWEEP),
        "schema",
    ),
    "another file": (lambda where: (where / "notes.txt").write_text("x"), "schema"),
    "a field that is missing": (lambda where: (where / HEADER).write_text("{}"), "schema"),
    "a host": (lambda where: spoil_header(where, host="node-17"), "privacy"),
    "a path for a commit": (lambda where: spoil_header(where, commit="/home/x"), "privacy"),
    "a setting that names an interface": (
        lambda where: spoil_header(where, settings={"NCCL_SOCKET_IFNAME": "eth0"}),
        "privacy",
    ),
    "a name in a cell": (spoil(SWEEP, "ran", lambda column: "jane@node"), "privacy"),
    "a config that was not obeyed": (spoil(SWEEP, "obeyed", lambda column: False), "obedience"),
    "a wrong result": (spoil(SWEEP, "right", lambda column: False), "obedience"),
    "a time of nothing": (spoil(SWEEP, "p10_us", lambda column: column * 0), "plausibility"),
    "quantiles in no order": (spoil(SWEEP, "p90_us", lambda column: column / 2), "plausibility"),
    "more bytes than a link moves": (spoil(SWEEP, "n_bytes", lambda column: column * 10**6), "plausibility"),
    "a default that differs from itself": (spoil(STEPS, "relative", turned), "A/A"),
    "too much": (lambda where: (where / "NOTE.md").write_text("x" * MOST_BYTES), "size"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_by_name(source, tmp_path, name, capsys):
    build(source, tmp_path / "out")
    assert main([tmp_path / "out"]) == 0
    damage, says = DAMAGES[name]
    damage(tmp_path / "out")
    assert main([tmp_path / "out"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("refused") and any(line.strip().startswith(f"{says}:") for line in lines[2:]), (
        lines
    )
