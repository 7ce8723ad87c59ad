"""The command line: ``dynamiccl COMMAND``. Each command is one file in ``agent/commands``, imported when it is said.
Standard library only: on the nodes of a job there is numpy, and no more."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import io
import math
import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from ..traces.here import docstring, pip_install
from .commands import Argument, Call, Option, check_site, start_untuned

#: What a command may lack, and the extra that brings it; all else is in `tuner`.
_EXTRAS = {"torch": "train", "stable_baselines3": "train", "sb3_contrib": "train"}

#: Group of the help -> commands. A command's function has its last word as its name and lies in a file of that name, in
#: agent/commands or, for those that begin with "lab", in agent/commands/lab.
COMMANDS = {
    "Tune a job": ("demo", "tune", "doctor", "apply", "env", "stop"),
    "Look at runs and recordings": ("show", "top", "advise", "plan"),
    "Judge and train policies, check a machine": ("sweep", "bench", "lab gpu-check", "lab train"),
    "Set up the shell": ("completion",),
}
NAMES = tuple(name for names in COMMANDS.values() for name in names)
_ABOUT = (
    "Tunes NCCL's algorithm, protocol and channel count of a running training job, by the measured step time."
)
_HELP = (["-h"], ["--help"])
#: A site's options of `tune`. The user's own options override their values.
SITE_OPTIONS = "DYNAMICCL_TUNE_OPTIONS"
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Parser(argparse.ArgumentParser):
    """Of one command, made from its function's parameters and docstring. What is not said is not in its result."""

    def __init__(self, name: str) -> None:
        module = name.replace(" ", ".").replace("-", "_")
        file = module.rpartition(".")[2]
        self.function: Callable[..., None] = getattr(
            importlib.import_module(f".commands.{module}", __package__), file
        )
        self.paragraphs = docstring(self.function).split("\n\n")
        found = inspect.signature(self.function).parameters
        self.defaults = {key: parameter.default for key, parameter in found.items()}
        self.needed = {key for key, default in self.defaults.items() if default is inspect.Parameter.empty}
        super().__init__(
            f"dynamiccl {name}",
            description="\n\n".join(_filled(part) for part in self.paragraphs),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 26, _width()),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            add_help=False,
        )
        groups = {title: self.add_argument_group(title) for title in ("Arguments", "Options")}
        words = [self.prog, "[OPTIONS]"]
        self.kinds = dict[str, Any]()  # parameter -> its type
        for key, hint in get_type_hints(self.function, include_extras=True).items():
            if key == "return" or hint is Call:
                continue
            kind, said = get_args(hint)
            self.kinds[key], _ = _plain(kind)
            if isinstance(said, Argument):
                words.append(self._add_argument(groups["Arguments"], key, *_plain(kind), said))
            else:
                if said.group not in groups:
                    groups[said.group] = self.add_argument_group(said.group)
                self._add_option(groups[said.group], key, *_plain(kind), said)
        groups["Options"].add_argument("-h", "--help", action="help", help="Show this and exit.")
        self.usage = " ".join(words)

    def _add_argument(self, group: Any, key: str, kind: Any, several: bool, said: Argument) -> str:
        """Its word in the usage."""
        word, needed = said.metavar or key.upper(), key in self.needed
        nargs = ("+" if needed else "*") if several else (None if needed else "?")
        group.add_argument(
            key, help=said.help.replace("%", "%%"), metavar=word, nargs=nargs, type=_reader(kind)
        )
        return word if needed else "[-- COMMAND...]" if key == "command" else f"[{word}]"

    def _add_option(self, group: Any, key: str, kind: Any, several: bool, said: Option) -> None:
        name, text, default = said.name or f"--{key.replace('_', '-')}", said.help, self.defaults[key]
        if kind is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction if default else "store_true"}
        else:
            how = {"type": _reader(kind, said.min, said.max), "action": "append" if several else "store"}
            how["metavar"] = said.metavar or _METAVARS.get(kind, "NAME")
            if key in self.needed:
                how["required"] = True
            elif default not in (None, ""):
                text += f" Default: {default}."
        group.add_argument(name, dest=key, help=text.replace("%", "%%"), **how)

    def said(self, words: Sequence[str]) -> dict[str, Any]:
        """The values that the words give; what stands after ``--`` is the job's, and only that.

        A job without ``--`` would lose each option that has a name of ours.
        """
        own, job = list(words), list[str]()
        if "--" in own and "command" in self.defaults:
            place = own.index("--")
            own, job = own[:place], own[place + 1 :]
            if not job:
                self.error("no command stands after --")
        said = vars(self.parse_intermixed_args(own))
        if loose := said.pop("command", None):
            self.refuse_command(loose[0])
        if job:
            said["command"] = job
        return said

    @property
    def options(self) -> set[str]:
        """As ``--window-steps``."""
        return {word for word in self._option_string_actions if word.startswith("--")}

    def refuse_command(self, word: str) -> NoReturn:
        """Of a word that stands before ``--``."""
        self.error(
            f"{word!r} is no option: a job's command stands after --, and an option is repeated for each value"
        )

    def call(self, said: Mapping[str, Any], of_site: Mapping[str, Any]) -> None:
        """Run the command with the values that were said. For the others the site's count, then the defaults.

        A command that joins a run gets the site's apart: those that the run was started with count before them.
        """
        joins = "attach" in said
        values = {**self.defaults, **({} if joins else of_site), **said}
        if "call" in values:
            values["call"] = Call({**values}, frozenset(said), of_site)
        self.function(**values)

    def error(self, message: str) -> NoReturn:
        """In one line, and status 2."""
        print(f"error: {message.removeprefix('argument ')} ({self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


class _SiteParser(Parser):
    """Of a site's options. Ends nothing: raises ValueError for words that are no options, and for those that ask for
    the help, a command or a running job."""

    def said(self, words: Sequence[str]) -> dict[str, Any]:
        """The values that the words give."""
        if "--" in words:
            self.refuse_command("--")
        said = super().said(words)
        if "attach" in said:
            raise ValueError("--attach is for the command line")
        check_site(said)
        return said

    def refuse_command(self, word: str) -> NoReturn:
        """As ValueError."""
        raise ValueError("it contains a command")

    def print_help(self, file: Any = None) -> NoReturn:
        """Refused."""
        raise ValueError("--help is for the command line")

    def error(self, message: str) -> NoReturn:
        """As ValueError."""
        raise ValueError(message.removeprefix("argument "))


def _plain(kind: Any) -> tuple[Any, bool]:
    """A parameter's type without None and list, and whether there may be several."""
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
    return (get_args(kind)[0], True) if get_origin(kind) is list else (kind, False)


def _reader(kind: Any, least: float | None = None, most: float | None = None) -> Callable[[str], Any]:
    """Text -> value, of which argparse says what is wrong."""

    def read(text: str) -> Any:
        if not text:  # an empty variable of a script is not meant
            raise argparse.ArgumentTypeError("must not be empty: leave it out")
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            bounds = [f"{word} {n}" for word, n in (("at least", least), ("at most", most)) if n is not None]
            raise argparse.ArgumentTypeError(f"must be {' and '.join(bounds)}, not {text}")
        return value

    return read


def _width() -> int:
    return max(40, min(shutil.get_terminal_size().columns, 100))


def _filled(paragraph: str) -> str:
    """A paragraph of a docstring as wide as the terminal; one that begins with a backspace, of examples, as it is."""
    if paragraph.startswith("\b\n"):
        return textwrap.indent(paragraph[2:], "  ")
    return textwrap.fill(" ".join(paragraph.split()), _width())


def options_of(command: str) -> set[str]:
    """The options of a command, as ``--window-steps``."""
    return Parser(command).options


def overview(first: str = "") -> str:
    """The help of all commands, or of those whose name begins with the word ``first``."""
    usage = " ".join(filter(None, ("usage: dynamiccl", first, "COMMAND [OPTIONS]")))
    lines = [usage, "", textwrap.fill(_ABOUT, _width())]
    for title, group in COMMANDS.items():
        shown = [name for name in group if not first or name.startswith(f"{first} ")]
        lines += ["", f"{title}:"] if shown else []
        for name in shown:
            about = " ".join(Parser(name).paragraphs[0].split())
            lines.append(textwrap.fill(f"  {name:<16}{about}", _width(), subsequent_indent=18 * " "))
    return "\n".join([*lines, "", "Every command has --help; most have --json, for programs."])


def run(words: Sequence[str]) -> None:
    """Do what the words after ``dynamiccl`` say."""
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in NAMES), None)
    if name is not None:
        _run_command(name, words[len(name.split()) :])
    elif not words or words[0] in ("-h", "--help"):
        print(overview())
    elif words[0] == "--version":
        from importlib.metadata import version

        from ..traces.header import commit

        print(f"dynamiccl {version('dynamiccl')} ({(commit() or 'commit not known')[:12]})")
    elif (inside := [name for name in NAMES if name.startswith(f"{words[0]} ")]) and words[1:2] in _HELP:
        print(overview(words[0]))
    else:
        print(f"error: {_slip(words[0], inside)}", file=sys.stderr)
        raise SystemExit(2)


def _run_command(name: str, words: Sequence[str]) -> None:
    """Run a command with the words after its name, within what the site's options allow."""
    parser = Parser(name)
    said = parser.said(words)
    try:
        of_site = _of_site(name)
    except ValueError as error:
        why = " ".join(str(error).split())
        start_untuned(said, f"{SITE_OPTIONS} has a mistake: {why}")
    parser.call(_within_site(said, of_site), of_site)


def _of_site(name: str) -> dict[str, Any]:
    """The site's options of `tune`. Raises ValueError for a mistake in them."""
    text = os.environ.get(SITE_OPTIONS, "")
    return _SiteParser(name).said(shlex.split(text)) if name == "tune" and text else {}


def _within_site(said: dict[str, Any], of_site: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said, with at most the site's budget and the site's slots: no user takes more of a cluster than
    the site gives."""
    said = dict(said)
    if said.get("budget", 0) > (most := of_site.get("budget", math.inf)):
        print(
            f"warning: --budget {said['budget']:g} is above this site's {most:g}, which holds",
            file=sys.stderr,
        )
        said["budget"] = most
    if "search_slots" in of_site and said.pop("search_slots", None):
        print("warning: this site's --search-slots holds", file=sys.stderr)
    return said


def _slip(word: str, inside: Sequence[str]) -> str:
    """What is wrong with a first word, and the cure. ``inside``: the commands whose name begins with it."""
    if inside:
        return f"give one of its commands: {', '.join(inside)}"
    near = difflib.get_close_matches(word, NAMES, 1)
    cure = f"did you mean {near[0]}?" if near else "dynamiccl --help lists them"
    return f"there is no command {word}: {cure}"


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a terminal may not have every letter: it shows the code instead
            stream.reconfigure(errors="backslashreplace")
    try:
        run(sys.argv[1:])
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "dynamiccl"):
            raise
        cure = pip_install(_EXTRAS.get(name, "tuner"))
        print(f"error: this command needs {name}: {cure}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # `dynamiccl show | head`
        sys.stderr.close()
    except KeyboardInterrupt:  # a command that has more to say catches it itself
        print("interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
