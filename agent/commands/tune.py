"""``dynamiccl tune``: start or join a job, and tune it while it trains."""

from __future__ import annotations

import contextlib
import json as json_module
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...envs.live.job_ends import FEWEST_STEPS
from ...traces.here import program
from . import (
    ALL_REDUCE,
    BYTES_SCALE,
    CLUSTER,
    COMPUTE_SCALE,
    FORCE,
    HEADROOM,
    OR_UNTUNED,
    OUTPUT,
    PATH,
    RUN,
    SEARCH,
    UNTOUCHED,
    Number,
    become_owner,
    check_site,
    command,
    emulation_here,
    fail,
    given,
    job,
    option,
    refuse_scales,
    refuse_traps,
    refusing,
    run_alone_if_off,
    run_folder,
    start_untuned,
    tell_whose_code,
    untouched_from,
    untuned_if_refused,
)

if TYPE_CHECKING:
    from ...envs.sim.emulated.settings import Emulated
    from ..daemon.stopping import Signals
    from ..report.summary import RunSummary

#: Nice value of the tuner: it gets a third of the job's share if both want one core. It must not be lower: even without
#: an idle core the tuner must start, keep its trials alive, and finish within the minute that the launcher waits.
NICE = 5
OWN = "The built-in job, without COMMAND"
#: A site's options of `tune`, on each node. The user's own options override their values.
SITE_FILE = Path("/etc/dynamiccl/options")
#: The same where that file is not there. Users can unset a variable, so a cap that must hold stands in the file.
SITE_OPTIONS = "DYNAMICCL_TUNE_OPTIONS"


class Call(NamedTuple):
    """The values of all options, the names of those that the user gave, and the site's options."""

    values: dict[str, Any]
    given: frozenset[str]
    of_site: Mapping[str, Any]


@command
@job("The job, after --. Default: the built-in ZeRO job.")
@option("--stage", type=click.IntRange(0, 3), default=3, group=OWN, help="ZeRO stage, 0 to 3.")
@option("--steps", type=int, default=1000, group=OWN, help=f"Optimizer steps, at least {FEWEST_STEPS}.")
@option("--ranks", type=int, group=OWN, help="Processes. Default: one per GPU; 2 without GPUs.")
@option(
    "--policy",
    default="lstm",
    group=SEARCH,
    help="lstm, expected-improvement, sweep, ..., FILE.npz, FILE.zip, MODULE:NAME or a folder.",
)
@option(
    "--budget",
    type=Number(0),
    default=0.05,
    group=SEARCH,
    help="Maximum cost, as a share of the job's time. A job of fewer than 4,000 steps counts as 4,000. "
    "0: only watch.",
)
@option(
    "--search-slots",
    metavar="N:FOLDER",
    group=SEARCH,
    help="At most N of the tuners that name this FOLDER search at a time; one more only watches its job. On a "
    "file system without locks all of them search.",
)
@option("--once", is_flag=True, group=SEARCH, help="Stop at the verdict: no later trials, no monitoring.")
@ALL_REDUCE
@option("--bitwise", is_flag=True, group=SEARCH, help="Tune only all_gather, so that sums keep their order.")
@option(
    "--windows",
    type=click.IntRange(1),
    group=SEARCH,
    help="Maximum number of exploring windows. Default: 12, or two per slot if that is more; "
    "policies of your own: 20, or three per slot.",
)
@option(
    "--window-steps",
    type=click.IntRange(1),
    group=SEARCH,
    help="Steps per look at the current table. Default: 5 to 10, by the noise.",
)
@HEADROOM
@UNTOUCHED
@option(
    "--attach",
    type=RUN,
    metavar="RUN",
    help="Join a running job: started with `dynamiccl env`, or a run without tuner.",
)
@option("--again", is_flag=True, help="With --attach: start again after `dynamiccl stop`.")
@option(
    "--kill-after",
    type=Number(0),
    help="Kill all processes of the job if it has not ended this many seconds after a signal to end.",
)
@FORCE
@OR_UNTUNED
@option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    help="Seed of the built-in job, the emulation and the policy.",
)
@option(
    "--out",
    type=PATH,
    group=OUTPUT,
    help="Folder; old results in it are replaced. Default: a new folder in runs/tune, named after the Slurm "
    "job or the time; runs/tune/latest leads to the newest.",
)
@option(
    "--no-job-log",
    is_flag=True,
    group=OUTPUT,
    help="Do not copy the output of COMMAND to job.log in this folder.",
)
@option(
    "--json", is_flag=True, group=OUTPUT, help="Print the summary as JSON to stdout, and all else to stderr."
)
@option("--quiet", is_flag=True, group=OUTPUT, help="Print only the verdict.")
@option(
    "--memory",
    metavar="URL",
    group=OUTPUT,
    help="Folder or URL (s3://... too) where tables are kept for the next run.",
)
@option("--no-memory", is_flag=True, group=OUTPUT, help="Use no stored table, and store none.")
@option(
    "--log-to",
    group=OUTPUT,
    help="Also log to tensorboard (OUT/tensorboard), wandb or mlflow. Needs that package.",
)
@CLUSTER
@BYTES_SCALE
@COMPUTE_SCALE
@click.pass_context
def tune(ctx: click.Context, /, **_: Any) -> None:
    """Tune a training job while it trains.

    Each trial alternates another table of settings with the current one, at first NCCL's default. A statistical test
    decides which stays. Start it on every node: the one with rank 0 tunes. Exit status, signals and output are the
    job's. `dynamiccl show` tells what happened, OPERATING.md what it may do to a job.

    \b
    dynamiccl tune                             # the built-in job
    dynamiccl tune --cluster dgx-h100-2x8      # emulated, on the CPU with gloo
    dynamiccl tune -- torchrun --nproc-per-node 8 train.py
    dynamiccl tune --attach runs/tune/latest   # a new tuner for a running job
    """
    # Import nothing large: the job waits for these imports. The tuner imports the rest while the job starts.
    call = _call(ctx)
    asked = call.values
    command, headroom, json = asked["command"], asked["headroom"], asked["json"]
    _check(call)
    run_alone_if_off(command, headroom, json)
    if asked["attach"]:
        if headroom or asked["untouched"]:
            fail(
                "the job already has its communicators: give --headroom and --untouched to `dynamiccl env` before the "
                "job starts"
            )
        if asked["all_reduce"]:
            fail(
                "the job counts its collectives already: give --all-reduce to `dynamiccl env` before it starts"
            )
        _attach(call, asked["attach"], asked["again"])
        return
    _check_program(command)
    with untuned_if_refused(command if asked["or_untuned"] else None, headroom, json):
        _start(asked)


def _call(ctx: click.Context) -> Call:
    """The user's options within what the site's allow. For the others the site's count, then the defaults.

    A tuner that joins a run gets the site's apart: those that the run was started with count before them.
    """
    source = str(SITE_FILE)
    try:
        source, text = _site_text()
        of_site = _of_site(source, text)
    except (OSError, ValueError) as error:
        start_untuned(ctx.params, f"{source} has a mistake: {' '.join(str(error).split())}")
    said = _within_site({name: ctx.params[name] for name in given(ctx)}, of_site)
    instead = {} if "attach" in said else of_site
    return Call({**ctx.params, **instead, **said}, frozenset(said), of_site)


def _site_text() -> tuple[str, str]:
    """Where the site's options stand, and their text, "" if it gives none. Raises OSError or ValueError if the file
    cannot be read."""
    try:
        lines = SITE_FILE.read_text(encoding="utf-8").splitlines()
        return str(SITE_FILE), "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    except (FileNotFoundError, NotADirectoryError):
        return SITE_OPTIONS, os.environ.get(SITE_OPTIONS, "")


def _of_site(source: str, text: str) -> dict[str, Any]:
    """The options that the site gives. Raises ValueError for a mistake in them."""
    if not text:
        return {}
    try:
        ctx = tune.make_context(source, shlex.split(text), help_option_names=[])
    except click.UsageError as error:
        raise ValueError(error.format_message().rstrip(".")) from None
    if ctx.params["command"]:
        raise ValueError("it contains a command")
    found = {name: ctx.params[name] for name in given(ctx)}
    check_site(found)
    return found


def _within_site(said: dict[str, Any], of_site: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said, with at most the site's budget and the site's slots: no user takes more of a cluster than
    the site gives."""
    if said.get("budget", 0) > (most := of_site.get("budget", math.inf)):
        print(
            f"warning: --budget {said['budget']:g} is above this site's {most:g}, which holds",
            file=sys.stderr,
        )
        said["budget"] = most
    if "search_slots" in of_site and said.pop("search_slots", None):
        print("warning: this site's --search-slots holds", file=sys.stderr)
    return said


def _start(asked: dict[str, Any]) -> None:
    """Refuse what cannot work, while no job runs yet; then launch the job. Does not return. ``asked``: the options."""
    from ...envs.live.locks import Busy
    from ...envs.nccl.plugin.build import PluginBuildError
    from ...envs.nccl.steps.nvml import gpus
    from ...envs.sim.emulated.settings import Emulated
    from ..daemon.search_slots import parsed
    from ..policies.choosing import check_chooser

    command, cluster = asked["command"], asked["cluster"]
    n_gpus = 0 if cluster else len(gpus())
    if not command and not cluster and n_gpus < 2 and not os.environ.get("DYNAMICCL_CLUSTER"):
        cluster = Emulated().cluster
    scales = asked["bytes_scale"], asked["compute_scale"]
    emulated, facts = emulation_here(cluster, *scales, asked["seed"])
    refuse_traps(command, asked["force"], emulated=emulated is not None, all_reduce=asked["all_reduce"] or "")
    if not command:
        n_processes = asked["ranks"] or (2 if emulated else n_gpus)
        facts |= {"stage": asked["stage"], "n_processes": n_processes}
    with refusing(PluginBuildError, Busy, ValueError, OSError):
        check_chooser(asked["policy"])
        tell_whose_code(asked["policy"])
        if asked["search_slots"]:
            parsed(asked["search_slots"])
        if asked["log_to"]:
            from ..integrations.loggers import check_logger

            check_logger(asked["log_to"])
        _launch(asked, emulated, facts)


def _launch(asked: dict[str, Any], emulated: Emulated | None, facts: dict[str, Any]) -> None:
    """Write the request for the tuner, and become the launcher of the job. Does not return.

    ``asked``: the options; ``facts``: of the job; for the built-in job also its stage and processes. Raises the errors
    that :func:`tune` refuses.
    """
    from ...envs.live.locks import lock
    from ...envs.nccl.plugin.build import job_env
    from ...envs.nccl.run_folder import LAUNCHER, leave_option, make_folder
    from ..daemon.launcher import Plan, say
    from ..daemon.request import Request, workload
    from ..report.outputs import begin, default_url, full_url, link

    command, own = asked["command"], not asked["command"]
    untouched = untouched_from(asked["headroom"], asked["untouched"])
    memory = None if asked["no_memory"] else asked["memory"] or default_url()
    memory = memory and full_url(memory)
    if memory and "://" in memory:
        from ..daemon.memory import Store

        Store(memory)  # raises ValueError for one that nothing here can open
    try:
        out, fd = begin(asked["out"], say)
    except OSError as error:
        fail(f"no run can be left in {error.filename}: {error.strerror}; choose another --out")
    out = out.resolve()
    log, job_log = _copy_of_output(out, asked), out / "job.jsonl" if own else None
    if job_log:
        job = facts["stage"], asked["steps"], facts["n_processes"], job_log
        command = workload(*job, backend="emulated" if emulated else "nccl", seed=asked["seed"])
    run = make_folder()
    left: dict[str, Any] = Request.among(asked)
    left |= {"out": out, "memory": memory, "emulated": emulated, "job_log": job_log, "launched": not own}
    typed = shlex.join(["dynamiccl", *sys.argv[1:]])
    left |= {"facts": facts, "job": " ".join(command), "typed": typed}
    Request(**left).write(run)
    if untouched:
        untouched.write(run)
    leave_option(run, asked["all_reduce"])
    link(out, run)
    tuner = [*program(), "tune", "--attach", str(run)]
    of_job = job_env(run, asked["headroom"], asked["all_reduce"])
    environment = {**of_job, **(emulated.env() if emulated else {})}
    locks = [fd, lock(run / LAUNCHER, f"{run} has a launcher already")]
    Plan(
        list(command), tuner, str(run), log, environment, asked["json"], own, asked["kill_after"], locks
    ).become()


def _copy_of_output(out: Path, asked: dict[str, Any]) -> str:
    """The file that keeps the job's output, '' for none. The built-in job prints nowhere else, so it always has one."""
    return "" if asked["command"] and asked["no_job_log"] else str(out / "job.log")


def _attach(call: Call, where: str, again: bool) -> None:
    """Tune a running job with the options of its launcher; this command line overrides them."""
    # Meant for the job. Slurm sends them to all its steps.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICE)  # before anything large is imported, and before there are threads
    from ..daemon.stopping import ended_politely

    with ended_politely() as signals:  # the imports may take seconds beside a job that starts
        summary = _serve(call, where, again, signals)
    raise SystemExit(_exit_code(summary))


def _serve(call: Call, where: str, again: bool, signals: Signals) -> RunSummary:
    """Tune the run at ``where`` to its end, and print what it came to."""
    with refusing(ValueError, OSError):
        path = run_folder(where)  # a wrong one is told before the imports, which take seconds
    from ...envs.live.locks import Busy
    from ...envs.nccl.shm import RunFolder
    from ...traces.files import TraceError
    from ...traces.header import plain
    from ..daemon.console import LiveView, show_summary
    from ..daemon.daemon import Daemon
    from ..daemon.request import Request
    from ..report.outputs import default_url

    with refusing(TraceError, Busy, ValueError, OSError):
        become_owner(path)
        run = RunFolder(path)
        said = {name: call.values[name] for name in call.given}
        has_launcher = Request.read(path, {}).out is not None
        if not has_launcher:  # else its request has the site's options
            said = {**call.of_site, **said}
        if "no_memory" in said:
            said["memory"] = None
        elif not has_launcher:
            said.setdefault("memory", default_url())
        request = Request.read(path, said)
        show = LiveView(request.budget, request.json or request.quiet, not request.launched)
        daemon = Daemon(request, run, again, show.window, show.say)  # one that is refused is told that alone
        if "policy" in said:
            tell_whose_code(request.policy)
        with show:
            summary = daemon.serve(signals)
    if request.json:
        print(json_module.dumps(plain(vars(summary)), indent=2))
    else:
        show.console.quiet = False
        show_summary(show.console, summary, request.quiet)
    return summary


#: Options that mean nothing to a job that runs already.
_OF_START = ("cluster", "bytes_scale", "compute_scale")


def _check(call: Call) -> None:
    asked = call.values
    if asked["all_reduce"] and asked["bitwise"]:
        fail("--bitwise keeps the order of sums and --all-reduce changes it: give one of them")
    if "or_untuned" in call.given and not asked["command"]:  # the site's counts for the jobs that have one
        fail("--or-untuned needs a COMMAND to run: give the job after --")
    if asked["attach"]:
        _check_attach(call)
        return
    if "again" in call.given:
        fail("--again needs --attach: a run that is started was not stopped")
    if asked["command"]:
        _check_command(call)
    elif asked["steps"] < FEWEST_STEPS:
        fail(
            f"{asked['steps']} steps are too few, and seldom reach a verdict: give --steps {FEWEST_STEPS} or more"
        )


def _check_command(call: Call) -> None:
    # A site's scales are for its emulated jobs alone.
    scales = (call.values[name] if name in call.given else None for name in ("bytes_scale", "compute_scale"))
    refuse_scales(call.values["cluster"], *scales)
    for name in ("stage", "steps", "ranks"):
        if name in call.given:
            fail(f"--{name} is for the built-in job: put it into your COMMAND, or leave the COMMAND out")


def _check_attach(call: Call) -> None:
    if call.values["command"]:
        fail("give a command to start or --attach to join one, not both")
    for name in _OF_START:
        if name in call.given:
            option = name.replace("_", "-")
            fail(
                f"--{option} is for the start of a job, and --attach joins one that runs: leave one of them out"
            )


def _check_program(command: list[str] | None) -> None:
    if not command or shutil.which(command[0]) is not None:
        return
    fail(f"cannot start {command[0]!r}: no such program; give the job after --, e.g. -- torchrun train.py")


def _exit_code(summary: RunSummary) -> int:
    """Exit status of the tuner: 0 with a result, 1 if a table was withdrawn, 2 without one, 128 + n by a signal."""
    from ...traces.reasons import RunEnds

    by_signal = {
        RunEnds.INTERRUPTED: 130,
        RunEnds.TERMINATED: 143,
    }  # as a shell says it: 128 + SIGINT, + SIGTERM
    if summary.ended and summary.ended.reason in by_signal:
        return by_signal[summary.ended.reason]
    if summary.failure:
        return 1
    return 0 if summary.is_decided or summary.dropped else 2
