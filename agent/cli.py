"""The command line: ``dynamiccl COMMAND``. Each command is one file in ``agent/commands``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("error: the command line needs more than the probe: pip install 'dynamiccl[tuner]'") from None

#: What a command may lack, and the extra that brings it; all else is in `tuner`.
_EXTRAS = {"torch": "train", "stable_baselines3": "train", "sb3_contrib": "train", "optuna": "optuna", "ray": "ray"}

app = typer.Typer(
    name="dynamiccl",
    help="Tunes NCCL's algorithm, protocol and channel count of a running training job, by the measured step time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Command -> file in agent/commands, in the order of the help text; the function has the command's name.
COMMANDS = {
    "tune": "tune",
    "stop": "stop",
    "env": "env",
    "show": "show",
    "import": "import_",
    "advise": "advise",
    "diff": "diff",
    "top": "top",
    "why": "why",
    "compare": "compare",
    "record": "record",
    "plan": "plan",
    "model": "model",
    "oracle": "oracle",
    "calibrate": "calibrate",
    "apply": "apply",
    "doctor": "doctor",
    "gpu-check": "gpu_check",
    "train": "train",
}
#: ``dynamiccl bench NAME``; ``dynamiccl bench`` alone is the leaderboard.
BENCHES = {"plugin": "bench_plugin", "boundary": "bench_boundary", "overhead": "bench_overhead", "rank": "bench_rank"}


def _function(module: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f".commands.{module}", __package__), module)
    return function


for _name, _module in COMMANDS.items():
    app.command(_name)(_function(_module))
_bench = typer.Typer()
_bench.callback(invoke_without_command=True)(_function("bench"))
for _name, _module in BENCHES.items():
    _bench.command(_name)(_function(_module))
app.add_typer(_bench, name="bench")


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
