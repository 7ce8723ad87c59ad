"""The command line: ``dynamiccl COMMAND``. Each command is one file in ``agent/commands``, imported when it is said.
Beside the standard library it needs click, which needs nothing: on the nodes of a job there is numpy, and no more."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

import click

from ..traces.here import pip_install
from .commands import Group

#: What a command may lack, and the extra that brings it; all else is in `tuner`.
_EXTRAS = {"torch": "train", "stable_baselines3": "train", "sb3_contrib": "train"}


def _print_version(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from importlib.metadata import version

    from ..traces.header import commit

    print(f"dynamiccl {version('dynamiccl')} ({(commit() or 'commit not known')[:12]})")
    ctx.exit()


COMMANDS = Group(
    "dynamiccl",
    f"{__package__}.commands",
    {
        "Tune a job": ("demo", "tune", "doctor", "apply", "env", "stop"),
        "Look at runs and recordings": ("show", "top", "advise", "plan"),
        "Judge and train policies, check a machine": ("sweep", "bench", "lab"),
        "Set up the shell": ("completion",),
    },
    help="Tunes NCCL's algorithm, protocol and channel count of a running training job, by the measured step time.",
    epilog="Every command has --help; most have --json, for programs.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Show the version and exit.",
        )
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)


def run(words: Sequence[str]) -> None:
    """Do what the words after ``dynamiccl`` say. A mistake in them is told in one line, with status 2."""
    try:
        COMMANDS.main([*words] or ["--help"], "dynamiccl", standalone_mode=False)
    except click.UsageError as error:
        from ..traces.outside import shown

        where = error.ctx.command_path if error.ctx else "dynamiccl"
        message = shown(" ".join(error.format_message().split()))
        print(f"error: {message} ({where} --help)", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal may not have every letter: it shows the code instead.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        run(sys.argv[1:])
    except (KeyboardInterrupt, click.Abort):  # a command that has more to say catches the interrupt itself
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "dynamiccl"):
            raise
        cure = pip_install(_EXTRAS.get(name, "tuner"))
        print(f"error: this command needs {name}: {cure}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
