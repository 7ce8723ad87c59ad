"""Builds the plugin: C sources -> one shared library, in the package when it is installed, so that every node has it.

Where that was not possible (no compiler, a checkout) it is compiled when first needed, into a per-user cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = (
    *("table.c", "ring.c", "comms.c", "switch.c", "steps.c", "clock.c", "control.c"),
    *("tuner.c", "next_tuner.c", "profiler.c", "room.c", "gil.c"),
)
HEADERS = ("abi.h", "plugin.h", "seat.h")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O3", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC")
#: Optimizes over all sources together: an answer takes a quarter less time. Left out where the linker cannot.
TOGETHER = "-flto"
LIBRARY = "libnccl-tuner-dynamiccl.so"
INSTALLED = HERE / "lib"  # where an installation has it built, see setup.py
#: The event loop of the simulated steps (``sim.step``) is built in the same way. No fused multiply-add: a suite that is
#: drawn again must come out the same on every machine.
STEP, STEP_SOURCES = "libdynamiccl-step.so", ("../../sim/step.c",)
_STEP_FLAGS = (*FLAGS, "-O2", "-shared", "-ffp-contract=off")
#: Library -> its sources, headers, flags, and the libraries that it needs.
_LIBRARIES = {
    LIBRARY: (
        SOURCES,
        HEADERS,
        (*FLAGS, TOGETHER, "-shared", f"-Wl,-soname,{LIBRARY}"),
        ("-lpthread", "-ldl"),
    ),
    STEP: (STEP_SOURCES, (), _STEP_FLAGS, ("-lm",)),
}
# No folder of the machine that built it is in a library: the same sources make the same bytes.
_NOWHERE = f"-ffile-prefix-map={HERE}=."
#: Loads a library; the loader's words on stderr if it cannot be.
_LOAD = """
import ctypes, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
"""
_LONGEST = 254  # characters of a name or path that every release of NCCL takes whole


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


def cache_folder() -> Path:
    """Where built files are kept: ``$XDG_CACHE_HOME/dynamiccl``, else ``~/.cache/dynamiccl``, else the temp folder."""
    from ....traces.here import (
        temp_folder,
        user_folder,
    )  # here: setup.py runs this file before there is a package
    from .private import private_folder

    own, temp = user_folder("XDG_CACHE_HOME", ".cache"), temp_folder()
    folders = [own / "dynamiccl"] if own else []
    folders += [temp / f"dynamiccl-{os.geteuid()}" / "cache"] if temp else []
    for folder in folders:
        if private_folder(folder):
            return folder
    tried = " or ".join(map(str, folders)) or "a folder that XDG_CACHE_HOME names"
    raise PluginBuildError(f"no folder to build the plugin in: make {tried} writable for you alone (0700)")


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
    """Path of ``name`` built from ``sources`` of this folder; compiles if sources, flags, compiler or machine are new.

    Safe when many ranks start at once: each compiles in a folder of its own, then renames. Raises PluginBuildError.
    """
    try:
        target, command = _in_cache(name, sources, flags, headers)
        if not target.exists():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            _compile(command, target, libraries)
    except OSError as error:
        raise PluginBuildError(
            f"could not build the plugin ({error}): free space there, or set XDG_CACHE_HOME to another folder"
        ) from None
    return target


def _in_cache(
    name: str, sources: tuple[str, ...], flags: tuple[str, ...], headers: tuple[str, ...]
) -> tuple[Path, list[str]]:
    """Where the cache has ``name``, whether it is there or not, and the command that makes it.

    Nodes of two kinds may share a home: the compilers of one release have one path and time on all of them.
    """
    cc, build = compiler(), build_of(sources, headers)
    machine = os.uname().machine, platform.libc_ver()
    flags = (*flags, f'-DDCCL_BUILD="{build}"')
    key = hashlib.sha256(repr((name, flags, cc, os.stat(cc[0]).st_mtime_ns, machine)).encode())
    command = [*cc, *flags, *(str(HERE / s) for s in sources)]
    return cache_folder() / key.hexdigest()[:16] / name, command


def _compile(command: list[str], target: Path, libraries: tuple[str, ...]) -> None:
    # In a folder of its own: two containers, or hosts, that share the target's may have processes of one number.
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as own:
        draft = Path(own, target.name)
        command = [*command, "-o", str(draft), *libraries]
        done = _run(command)
        if done.returncode and TOGETHER in command:
            command.remove(TOGETHER)
            done = _run(command)
        if done.returncode:
            reason = next(
                (line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr[-200:]
            )
            raise PluginBuildError(
                f"{command[0]} could not build the plugin ({reason.strip()}): try another one by CC"
            )
        os.replace(draft, target)


def _run(command: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a child whose exit status is its own: where our parent ignores SIGCHLD, each child's would be 0. Only the
    main thread can change that. Raises OSError, TimeoutExpired."""
    before = signal.getsignal(signal.SIGCHLD)
    is_main = threading.current_thread() is threading.main_thread()
    hides_ends = is_main and before == signal.SIG_IGN
    if hides_ends:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    finally:
        if hides_ends:
            signal.signal(signal.SIGCHLD, before)


def install_into(folder: Path) -> None:
    """Build what an installation of the package has of C: the plugin and the simulated step.

    Raises PluginBuildError, OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, (sources, headers, flags, libraries) in _LIBRARIES.items():
        build = build_of(sources, headers)
        whole = (_NOWHERE, *flags, f'-DDCCL_BUILD="{build}"')
        _compile([*compiler(), *whole, *(str(HERE / s) for s in sources)], folder / name, libraries)
        (folder / f"{name}.build").write_text(build)


def _installed(name: str) -> Path | None:
    """The library that lies in the package, if it is of these sources."""
    sources, headers, *_ = _LIBRARIES[name]
    try:
        return (
            INSTALLED / name
            if (INSTALLED / f"{name}.build").read_text() == build_of(sources, headers)
            else None
        )
    except OSError:
        return None


def library_path(name: str) -> Path:
    """LIBRARY or STEP, compiled at first use where it is not installed. Raises PluginBuildError."""
    sources, headers, flags, libraries = _LIBRARIES[name]
    return _installed(name) or compile_once(name, sources, flags, headers, libraries)


def plugin_path() -> Path:
    """The plugin's shared library (tuner and profiler in one). Raises PluginBuildError.

    Inside a job it is the file that the launcher chose (DYNAMICCL_PLUGIN): two copies would not share a table.
    """
    return Path(os.environ.get("DYNAMICCL_PLUGIN") or library_path(LIBRARY))


def needs_compiler() -> bool:
    """Whether the plugin has still to be compiled on this machine, or may have to be."""
    return not os.environ.get("DYNAMICCL_PLUGIN") and _installed(LIBRARY) is None


def _there() -> Path | None:
    """The plugin's file that a job here would load; None where it has still to be compiled."""
    if not needs_compiler():
        return plugin_path()
    sources, headers, flags, _ = _LIBRARIES[LIBRARY]
    try:
        path, _ = _in_cache(LIBRARY, sources, flags, headers)
    except (PluginBuildError, OSError):
        return None
    return path if path.exists() else None


def load_fault() -> str:
    """Why the plugin that is there cannot be loaded on this machine, as the loader says; '' if it can be.

    Also '' where it has still to be compiled. NCCL takes no notice of a plugin that it cannot load.
    """
    path = _there()
    if path is None:
        return ""
    # A child loads it: our own process stays as it is, also where the library is damaged.
    command = [sys.executable, "-I", "-S", "-c", _LOAD, str(path)]
    try:
        done = _run(command, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # nothing is known
        return ""
    return done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else ""


def nccl_release() -> tuple[int, int, int] | None:
    """Of the NCCL that PyTorch would load; None where none is in sight, or where it is not known which."""
    from ....traces.here import configured
    from .installed import nccl_release as found

    return found(configured())


def takes_no_path(release: tuple[int, ...] | None) -> bool:
    """Whether NCCL of this release loads a plugin by its name alone; None: not known, and then it most likely does not.

    >>> takes_no_path((2, 27, 3)), takes_no_path((2, 27, 5)), takes_no_path(None)
    (True, False, False)
    """
    return release is not None and (2, 27, 0) <= release < (2, 27, 5)


def named(value: str) -> bool:
    """Whether a variable of NCCL's names our plugin: by its file, whatever the folder, as NCCL completes it, or as the
    launcher chose it (DYNAMICCL_PLUGIN).

    >>> named(f"/x/{LIBRARY}"), named("/venvs/dynamiccl/lib/libnccl-tuner-site.so"), named("")
    (True, False, False)
    """
    return os.path.basename(value) == LIBRARY or value in (
        "dynamiccl",
        os.environ.get("DYNAMICCL_PLUGIN") or LIBRARY,
    )


#: Where it is set the plugin counts all-reduces too, and tells what NCCL offers for them. Equal on all ranks.
ALL_REDUCE_VARIABLE = "DYNAMICCL_ALL_REDUCE"


def names_none(value: str) -> bool:
    """Whether a variable of NCCL's keeps it from loading a plugin, in letters of any case."""
    return value.lower() == "none"


def channels_env(headroom: int | None) -> dict[str, str]:
    """What makes communicators with so many channels where NCCL would have made fewer; nothing for None.

    NCCL agrees on the channels before it reads this, so all ranks of a communicator must have the same. Not
    NCCL_MIN_CTAS: that also raises the channels of NVLS, of symmetric kernels and of registered buffers, which no
    tuner could give back (2.28.9 src/transport/nvls.cc, src/sym_kernels.cc, src/register/coll_reg.cc).
    """
    if headroom is None:
        return {}
    theirs = os.environ.get("NCCL_MIN_NCHANNELS", "")
    return {"NCCL_MIN_NCHANNELS": str(max(headroom, int(theirs) if theirs.isdigit() else 0))}


def nccl_env(path: Path, *, headroom: int | None = None) -> dict[str, str]:
    """Environment that makes NCCL load ``path`` as tuner and profiler, beside those that the job has already.

    ``headroom``: see :func:`channels_env`.
    """
    from ....traces.here import configured

    theirs = configured()
    path = path.absolute()
    # By path: a name is lost where a job's script sets LD_LIBRARY_PATH anew. By name where the release takes no path,
    # or none so long. The folder is on LD_LIBRARY_PATH all the same: the job's NCCL may be another than the one seen
    # from here, and where it takes names alone the probe, which sits beside it, changes path into name.
    by_name = takes_no_path(nccl_release()) or len(os.fspath(path)) > _LONGEST
    search = os.pathsep.join(filter(None, [str(path.parent), os.environ.get("LD_LIBRARY_PATH")]))
    ours = {"DYNAMICCL_PLUGIN": str(path), "LD_LIBRARY_PATH": search}
    ours |= channels_env(headroom)
    ours |= dict.fromkeys(("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"), LIBRARY if by_name else str(path))
    # NCCL loads one tuner: ours asks theirs first. Where none is named it is looked for, see next_tuner.c: unless
    # "none" forbids it.
    other = theirs.get("NCCL_TUNER_PLUGIN", "")
    if other and not named(other):
        ours["DYNAMICCL_NEXT_TUNER"] = other
    return ours


def job_env(run: Path, headroom: int | None = None, all_reduce: str | None = None) -> dict[str, str]:
    """What a job of that run folder needs in its environment, see :func:`nccl_env`. ``all_reduce``: its option. Raises
    PluginBuildError."""
    own = {
        "DYNAMICCL_RUN": str(run),
        ALL_REDUCE_VARIABLE: all_reduce or "",
    }  # "": an earlier one must not count
    return {**own, **nccl_env(plugin_path(), headroom=headroom)}
