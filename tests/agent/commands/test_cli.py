"""The command line is frozen: programs and people's fingers rely on names, options and exit statuses.

``PYTHONPATH=tests/helpers python tests/agent/commands/test_cli.py`` writes what is there now to
``data/command_line.json``; a change belongs in the changelog.
"""

import io
import json
import re
import subprocess
import sys
from importlib.metadata import version

import click
import pytest
from command import COMMANDS, NAMES, invoke, named
from dynamiccl.agent.checks.doctor import Facts
from dynamiccl.agent.commands import refusing
from dynamiccl.agent.daemon.console import show_summary
from dynamiccl.agent.policies.rule import ROUNDS, ROUNDS_A_SLOT
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.search.config import BUDGET_STEPS, SearchConfig
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.traces.header import commit
from dynamiccl.traces.reasons import NotTuning, RunEnds
from paths import DATA, ROOT
from rich.console import Console

OVER = RunEnds.JOB_STATUS(status=0)

FROZEN = DATA / "command_line.json"


def interface():
    """{command: its arguments and options}, the options that all have left out."""
    found = {}
    for name in NAMES:
        params = named(name).params
        words = [
            "/".join(param.opts + param.secondary_opts)
            if isinstance(param, click.Option)
            else param.name.upper()
            for param in params
        ]
        found[f"dynamiccl {name}"] = sorted(words)
    return found


def run(*words):
    return invoke(words)


def test_the_package_itself_is_the_command_line():
    """Before: "No module named dynamiccl.__main__", which users try where no script is on their PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl", "doctor", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("Usage: dynamiccl doctor"), done.stderr
    assert done.stdout == invoke(["doctor", "--help"]).stdout


def test_names_and_options_are_those_on_record():
    assert interface() == json.loads(FROZEN.read_text()), (
        "meant? then say so in CHANGELOG.md and run PYTHONPATH=tests/helpers python tests/agent/commands/test_cli.py"
    )


def test_the_help_lists_every_command_in_a_group_with_its_line():
    """Before: eleven of them in one sentence without a word of what they do."""
    shown = run("--help").output
    listed = re.findall(r"(?m)^  ([a-z][a-z-]+) +[A-Z]", shown)
    assert listed == list(COMMANDS.commands) and all(f"\n{title}:\n" in shown for title in COMMANDS.sections)
    assert run().output == run("-h").output == shown


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help_that_teaches_and_refuses_what_it_does_not_know(name, monkeypatch):
    """Before: at 80 columns lines broke raggedly and examples in the middle of a word."""
    monkeypatch.setenv("COLUMNS", "80")
    told = run(*name.split(), "--help")
    assert told.exit_code == 0 and len(told.output.split()) > 25
    assert max(map(len, told.output.splitlines())) <= 80 and "\b" not in told.output
    refused = run(*name.split(), "--no-such-option")
    assert (
        refused.exit_code == 2
        and refused.stderr.count("\n") == 1
        and f"dynamiccl {name} --help" in refused.stderr
    )


def test_a_group_of_commands_has_help_too():
    """Before: `lab --help` was an error, although "every command has --help"."""
    told = run("lab", "--help")
    listed = re.findall(r"(?m)^  ([a-z][a-z-]+) +[A-Z]", told.output)
    assert told.exit_code == 0 and [f"lab {name}" for name in listed] == [
        n for n in NAMES if n.startswith("lab ")
    ]


def test_many_options_stand_in_groups():
    """Before: 31 options of `tune` in one list."""
    titles = re.findall(r"(?m)^(\S.*):$", run("tune", "--help").output)
    assert len(titles) >= 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tuna"], "No such command 'tuna'. Did you mean 'tune'?"),
        (["lab"], "Missing command. (dynamiccl lab --help)"),
        (["stop"], "give either RUN, the results folder of one run, or --all"),
        (["stop", "--all", "x"], "give either RUN, the results folder of one run, or --all"),
        (["top", "--every", "x"], "Invalid value for '--every': 'x' is not a valid float range"),
        (["stop", "--wait", "-1", "x"], "Invalid value for '--wait': -1.0 is not in the range x>=0"),
        (["stop", "--wait", "nan", "x"], "Invalid value for '--wait': 'nan' is not a finite number"),
        (
            ["plan", "--params", "inf", "--ranks", "8"],
            "Invalid value for '--params': 'inf' is not a finite number",
        ),
        (["top", "--every", ""], "Invalid value for '--every': must not be empty: leave it out"),
        (["stop", ""], "Invalid value for '[RUN]': must not be empty: leave it out"),
        (["tune", "--out", "--once"], "Invalid value for '--out': needs a value, and --once is an option"),
        (["tune", "--bud", "0.1"], "No such option '--bud'. (Did you mean one of: '--budget', '--out'?)"),
        (["tune", "--"], "no command stands after --"),
        (["tune", "a.py", "--", "b"], "'a.py' is no option: a job's command stands after --"),
        (["apply", "x", "true"], "'true' is no option: a job's command stands after --"),
        (["tune", "--seed", "-1", "--", "true"], "Invalid value for '--seed': -1 is not in the range x>=0"),
        (["env", "--seed", "-1"], "Invalid value for '--seed': -1 is not in the range x>=0"),
        (["show", "x", "--", "job"], "Got unexpected extra argument (job)"),
        (["tune", "--steps", "9", "--", "true"], "--steps is for the built-in job: put it into your COMMAND"),
        (["env", "--name", "../x"], "--name is a folder's name without slashes, not '../x'"),
    ],
)
def test_a_slip_of_the_finger_is_one_line(words, says):
    done = run(*words)
    assert done.exit_code == 2 and done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1


def test_programs_can_ask_every_command_that_tells_something():
    """`--json` is the same everywhere: a flag, for stdout."""
    for name in set(NAMES) - {"apply", "completion"}:  # the job itself; a script
        flags = [param for param in named(name).params if "--json" in param.opts]
        assert [param.is_flag for param in flags] == [True], name


def test_the_scales_of_the_emulation_are_told_as_they_are():
    usual, said = Emulated(), " ".join(run("tune", "--help").stdout.split())
    for what, scale in (("this many emulated bytes", usual.bytes_scale), ("this many", usual.compute_scale)):
        assert f"counts as {what}. Default: {scale:g}." in said


def test_the_limits_of_a_search_are_told_as_they_are():
    """Before: "a share of the job's time", although a short job may lose as much as one of 4,000 steps."""
    said = " ".join(run("tune", "--help").stdout.split())
    usual, rule = SearchConfig(), (ROUNDS, ROUNDS_A_SLOT)
    assert f"fewer than {BUDGET_STEPS:,} steps counts as {BUDGET_STEPS:,}" in said
    assert rule == (12, 2) and "Default: 12, or two per slot if that is more" in said
    own = (usual.rounds, usual.rounds_a_slot)
    assert own == (20, 3) and "policies of your own: 20, or three per slot" in said


def test_the_version_is_the_packages_and_names_the_commit():
    """Before: all commits since 26 November were 0.2.0, and nobody could say which one runs."""
    name, number, of = run("--version").output.split()
    assert (name, number) == ("dynamiccl", version("dynamiccl"))
    assert of == f"({(commit() or 'commit not known')[:12]})"
    newest = re.search(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest[1] == number


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["top", "{}/none"], "no run in {}/none"),
        (["advise", "{}/none", "--cluster", "dgx-h100-2x8"], "there is no file or folder {}/none"),
        (
            ["bench", "--suite", "none"],
            "there is no suite none: known are standard, held-out, unseen, mpi-headroom, or a file",
        ),
        (
            ["bench", "--policy", "none:X", "--jobs", "2", "--processes", "1", "--out", "{}"],
            "1 of 1  none:X: refused|error: no entrant finished: none:X: ",
        ),
        (
            ["tune", "--force", "--out", "{}/file/x", "--", "true"],
            "no run can be left in {}/file/x: Not a directory",
        ),
    ],
)
def test_wrong_input_is_named_as_it_was_given(tmp_path, words, says):
    """Before: `top` named another folder, `none:X` came out as an emoji."""
    (tmp_path / "file").touch()
    done = run(*(word.format(tmp_path) for word in words))
    said = " ".join(done.stderr.split("\n"))
    assert done.exit_code == 2 and all(part in said for part in says.format(tmp_path).split("|")), said


@pytest.mark.parametrize("words", [["stop", "{}"], ["tune", "--attach", "{}"]])
def test_a_run_that_is_over_is_said_to_be_over(tmp_path, words):
    """Before: "/dev/shm/... is not a run folder of this user (a folder of its own, mode 0700)"."""
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl.agent.cli", *(word.format(tmp_path) for word in words)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: {tmp_path}: this run has ended"), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("name", "says"), [("", "give the folder of one run, such as {}/task-1"), ("task-1", "or runs on node7")]
)
def test_stop_answers_for_no_run_that_it_cannot_see(tmp_path, name, says):
    """Before: for a folder of two runs "the job stays under NCCL's default", status 0 and a file in it. For a run of
    another node, in a folder that the nodes share, "this run has ended"."""
    out = tmp_path / "task-1"
    (out / "trace").mkdir(parents=True)
    (out / "trace" / "header.json").write_text('{"host": "node7"}')
    (out / "run").symlink_to(tmp_path / "elsewhere")
    done = run("stop", str(tmp_path / name))
    assert done.exit_code == 2 and says.format(tmp_path) in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["task-1"]


def test_stop_names_the_run_of_rank_0_and_its_node(tmp_path):
    """Before: of a job with a folder for each node it named the newest, which is seldom that of rank 0."""
    for task, host in (("task-0", "node3"), ("task-1", "node7")):
        trace = tmp_path / task / "trace"
        trace.mkdir(parents=True)
        (trace / "header.json").write_text(json.dumps({"host": host}))
        kind = "window" if task == "task-0" else "table"
        (trace / "windows.jsonl").write_text(json.dumps({"kind": kind}) + "\n")
    done = run("stop", str(tmp_path))
    assert done.exit_code == 2 and f"such as {tmp_path}/task-0, on node3" in done.stderr, done.stderr


def test_a_run_folder_that_is_gone_is_of_a_run_that_has_ended(tmp_path):
    gone = run("stop", str(tmp_path / "gone"))
    assert gone.exit_code == 2 and "gone: there is no run here: it has ended" in gone.stderr


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [
        (RunEnds.NEVER_SWITCHED(why=NotTuning.OTHER_BACKEND(backend="gloo")), 0, "tune --cluster"),
        (OVER, 0, "too short for a verdict"),
        (RunEnds.JOB_STATUS(status=1), 1, None),
        (RunEnds.BEFORE_A_SWITCH(ended=OVER, why=NotTuning.NO_PROBE()), 0, None),
        (RunEnds.BEFORE_A_SWITCH(ended=OVER, why=NotTuning.NO_STEP()), 0, "such as inference"),
    ],
)
def test_a_run_without_a_result_says_what_to_do(ended, status, says):
    told = {
        "emulated": False,
        "speedup": None,
        "ended": ended.as_json(),
        "trace": "t",
        "report": "r",
        "table": None,
    }
    told |= {"job_status": status, "windows": 9, "failure": None, "not_obeyed": []}
    told |= {"decisions": [], "consistency": {"calls_checked": 0, "mismatches": 0}, "records_lost": 0}
    console = Console(record=True, width=200, file=io.StringIO())
    show_summary(console, RunSummary.of(told))
    text = console.export_text()
    assert says in text if says else "--cluster" not in text and "too short" not in text


def test_the_doctor_says_what_can_be_tuned_without_nccl(monkeypatch):
    monkeypatch.setattr("dynamiccl.agent.checks.doctor.gather", lambda *_: Facts())
    assert "on the emulated cluster only" in run("doctor").stdout
    monkeypatch.setattr("dynamiccl.agent.checks.doctor.gather", lambda *_: Facts(nccl=(2, 30, 7), n_gpus=8))
    assert "emulated" not in run("doctor").stdout


def test_a_reader_of_our_output_that_has_gone_is_no_fault_of_the_input() -> None:
    """Before: `advise ... | head` ended with "error: Broken pipe" and status 2."""
    with pytest.raises(BrokenPipeError), refusing(OSError):
        raise BrokenPipeError


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(interface(), indent=1) + "\n")
    print(f"{len(interface())} commands on record", file=sys.stderr)


def test_bench_looks_for_its_files_before_it_computes():
    """Before: the suite was loaded for 20 s, then "there is no file"."""
    for words in (["--policy", "model.zip"], ["--policy", "weights.npz"], ["--submission", "mine.json"]):
        refused = run("bench", *words)
        assert refused.exit_code == 2 and refused.stderr.count("\n") == 1 and words[1] in refused.stderr
