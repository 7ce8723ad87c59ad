"""How ``dynamiccl tune`` and ``env`` begin: bad input, what a job is started with, what an earlier run left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_process import DYNAMICCL, ENV, run
from command import invoke, refused
from dynamiccl.agent.daemon.request import Request
from dynamiccl.agent.report.outputs import ROOT, begin, claim
from dynamiccl.agent.report.runs import has_measured, state
from dynamiccl.envs.live.locks import Busy, lock
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.sim.emulated.settings import Emulated
from synthetic_trace import write_run
from untouched_run import write_untouched


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--cluster", "dgx-h1000"], "dgx-h100"),
        (["--stage", "4"], "'--stage': 4 is not in the range 0<=x<=3"),
        (["--policy", "alchemy"], "lstm"),
        (["--steps", "50"], "too few"),
        (["--", "no-such-program", "train.py"], "no such program"),
        (["--attach", "x", "--", "true"], "not both"),
        (["--attach", "x", "--headroom", "24"], "dynamiccl env"),
        (["--headroom", "24"], "--headroom needs --untouched RUN"),
        (["--untouched", "x"], "--untouched is for --headroom"),
        (["--headroom", "24", "--untouched", "/nonexistent"], "no trace"),
        (["--cluster", "dgx-h100-2x8", "--compute-scale", "-1"], "above 0"),
        (["--attach", ""], "'--attach': must not be empty"),  # before: the built-in job began to train
        (["--cluster", ""], "'--cluster': must not be empty"),
        (["--"], "no command stands after --"),
        (["true", "--seed", "3"], "'true' is no option: a job's command stands after --, and"),
        (["--attach", "x", "--cluster", "dgx-h100-2x8"], "for the start of a job"),
        (["--again"], "--again needs --attach"),
        (["--bytes-scale", "2", "--", "true"], "give --cluster too"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments, word):
    done = refused(["tune", "--out", tmp_path / "out", *arguments])
    assert done.exit_code == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error:") and word in lines[0], done.stderr


def test_a_tuner_finds_no_run_where_none_is():
    """In a process of its own, which a tuner makes nice."""
    done = run("tune", "--attach", "/nonexistent")
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error:") and "no run here" in lines[0], done.stderr


def test_no_compiler_is_said_with_the_cure(tmp_path):
    env = {"CC": "no-such-cc", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run("tune", "--cluster", "dgx-h100-2x8", "--out", str(tmp_path / "out"), env=env)
    assert done.returncode == 2 and "install gcc" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_job_without_collectives_is_told_so(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "p = torch.nn.Parameter(torch.zeros(2)); o = torch.optim.SGD([p], lr=0.1)\n"
        "for _ in range(400): p.grad = torch.ones(2); o.step(); time.sleep(0.005)\n"
    )
    done = run("tune", "--out", str(tmp_path / "out"), "--", sys.executable, str(script))
    assert done.returncode == 0 and "nothing to tune" in " ".join(done.stderr.split()), done.stderr


@pytest.mark.slow
def test_a_job_that_never_steps_and_one_that_crashes(tmp_path):
    """Before: exit status 2 for the first, 1 for the second."""
    done = run("tune", "--out", str(tmp_path / "a"), "--", sys.executable, "-c", "pass")
    assert done.returncode == 0 and "NO VERDICT" in done.stderr
    done = run("tune", "--out", str(tmp_path / "b"), "--", sys.executable, "-c", "raise SystemExit(77)")
    assert done.returncode == 77
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["job_status"] == 77


def test_env_is_what_a_shell_can_evaluate(tmp_path):
    done = run("env", "--json")
    variables = json.loads(done.stdout)
    assert set(variables) >= {"DYNAMICCL_RUN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"}
    Path(variables["DYNAMICCL_RUN"], "table").unlink()
    assert run("env").stdout.startswith("export DYNAMICCL_RUN=/")
    assert "NCCL_MIN_NCHANNELS" not in variables
    words = "--headroom", "24", "--untouched", str(write_untouched(tmp_path))
    assert json.loads(run("env", "--json", *words).stdout)["NCCL_MIN_NCHANNELS"] == "24"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_tuner_that_was_started_by_hand_survives_what_slurm_sends(tmp_path, number):
    """Before: `sbatch --signal` ended a tuner that joined the job in a step of its own (`srun --overlap`). It ends with
    its terminal, and sums up: OPERATING.md said that it ignores SIGHUP, as the launcher's tuner does."""
    folder = Path(json.loads(run("env", "--json").stdout)["DYNAMICCL_RUN"])
    words = [*DYNAMICCL, "tune", "--attach", str(folder), "--out", str(tmp_path)]
    # Not as `nohup` leaves it to whoever runs the tests.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    with subprocess.Popen(words, env=ENV, stderr=subprocess.PIPE, text=True, **heard) as tuner:
        said = iter(tuner.stderr.readline, "")
        assert any("waiting for the job's first steps" in line for line in said)
        tuner.send_signal(number)
        if number != signal.SIGHUP:
            time.sleep(0.5)
            tuner.terminate()
        assert tuner.wait(60) == 143 and (tmp_path / "summary.json").exists()
    RunFolder(folder).close(remove=True)


def test_a_job_that_is_joined_on_an_emulated_cluster_is_known_for_one():
    """Before: `env` had no --cluster, and whoever joined such a job by hand was told `"emulated": false`."""
    variables = json.loads(run("env", "--json", "--cluster", "dgx-h100-1x8", "--bytes-scale", "7").stdout)
    assert (variables["DYNAMICCL_CLUSTER"], variables["DYNAMICCL_BYTES_SCALE"]) == ("dgx-h100-1x8", "7.0")
    folder = Path(variables["DYNAMICCL_RUN"])
    assert Request.read(folder, {}).emulated == Emulated("dgx-h100-1x8", 7.0)
    RunFolder(folder).close(remove=True)
    assert "no cluster" in run("env", "--cluster", "dgx-h1000").stderr


def test_headroom_reaches_the_job_before_its_communicators_are_made(tmp_path):
    program = "import os; raise SystemExit('channels ' + os.environ['NCCL_MIN_NCHANNELS'])"
    words = "--headroom", "24", "--untouched", str(write_untouched(tmp_path / "before"))
    run("tune", "--out", str(tmp_path / "out"), *words, "--", sys.executable, "-c", program)
    assert "channels 24" in (tmp_path / "out" / "job.log").read_text()


@pytest.mark.slow
def test_a_run_replaces_what_an_earlier_one_left_in_the_same_folder(tmp_path):
    """Before: its log was appended to, and `top` told the earlier run's verdict until the new one had its own."""
    old = {name: tmp_path / name for name in ("summary.json", "table.json", "report.html", "tuner.log")}
    for path in old.values():
        path.write_text("old")
    (tmp_path / "lock").touch()
    looks = f"import pathlib as p; print([x for x in {[*map(str, old.values())]} if p.Path(x).exists()])"
    assert run("tune", "--out", str(tmp_path), "--", sys.executable, "-S", "-c", looks).stdout == "[]\n"
    for program, kept in (("print(1)", "1\n"), ("print(2)", "2\n"), ("pass", None)):
        run("tune", "--out", str(tmp_path), "--", sys.executable, "-S", "-c", program)
        assert (tmp_path / "job.log").exists() == (kept is not None)
        assert kept is None or (tmp_path / "job.log").read_text() == kept


def test_without_a_job_log_no_file_holds_the_jobs_output(tmp_path):
    """Before: no option switched the copy off, and a shared folder showed each job's output to everybody."""
    job = (sys.executable, "-S", "-c", "print('a secret')")
    done = run("tune", "--no-job-log", "--out", str(tmp_path), "--", *job)
    assert done.returncode == 0 and done.stdout == "a secret\n" and not (tmp_path / "job.log").exists()


def test_a_sites_options_stand_before_the_users(tmp_path):
    """Before: each user's command line decided alone about budget and folder."""
    site = {"DYNAMICCL_TUNE_OPTIONS": f"--policy sweep --out '{tmp_path / 'of the site'}'"}
    assert "no policy 'magic'" in run("tune", "--policy", "magic", "--", "true", env=site).stderr
    joined = run("tune", "--attach", "/nonexistent", env={"DYNAMICCL_TUNE_OPTIONS": "--or-untuned --stage 2"})
    assert "no run here" in joined.stderr, (
        "the launcher starts the tuner in this way: the run has its options"
    )

    assert run("show", str(tmp_path), env=site).returncode != 0, "of tune alone"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--budgt=0.01", "No such option '--budgt'"),
        ("--budget", "Option '--budget' requires an argument"),
        ("--stage 4", "Invalid value for '--stage': 4 is not in the range 0<=x<=3"),
        ("--out 'no end", "No closing quotation"),
        ("--quiet -- false", "it contains a command"),
        ("--quiet --", "no command stands after --"),
        ("false", "'false' is no option: a job's command stands after --"),
        ("--attach runs/tune/latest", "--attach is for the command line"),
        ("--help", "No such option '--help'"),
        ("--headroom 8", "--headroom and --untouched are for the command line: they are of one job"),
        ("--search-slots 4", "--search-slots is N:FOLDER"),
        ("--policy alchemy", "no policy 'alchemy'"),
    ],
)
@pytest.mark.parametrize("off", [False, True])
def test_a_mistake_in_the_sites_options_means_untuned(monkeypatch, options, why, off):
    """Before: all options were ignored, so a job could spend five times the site's budget, or did not start."""
    site = {"DYNAMICCL_TUNE_OPTIONS": options, **({"DYNAMICCL_OFF": "1"} if off else {})}
    done = run("tune", "--", sys.executable, "-S", "-c", "print('trained'); raise SystemExit(7)", env=site)
    assert (done.returncode, done.stdout) == (7, "trained\n"), done.stderr
    said = "DYNAMICCL_OFF=1" if off else f"DYNAMICCL_TUNE_OPTIONS has a mistake: {why}"
    assert said in done.stderr and "the job runs without it" in done.stderr and done.stderr.count("\n") == 1
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    own = refused(["tune", "--stage", "5"])
    assert own.exit_code == 2 and own.stderr.startswith("error: Invalid value for '--stage'"), (
        "the user's own mistake"
    )
    without = refused(["tune", "--attach", "/nonexistent"])
    assert without.exit_code == 2 and "ask the operators" in without.stderr
    for told in (own, without):
        assert told.stderr.count("\n") == 1


def test_the_documented_options_of_a_site_are_for_jobs_with_and_without_a_command():
    """Before: `dynamiccl tune --cluster X` and `dynamiccl demo` ended with "--or-untuned needs a COMMAND"."""
    site = {"DYNAMICCL_TUNE_OPTIONS": "--budget 0.01 --or-untuned --no-job-log"}
    done = run("tune", "--cluster", "dgx-h1000", env=site)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "no cluster preset" in done.stderr
    assert done.stderr.count("\n") == 1
    untuned = run("tune", "--cluster", "dgx-h1000", "--", "false", env=site)
    assert untuned.returncode == 1 and "the job runs without it" in untuned.stderr


def test_a_value_of_the_user_overrides_the_sites(monkeypatch):
    """Before: the site's options counted as given by the user. Its --steps refused each job with a COMMAND. A site's
    budget is the most that a user may ask for: before, users could raise it."""
    monkeypatch.setenv("DYNAMICCL_TUNE_OPTIONS", "--budget 0.01 --once --steps 500")
    asked = []
    monkeypatch.setattr("dynamiccl.agent.commands.tune._start", asked.append)
    for user in ([], ["--budget", "0.02", "--seed", "4"], ["--budget", "0.005"]):
        assert invoke(["tune", *user, "--", "true"]).exit_code == 0
    site, more, less = asked
    assert (site["budget"], site["once"], site["seed"]) == (0.01, True, 0)
    assert (more["budget"], more["once"], more["seed"]) == (0.01, True, 4)
    assert less["budget"] == 0.005


def test_a_sites_file_holds_whatever_the_user_has_in_the_environment(monkeypatch, tmp_path):
    """Before: a site's cap was a variable, which each user could unset."""
    site = tmp_path / "options"
    site.write_text("# ticket 4711\n--budget 0.01\n--no-memory\n")
    monkeypatch.setattr("dynamiccl.agent.commands.tune.SITE_FILE", site)
    monkeypatch.setenv("DYNAMICCL_TUNE_OPTIONS", "--budget 0.5 --steps 500")
    asked, alone = [], []
    monkeypatch.setattr("dynamiccl.agent.commands.tune._start", asked.append)
    assert invoke(["tune", "--budget", "0.3", "--", "true"]).exit_code == 0
    assert (asked[0]["budget"], asked[0]["no_memory"], asked[0]["steps"]) == (0.01, True, 1000)
    monkeypatch.setattr(
        "dynamiccl.agent.commands.tune.start_untuned", lambda said, why: alone.append(why) or exit(7)
    )
    for spoil, why in (
        (lambda: site.write_text("--budgt 1"), f"{site} has a mistake: No such option"),
        (lambda: site.unlink() or site.mkdir(), f"{site} has a mistake: [Errno 21]"),
    ):
        spoil()
        assert invoke(["tune", "--", "true"]).exit_code == 7
        assert alone.pop().startswith(why)


def begin_as(monkeypatch, folder, job_and_step):
    """The folder, within or beside ``folder``, that a run of this Slurm step takes; what it says; a summary is left."""
    for name, value in zip(("SLURM_JOB_ID", "SLURM_STEP_ID"), job_and_step.split("."), strict=True):
        monkeypatch.setenv(name, value)
    said = []
    out, fd = begin(folder, said.append)
    os.close(fd)
    is_empty = not (out / "summary.json").exists()
    (out / "summary.json").write_text(job_and_step)
    return out, is_empty, said


@pytest.mark.parametrize(
    ("first", "second", "is_another"),
    [
        ("77.0", "77.1", True),
        ("77.0", "77.0", False),  # requeued: its steps count from 0 again
        ("77.0", "78.1", False),
        ("77.", "77.1", False),  # started by the batch script itself, without srun
        (".", "77.1", False),
    ],
)
def test_a_step_of_a_slurm_job_does_not_delete_another_steps_results(
    tmp_path, monkeypatch, first, second, is_another
):
    """Before: the second `srun` of a script with the same --out deleted what the first one had left, without a word.
    Then it was refused, and a loop that starts a job until it succeeds did not start it again."""
    out = tmp_path / "x"
    assert begin_as(monkeypatch, out, first) == (out, True, [])
    found, is_empty, said = begin_as(monkeypatch, out, second)
    assert is_empty
    if is_another:
        assert (found, (out / "summary.json").read_text()) == (tmp_path / "x-2", first)
        assert len(said) == 1 and said[0].endswith(f"those of this step go to {found}")
    else:
        assert (found, said) == (out, [])


def test_a_folder_that_is_used_again_says_nothing_of_the_earlier_job(tmp_path, monkeypatch):
    """Before: its trace stayed until the new tuner wrote one, and callbacks logged the old times into the new job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    out, fresh = tmp_path / "x", tmp_path / "fresh"
    write_run(out / "trace", search=4, final=6)
    (out / "steps.json").write_text('{"step_ms": [123.4]}')
    (out / "trace" / "notes.txt").write_text("of the user")
    assert state(out)["step"] and state(out)["step_times_ms"] and has_measured(out)
    for folder in (out, fresh):
        os.close(begin(folder, pytest.fail)[1])
    assert state(out) == state(fresh) | {"run": str(out)} and not has_measured(out)
    assert [path.name for path in (out / "trace").iterdir()] == ["notes.txt"]


def test_a_task_of_slurm_has_one_folder(tmp_path, monkeypatch):
    """Before: the tuner, which inherits the variables, left its results in task-1/task-1, and job.log was in task-1."""
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    out, fd = claim(tmp_path)
    assert out == tmp_path / "task-1"
    with pytest.raises(Busy):  # the daemon looks then whether it is its launcher that has the folder
        claim(out)
    os.close(fd)


@pytest.mark.parametrize("left", ["job.log", "summary.json", "trace", None])
@pytest.mark.parametrize("n_tasks", [1, 2])
def test_each_start_of_a_requeued_job_has_folders_of_its_own(tmp_path, monkeypatch, left, n_tasks):
    """Before: of several tasks the tuner left its results in task-0-2/task-0, the launcher in task-0-2, and `top` did
    not find them. A run that was killed before its first summary was deleted by the next start. ``left``: None of one
    that was killed at once."""
    monkeypatch.chdir(tmp_path)
    slurm = {"JOB_ID": "77", "STEP_ID": "0", "NTASKS": str(n_tasks)}
    for start in ("77.0", "77.0-2", "77.0-3"):
        for task in range(n_tasks):
            for name, value in {**slurm, "PROCID": str(task)}.items():
                monkeypatch.setenv(f"SLURM_{name}", value)
            launchers, fd = begin(None, pytest.fail)
            expected = ROOT / start / (f"task-{task}" if n_tasks > 1 else "")
            assert launchers == expected and (ROOT / "latest").resolve() == expected.resolve()
            os.close(fd)
            tuners, fd = claim(launchers.resolve())
            os.close(fd)
            assert tuners == launchers.resolve()
            if left:
                (launchers / left).write_text(start)
    found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"**/{left}") if path.is_file())
    assert len(found) == (3 * n_tasks if left else 0), "what an earlier start left stays"


def test_each_step_of_a_loop_finds_a_free_folder_and_a_requeued_one_its_own(tmp_path, monkeypatch):
    """Results of other jobs in a numbered folder stay: nobody has named it. A run that is not over has its folder."""
    out = tmp_path / "x"
    (tmp_path / "x-2").mkdir()
    (tmp_path / "x-2" / "table.json").write_text("of somebody else")
    assert begin_as(monkeypatch, out, "77.0")[0] == out
    busy = lock(begin_as(monkeypatch, out, "77.1")[0] / "lock", "")
    assert begin_as(monkeypatch, out, "77.2")[0] == tmp_path / "x-4"
    os.close(busy)
    assert [begin_as(monkeypatch, out, f"77.{n}")[:2] for n in (0, 1)] == [
        (out, True),
        (tmp_path / "x-3", True),
    ]
    assert (tmp_path / "x-2" / "table.json").exists()
    busy = lock(out / "lock", "")
    with pytest.raises(Busy, match="belongs to a run that is not over"):
        begin_as(monkeypatch, out, "77.5")
    os.close(busy)
    monkeypatch.chdir(out)
    assert begin_as(monkeypatch, Path("."), "77.6")[0] == tmp_path / "x-5"
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    (tmp_path / "y").mkdir()
    assert begin_as(monkeypatch, tmp_path / "y", "77.0")[0] == tmp_path / "y" / "task-1"
    assert begin_as(monkeypatch, tmp_path / "y", "77.1")[0] == tmp_path / "y-2" / "task-1"


@pytest.mark.slow
def test_a_loop_of_srun_trains_again(tmp_path):
    """Before: "give this step another --out", status 2, and no training."""
    for step, left in (("0", "x"), ("1", "x-2")):
        env = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": step}
        words = ("--out", str(tmp_path / "x"), "--", sys.executable, "-S", "-c", "raise SystemExit(7)")
        done = run("tune", *words, env=env)
        assert done.returncode == 7 and (tmp_path / left / "run").is_symlink(), done.stderr
        assert (f"go to {tmp_path / 'x-2'}\n" in done.stderr) == (step == "1")
