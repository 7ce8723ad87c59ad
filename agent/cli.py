"""The command line: ``dynamiccl COMMAND``. Each command is one file in ``agent/commands``."""

from __future__ import annotations

import importlib
import sys

import typer

app = typer.Typer(
    name="dynamiccl",
    help="Tunes NCCL's algorithm, protocol and channel count of a running training job, by the measured step time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: Command -> module in agent/commands, in the order of the help text.
COMMANDS = {"tune": "tune", "env": "env", "show": "show", "train": "train", "model": "model"}

for _name, _module in COMMANDS.items():
    _function = getattr(importlib.import_module(f".commands.{_module}", __package__), _module.rstrip("_"))
    app.command(_name)(_function)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except BrokenPipeError:  # `dynamiccl show | head`
        sys.stderr.close()


if __name__ == "__main__":
    main()
