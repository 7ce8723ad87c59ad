"""One file per command of ``dynamiccl``, with its options and help text. Other packages do the work.

A command is a function under :func:`command`, and one :func:`option` or :func:`argument` for each parameter, as click
has them; its docstring is the help. A job's command is a :func:`job`. ``agent/cli.py`` lists the commands.
"""

from __future__ import annotations

import importlib
import math
import os
import pwd
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource, augment_usage_errors

from ...traces.here import docstring
from ...traces.names import ALL_REDUCE_WAYS

if TYPE_CHECKING:
    from ...envs.nccl.untouched import Untouched as UntouchedTable
    from ...envs.sim.emulated.settings import Emulated
    from ...traces.reasons import Why
    from ...traces.records import Table


class _Given(click.Parameter):
    """What a script's empty variable leaves is no value."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As click's."""
        if "" in (value if isinstance(value, list | tuple) else [value]):
            raise click.BadParameter("must not be empty: leave it out", ctx, self)
        return super().type_cast_value(ctx, value)


class _Argument(_Given, click.Argument):
    """With a line in the help, which older releases of click do not have."""

    group = "Arguments"

    def __init__(self, *declared: Any, help: str, **how: Any) -> None:
        super().__init__(*declared, **how)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """As click's."""
        return self.human_readable_name, self.help or ""


class _Job(_Argument):
    """A job's command. It stands after ``--``."""


class _Option(_Given, click.Option):
    """In a group of the help."""

    def __init__(self, *declared: Any, group: str = "Options", **how: Any) -> None:
        super().__init__(*declared, **how)
        self.group = group

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As click's. Where a script's variable was empty and without quotes, the next option follows."""
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and text.startswith("--"):
                raise click.BadParameter(f"needs a value, and {text} is an option", ctx, self)
        return super().type_cast_value(ctx, value)


class Number(click.FloatRange):
    """A number within limits. click lets "nan" pass all of them, and "inf" pass those without an upper one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


class Command(click.Command):
    """Its help has its options in groups. If it has a job's command, that stands after ``--``, and nothing else does: a
    job without ``--`` would lose each option that has a name of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's."""
        has_job = any(isinstance(param, _Job) for param in self.params)
        own = args[: args.index("--")] if has_job and "--" in args else args
        its = args[len(own) + 1 :]
        with augment_usage_errors(ctx):
            left = super().parse_args(ctx, own)
        if not has_job or ctx.resilient_parsing:  # the latter: a press of Tab
            return left
        if ctx.params["command"]:
            ctx.fail(
                f"{ctx.params['command'][0]!r} is no option: a job's command stands after --, and an option is "
                "repeated for each value"
            )
        if len(own) < len(args) and not its:
            ctx.fail("no command stands after --")
        ctx.params["command"] = its or None
        return left

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: they stand among the options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, in groups."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Group(click.Group):
    """Commands, each in a module of its name in ``package``, which is imported when the command is named.

    ``sections``: title in the help -> names.
    """

    def __init__(self, name: str, package: str, sections: Mapping[str, Sequence[str]], **how: Any) -> None:
        names = [name for section in sections.values() for name in section]
        # click lists these, and knows names that are spelled nearly so.
        super().__init__(name, dict.fromkeys(names, click.Command(None)), no_args_is_help=False, **how)
        self.package, self.sections = package, sections

    def get_command(self, ctx: click.Context | None, cmd_name: str) -> click.Command | None:
        """As click's."""
        return self.named(cmd_name) if cmd_name in self.commands else None

    def named(self, name: str) -> click.Command:
        """The command of this name."""
        name = name.replace("-", "_")
        found: click.Command = getattr(importlib.import_module(f"{self.package}.{name}"), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, in sections, each with the whole first sentence of its help."""
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.named(name).get_short_help_str(1000)) for name in names])


def command(function: Callable[..., None]) -> click.Command:
    """Decorator of a command's function."""
    return click.command(cls=Command, help=docstring(function))(function)


def option(*names: str, **how: Any) -> Callable[[Any], Any]:
    """Decorator: ``--n`` is the parameter ``n``. ``group``: title in the help; the rest as click's ``option``."""
    return click.option(*names, cls=_Option, **how)


def argument(name: str, **how: Any) -> Callable[[Any], Any]:
    """Decorator: a positional argument with ``help``; the rest as click's ``argument``."""
    return click.argument(name, cls=_Argument, **how)


def job(text: str) -> Callable[[Any], Any]:
    """Decorator: a job's command, as the parameter ``command``: its words, or None. ``text``: its line in the help."""
    return click.argument("command", nargs=-1, metavar="[-- COMMAND...]", cls=_Job, help=text)


def given(ctx: click.Context) -> frozenset[str]:
    """The names of the parameters that the command line gave."""
    by_user = ParameterSource.COMMANDLINE
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is by_user)


#: A path as a parameter's type. The command itself says what it finds there.
PATH = click.Path(readable=False, path_type=Path)
#: The same as text: a run has several kinds of folders.
RUN = click.Path(readable=False)
#: Groups of options in the help; they follow the other options.
EMULATION, SEARCH, OUTPUT = "Without GPUs", "The search", "Results"

HEADROOM = option(
    "--headroom",
    type=click.IntRange(1, 64),
    help="Make NCCL prepare this many channels (NCCL_MIN_NCHANNELS). NCCL allocates memory for them. A table cannot "
    "use more channels than the communicator has. Calls that no table decides keep NCCL's own count. Not with CUDA "
    "graphs.",
)
UNTOUCHED = option(
    "--untouched",
    type=PATH,
    metavar="RUN",
    help="With --headroom, which needs it: results of an earlier run of this job without that option, for NCCL's own "
    "channel counts. All nodes must be able to read it.",
)
ALL_REDUCE = option(
    "--all-reduce",
    type=click.Choice(ALL_REDUCE_WAYS),
    is_flag=False,
    flag_value=ALL_REDUCE_WAYS[0],
    help="Tune all_reduce too: protocol and channels, with --all-reduce=algo also Ring against Tree. Other settings "
    "add the numbers of more than two ranks in another order, so the last bits of sums change. Default: off.",
)
FORCE = option(
    "--force", is_flag=True, help="Start even if `dynamiccl doctor` finds something that must be changed."
)
OR_UNTUNED = option(
    "--or-untuned",
    is_flag=True,
    help="If this cannot start, print why and run COMMAND untuned. Default: COMMAND does not start, and the exit "
    "status is 2.",
)
JSON = option("--json", is_flag=True, help="Print JSON instead of text.")
# An emulated cluster for a job without GPUs; see :func:`emulation`.
CLUSTER = option(
    "--cluster",
    group=EMULATION,
    metavar="NAME",
    help="Emulate this cluster: the name of a preset, or a .toml file.",
)
BYTES_SCALE = option(
    "--bytes-scale",
    type=float,
    group=EMULATION,
    help="Each byte of the job counts as this many emulated bytes. Default: 360.",
)
COMPUTE_SCALE = option(
    "--compute-scale",
    type=float,
    group=EMULATION,
    help="Each operation of the job counts as this many. Default: 400.",
)


class Refused(SystemExit):
    """The end of a command that was refused, with status 2. ``message`` names the error and its cure."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


def fail(message: str) -> NoReturn:
    """Print one line with the error and its cure, and exit with status 2."""
    from ...traces.outside import shown

    print(f"error: {shown(message)}", file=sys.stderr)
    raise Refused(message)


def off_here() -> Why | None:
    """That the site has turned the tuner off; None if it has not."""
    from ...envs.nccl.site_switch import switched_off
    from ...traces.reasons import RunEnds

    why = switched_off()
    return RunEnds.SWITCHED_OFF(why=why) if why else None


def refuse_if_off() -> None:
    """Refuse a command that only tunes, if the site has turned the tuner off."""
    if off := off_here():
        fail(f"{off}: ask the operators of this cluster")


def run_alone_if_off(command: list[str] | None, headroom: int | None, json: bool = False) -> None:
    """Become the job, without anything of ours but the channels of ``headroom``, if the site has turned the tuner off.

    ``json``: stdout belongs to a program, so the job's output goes to stderr, and stdout gets a summary without result.
    """
    if not command:
        refuse_if_off()
        return
    if off := off_here():
        _run_alone(command, headroom, off, json)


def check_site(said: Mapping[str, Any]) -> None:
    """Refuse options of a site that would stop each job. Raises ValueError."""
    from ..daemon.search_slots import parsed
    from ..integrations.loggers import check_logger
    from ..policies.choosing import check_chooser

    if "attach" in said:
        raise ValueError("--attach is for the command line")
    if "headroom" in said or "untouched" in said:
        raise ValueError("--headroom and --untouched are for the command line: they are of one job")
    if "all_reduce" in said:
        raise ValueError("--all-reduce is for the command line: it changes the bits of a job's sums")
    if "search_slots" in said:
        parsed(said["search_slots"])
    if "policy" in said:
        check_chooser(said["policy"])
    if "log_to" in said:
        check_logger(said["log_to"])


def start_untuned(said: Mapping[str, Any], why: str) -> NoReturn:
    """Become the job of a command line of `tune` (the values that were said), untuned: the site's options have a
    mistake, so nobody knows what the site allows. Without a job to start, an error with status 2."""
    from ...traces.reasons import RunEnds

    command = said.get("command")
    if not command:
        fail(f"{why}: ask the operators of this cluster")
    ended = off_here() or RunEnds.NOT_STARTED(why=why)
    _run_alone(command, said.get("headroom"), ended, said.get("json", False))


@contextmanager
def untuned_if_refused(command: list[str] | None, headroom: int | None, json: bool = False) -> Iterator[None]:
    """In this context an error makes this process the job, without anything of ours but the channels of ``headroom``.
    No job may run yet. None: errors pass through."""
    from ...traces.reasons import RunEnds

    if command is None:
        yield
        return
    try:
        yield
    except Refused as error:
        _run_alone(command, headroom, RunEnds.NOT_STARTED(why=error.message), json)
    except Exception as error:  # also a fault of ours: the job matters more
        why = f"{type(error).__name__}: {error}"
        _run_alone(command, headroom, RunEnds.NOT_STARTED(why=why), json)


def _run_alone(command: list[str], headroom: int | None, why: Why, json: bool) -> NoReturn:
    """Become the job. Its ranks keep the channels of --headroom: those on other nodes may be tuned, and if one
    communicator's ranks had different channels, the job would hang."""
    from ...envs.nccl.plugin.build import channels_env
    from ...envs.nccl.site_switch import leave
    from ..daemon.launcher import say

    leave(os.environ)
    os.environ.update(channels_env(headroom))
    say(f"{why}: the job runs without it")
    if json:
        _print_no_result(why)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        cannot_start(command, error)


def cannot_start(command: list[str], error: OSError) -> NoReturn:
    """One line, and a shell's status for a command that is not there, or that cannot be executed."""
    print(f"error: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
    raise SystemExit(127 if isinstance(error, FileNotFoundError) else 126)


def _print_no_result(ended: Why) -> None:
    import json as json_module

    from ...traces.header import plain
    from ..report.summary import RunSummary

    print(json_module.dumps(plain(vars(RunSummary(ended=ended))), indent=2), flush=True)
    os.dup2(2, 1)


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """In this context an error of these kinds ends the command as :func:`fail` does."""
    try:
        yield
    except BrokenPipeError:  # who reads our output has gone
        raise
    except kinds as error:
        fail(str(error))


def emulation(
    cluster: str, bytes_scale: float | None = None, compute_scale: float | None = None, seed: int = 0
) -> tuple[Emulated, dict[str, Any]]:
    """Returns the emulated cluster of these options, and the facts about it. Refuses an unknown cluster.

    A file goes on by its absolute path: ranks may run in other folders. The facts hold what it says, for later readers.
    """
    from ...envs.nccl_model import clusters
    from ...envs.sim.emulated.settings import Emulated
    from ...traces.here import absolute

    scales = {"bytes_scale": bytes_scale, "compute_scale": compute_scale}
    given = {name: value for name, value in scales.items() if value is not None}
    with refusing(ValueError, OSError):
        if cluster.endswith(clusters.FILE):
            cluster = str(absolute(cluster))
        found = clusters.cluster(cluster)
        facts: dict[str, Any] = {"nccl": found.nccl}
        if cluster.endswith(clusters.FILE):
            facts["cluster_file"] = clusters.values_of(found)
        return Emulated(cluster, seed=seed, **given), facts


def emulation_here(
    cluster: str | None, bytes_scale: float | None, compute_scale: float | None, seed: int = 0
) -> tuple[Emulated | None, dict[str, Any]]:
    """Returns :func:`emulation` of these options; without a cluster that of the environment, which a job inherits.

    Refuses the environment's where GPUs are: NCCL would run the job's collectives, and gloo's alone are emulated.
    """
    from ...envs.nccl.steps.nvml import gpus
    from ...envs.sim.emulated.settings import Emulated

    if cluster:
        return emulation(cluster, bytes_scale, compute_scale, seed)
    if not os.environ.get("DYNAMICCL_CLUSTER"):
        return None, {}
    if gpus():
        fail("DYNAMICCL_CLUSTER is set, and this machine has GPUs: unset it, or give --cluster")
    with refusing(ValueError):
        told = Emulated.from_env()
    return emulation(told.cluster, told.bytes_scale, told.compute_scale, told.seed)


def tell_whose_code(policy: str) -> None:
    """Say of a policy that is code of its author that this code runs here."""
    from ...traces.outside import shown
    from ..policies.choosing import runs_code

    if runs_code(policy):
        print(f"dynamiccl: policy {shown(policy)} runs its author's code, with your rights", file=sys.stderr)


def refuse_scales(cluster: str | None, bytes_scale: float | None, compute_scale: float | None) -> None:
    """Refuse scales where no cluster is given."""
    if not cluster and (bytes_scale is not None or compute_scale is not None):
        fail("--bytes-scale and --compute-scale are of an emulated cluster: give --cluster too")


def refuse_traps(
    command: list[str] | None,
    force: bool,
    emulated: bool = False,
    table: Table | None = None,
    but: tuple[str, ...] = (),
    all_reduce: str | None = None,
) -> None:
    """Refuse to start if ``dynamiccl doctor`` finds something that must be changed, unless forced.

    ``but``: traps that do not matter for this command. ``all_reduce``: the job's option, where the command has one.
    """
    from ..checks.doctor import WITHOUT_NCCL, examine, gather

    found = [
        trap
        for trap in examine(gather(command, table, all_reduce))
        if trap.must_change and trap.name not in but
    ]
    if emulated:  # NCCL has no part in it
        found = [trap for trap in found if trap.name in WITHOUT_NCCL]
    if found and not force:
        what = "; ".join(f"{trap.what}: {trap.cure}" for trap in found)
        fail(f"{what} (`dynamiccl doctor` explains it; --force starts anyway)")
    for trap in found:
        print(f"warning: {trap.what}: {trap.cure}", file=sys.stderr)


def untouched_from(headroom: int | None, earlier: Path | None) -> UntouchedTable | None:
    """What NCCL does without --headroom, from the results of an earlier run; None without that option."""
    if headroom is None and earlier is None:
        return None
    if headroom is None:
        fail("--untouched is for --headroom: give both, or neither")
    if earlier is None:
        fail(
            "--headroom needs --untouched RUN, the results of a run of this job without it: "
            "NCCL's own channel counts, which the tables are compared with, are read there"
        )
    from ...envs.live.untouched import of_run
    from ...traces.files import TraceError

    with refusing(TraceError, ValueError, OSError):
        return of_run(results(earlier), headroom)


def sample(name: str) -> Path:
    """Returns the folder of a recording that comes with the package, and says on stderr what it is."""
    from ..report.summary import read_object

    folder = Path(__file__).parents[1] / "samples" / name
    print(f"sample: {read_object(folder / 'trace' / 'header.json')['sample']}", file=sys.stderr)
    return folder


def results(where: str | Path) -> Path:
    """Returns a folder of results from its path or a link such as ``runs/tune/latest``, also without symbolic links."""
    from ..report.outputs import followed

    path = Path(where)
    return path if path.is_dir() else followed(path)


def run_folder(where: str) -> Path:
    """Returns a run folder from its path, or from the folder of a run's results. Raises ValueError."""
    from ...envs.nccl.run_folder import RUN_ID, TABLE
    from ..report.outputs import run_of

    path = results(where)
    if not path.exists():
        raise ValueError(f"{where}: there is no run here: it has ended, or has another folder")
    run = run_of(path)
    if run is None and not ((path / TABLE).is_file() and (path / RUN_ID).is_file()):
        raise ValueError(f"{where}: this folder holds no run: give the folder of one run{_runs_inside(path)}")
    if run is None:
        return path
    if not run.exists():
        raise ValueError(f"{where}: this run has ended{_or_elsewhere(path)}; the folder holds its results")
    run = run.resolve()
    if not (run / RUN_ID).is_file() or run.stat().st_uid != path.stat().st_uid:
        raise ValueError(
            f"{where}: its link `run` leads to {run}, which is no run of this folder's owner: if it is yours, give "
            f"{run} itself"
        )
    return run


def become_owner(run: Path) -> None:
    """As root, become the user whose run this is. Root must not leave files in a user's folders that the user cannot
    change, and must not run the user's own policy.

    Raises OSError if this process may not change its user, or if that user may not read our code.
    """
    owner = run.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    try:
        user = pwd.getpwuid(owner.st_uid)
        os.initgroups(user.pw_name, owner.st_gid)
        os.environ["HOME"] = user.pw_dir
    except KeyError:  # a container may have users without a name
        os.setgroups([])
        os.environ.pop("HOME", None)
    os.environ.pop("XDG_DATA_HOME", None)  # root's
    os.environ.pop("XDG_CACHE_HOME", None)
    os.setgid(owner.st_gid)
    os.setuid(owner.st_uid)
    if not os.access(__file__, os.R_OK):
        raise PermissionError(
            f"{run} belongs to user {owner.st_uid}, who may not read {__file__}: use the dynamiccl of the job, as in "
            f"`sudo -u '#{owner.st_uid}' dynamiccl ...`"
        )


def _runs_inside(folder: Path) -> str:
    """Names a run below a folder, as the cure of an error: the newest of those that measured something, because only
    the tuner beside rank 0 does, and its node if it is another one. Empty if there is none."""
    from ...traces.here import host
    from ..report.runs import find_runs, has_measured
    from ..report.summary import read_object

    found = find_runs([folder])
    if not found:
        return ""
    with_rank_0 = [out for out in found if has_measured(out)]
    best = (with_rank_0 or found)[-1]
    node = read_object(best / "trace" / "header.json").get("host")
    return f", such as {best}" + (f", on {node}" if node not in (None, host()) else "")


def _or_elsewhere(out: Path) -> str:
    """Names the node of a run that was started on another one: from here nobody can see whether it has ended."""
    from ...traces.here import host
    from ..report.summary import read_object

    began_on = read_object(out / "trace" / "header.json").get("host")
    return "" if began_on in (None, host()) else f", or runs on {began_on}: use this command there"


def one_thread() -> None:
    """Limit numpy to one thread; call it before numpy is imported. The matrices are too small for more."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
