"""The command line: ``dynamiccl COMMAND``. Each command is one file in ``agent/commands``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("error: the command line needs more than the probe: pip install 'dynamiccl[tuner]'") from None

#: What a command may lack, and the extra that brings it; all else is in `tuner`.
_EXTRAS = {"torch": "train", "stable_baselines3": "train", "sb3_contrib": "train", "optuna": "optuna"}
_EXTRAS["prometheus_client"] = "metrics"

#: Command -> file in agent/commands, in the order of the help text; the function has the file's name. What people need:
COMMANDS = {"tune": "tune", "show": "show", "apply": "apply", "advise": "advise", "doctor": "doctor"}
#: Around a run or a recording; the help names them in one line.
MORE = {
    "stop": "stop",
    "env": "env",
    "top": "top",
    "why": "why",
    "model": "model",
    "plan": "plan",
    "clusters": "clusters",
}
#: ``dynamiccl lab NAME``: for those who work on models, policies and releases.
LAB = {"train": "train", "prior": "prior", "gpu-check": "gpu_check"}
#: ``dynamiccl bench NAME``; ``dynamiccl bench`` alone is the leaderboard.
BENCHES = {"overhead": "bench_overhead"}

app = typer.Typer(
    name="dynamiccl",
    help="Tunes NCCL's algorithm, protocol and channel count of a running training job, by the measured step time.",
    epilog=f"Also: {', '.join(MORE)}. Every command has --help, and --json for programs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"dynamiccl {version('dynamiccl')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _add(group: typer.Typer, commands: Mapping[str, str], hidden: bool = False) -> None:
    for name, file in commands.items():
        function = getattr(importlib.import_module(f".commands.{file}", __package__), file)
        group.command(name, hidden=hidden)(function)


_add(app, COMMANDS)
_bench = typer.Typer()
_bench.callback(invoke_without_command=True)(importlib.import_module(".commands.bench", __package__).bench)
_add(_bench, BENCHES)
app.add_typer(_bench, name="bench")
_lab = typer.Typer(help="Train the policy, check a machine with GPUs, ask the models.", no_args_is_help=True)
_add(_lab, LAB)
app.add_typer(_lab, name="lab")
_add(app, MORE, hidden=True)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "dynamiccl"):
            raise
        extra = _EXTRAS.get(name, "tuner")
        print(f"error: this command needs {name}: pip install 'dynamiccl[{extra}]'", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `dynamiccl show | head`
        sys.stderr.close()


if __name__ == "__main__":
    main()
