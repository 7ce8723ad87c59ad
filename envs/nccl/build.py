"""Builds the plugin: C sources -> one shared library in a per-user cache, compiled when first needed (under a second).

NCCL opens the library by its path, so it need not be in the wheel, and the wheel stays pure Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("table.c", "ring.c", "comms.c", "tuner.c", "profiler.c", "chain.c")
HEADERS = ("abi.h", "plugin.h")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC")
LIBRARY = "libnccl-tuner-dynamiccl.so"
# NCCL 2.27.3 takes names only and completes them itself; both names must then be found.
_PROFILER_NAME = "libnccl-profiler-dynamiccl.so"


class PluginBuildError(RuntimeError):
    """The plugin could not be compiled; the message is one line and names the cure."""


def compiler() -> list[str]:
    """The C compiler as an argument list: ``$CC``, else the first of cc, gcc, clang. Raises PluginBuildError."""
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    names = [command[0]] if "CC" in os.environ else ["cc", "gcc", "clang"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise PluginBuildError(
            f"no C compiler found (tried {', '.join(names)}): install gcc or clang, or set CC to one"
        )
    return [found, *command[1:]]


def private_folder(path: Path) -> bool:
    """Makes ``path`` (0700) if needed; True if it is ours alone to write, so that what lies there can be loaded."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(path, os.W_OK)


def cache_folder() -> Path:
    """Where built files are kept: ``$XDG_CACHE_HOME/dynamiccl``, else ``~/.cache/dynamiccl``, else the temp folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    temp = Path(tempfile.gettempdir()) / f"dynamiccl-{os.geteuid()}"
    for folder in (Path(base) / "dynamiccl", temp / "cache"):
        if folder.is_absolute() and private_folder(folder):
            return folder
    raise PluginBuildError(f"no folder to build the plugin in: make {base}/dynamiccl writable for you alone (0700)")


def build_of(sources: tuple[str, ...] = SOURCES, headers: tuple[str, ...] = HEADERS) -> str:
    """Hash of these sources, 16 digits: ranks whose plugins have the same one decide alike."""
    text = hashlib.sha256()
    for source in (*sources, *headers):
        text.update(source.encode() + (HERE / source).read_bytes())
    return text.hexdigest()[:16]


def compile_once(
    name: str,
    sources: tuple[str, ...],
    flags: tuple[str, ...],
    headers: tuple[str, ...] = HEADERS,
    libraries: tuple[str, ...] = ("-lpthread", "-ldl"),
) -> Path:
    """Path of ``name`` built from ``sources`` of this folder; compiles if sources, flags or compiler are new.

    Safe when many ranks start at once: each compiles under a name of its own, then renames. Raises PluginBuildError.
    """
    cc = compiler()
    build = build_of(sources, headers)
    flags = (*flags, f'-DDCCL_BUILD="{build}"')
    key = hashlib.sha256(repr((name, flags, cc, os.stat(cc[0]).st_mtime_ns)).encode())
    folder = cache_folder() / key.hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(mode=0o700, exist_ok=True)
    draft = folder / f".{name}.{os.getpid()}"
    command = [*cc, *flags, *(str(HERE / s) for s in sources), "-o", str(draft), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr[-200:])
        raise PluginBuildError(f"{cc[0]} could not build the plugin ({reason.strip()}): try another compiler by CC")
    os.replace(draft, target)
    return target


def plugin_path() -> Path:
    """The plugin's shared library (tuner and profiler in one); compiled at first use. Raises PluginBuildError.

    Inside a job it is the file that the launcher chose (DYNAMICCL_PLUGIN): two copies would not share a table.
    """
    if chosen := os.environ.get("DYNAMICCL_PLUGIN"):
        return Path(chosen)
    path = compile_once(LIBRARY, SOURCES, (*FLAGS, "-shared"))
    alias = path.with_name(_PROFILER_NAME)
    if not alias.exists():
        draft = alias.with_name(f".{alias.name}.{os.getpid()}")
        os.symlink(path.name, draft)
        os.replace(draft, alias)
    return path


def nccl_env(path: Path, *, by_name: bool = False, headroom: int | None = None) -> dict[str, str]:
    """Environment that makes NCCL load ``path`` as tuner and profiler.

    With ``by_name`` it names the library instead of its path and puts its folder on LD_LIBRARY_PATH: NCCL 2.27.3
    takes nothing else. ``headroom``: channels that communicators are made with, where NCCL would have made fewer.
    """
    ours = {"DYNAMICCL_PLUGIN": str(path)}
    if headroom is not None:
        ours["NCCL_MIN_CTAS"] = str(headroom)
    theirs = os.environ.get("NCCL_PROFILER_PLUGIN", "none")
    if theirs and theirs != "none" and "dynamiccl" not in theirs:  # NCCL loads one: ours hands on to it
        ours["DYNAMICCL_NEXT_PROFILER"] = theirs
    if not by_name:
        return {"NCCL_TUNER_PLUGIN": str(path), "NCCL_PROFILER_PLUGIN": str(path), **ours}
    search = os.pathsep.join(filter(None, [str(path.parent), os.environ.get("LD_LIBRARY_PATH")]))
    return {"NCCL_TUNER_PLUGIN": "dynamiccl", "NCCL_PROFILER_PLUGIN": "dynamiccl", "LD_LIBRARY_PATH": search, **ours}
