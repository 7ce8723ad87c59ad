"""Facts of the machine and the process, each known or None: asking never raises.

Jobs run under user ids without an entry in passwd, without HOME, in folders that were deleted, beside packages whose
metadata is gone. A job must start all the same. Standard library only: the launcher asks before the job starts.
"""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path


def home() -> Path | None:
    """The user's home folder."""
    with contextlib.suppress(Exception):  # RuntimeError: neither HOME nor an entry in passwd
        found = Path.home()
        return found if found.is_absolute() else None
    return None


def user_folder(variable: str, below_home: str) -> Path | None:
    """A folder of the user's by the XDG convention: what ``variable`` names, else ``below_home`` in the home folder."""
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named)
    base = home()
    return base / below_home if base else None


def program(module: str = "dynamiccl.agent.cli") -> list[str]:
    """The words that start a Python program as a child of ours.

    ``python -m`` imports from the current folder first, where a job may have a ``queue.py``. The child does so only
    where that folder holds this package itself; the job does as it would without us.
    """
    flags = ["-P"]
    with contextlib.suppress(OSError):  # the current folder may be gone
        if Path(__file__).parents[2] == Path.cwd():
            flags = []
    return [sys.executable, *flags, "-m", module]


def docstring(function: Callable[..., object]) -> str:
    """The docstring of a function, also under PYTHONOPTIMIZE=2, which leaves none: then it is read from the source."""
    import inspect

    if function.__doc__ is None:
        import ast

        with contextlib.suppress(Exception):  # there may be no source
            (tree,) = ast.parse(inspect.getsource(function)).body
            return ast.get_docstring(tree) or ""  # type: ignore[arg-type]
    return inspect.getdoc(function) or ""


def pip_install(extra: str) -> str:
    """The command that installs an extra: no registry has the package."""
    return f"pip install '.[{extra}]' in a checkout, or pip install 'FILE.whl[{extra}]'"


def temp_folder() -> Path | None:
    """The folder for temporary files."""
    with contextlib.suppress(Exception):  # FileNotFoundError: no folder that can be written to
        return Path(tempfile.gettempdir())
    return None


def absolute(path: str | Path) -> Path:
    """``path`` from the root; as it is where the current folder, or the home that ``~`` means, is not known."""
    made = Path(path)
    with contextlib.suppress(Exception):
        made = made.expanduser()
    with contextlib.suppress(Exception):
        made = made.absolute()
    return made


def version_of(package: str) -> str | None:
    """The installed version of a package; None for one that is not there or says nothing of itself."""
    with contextlib.suppress(Exception):  # metadata that is missing or damaged raises errors of many kinds
        found = metadata.version(package)
        return found if isinstance(found, str) and found else None
    return None


def release_of(version: str | None) -> tuple[int, int, int] | None:
    """The first three numbers of a version.

    >>> release_of("2.28.9.post1"), release_of("2.28"), release_of(None)
    ((2, 28, 9), None, None)
    """
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version or "")
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def machine() -> str | None:
    """The processor's architecture: ``x86_64``, ``aarch64``."""
    with contextlib.suppress(Exception):
        return os.uname().machine or None
    return None


def host() -> str | None:
    """The name of this host."""
    with contextlib.suppress(Exception):
        return platform.node() or None
    return None


def kernel() -> str | None:
    """The kernel's release."""
    with contextlib.suppress(Exception):
        return platform.release() or None
    return None


#: Variables of these names count as not set where they are empty.
_CLEARED = ("NCCL_", "DYNAMICCL_")
#: Bytes of a name and of a value that NCCL keeps.
_LONGEST_CONF = 1023


def configured() -> dict[str, str]:
    """NCCL's settings: the environment, below it NCCL_CONF_FILE or ~/.nccl.conf, below that /etc/nccl.conf.

    Of NCCL's variables and ours an empty one counts as not set, as NCCL reads it; it hides the files all the same.
    """
    own = os.environ.get("NCCL_CONF_FILE")
    if not own:
        with contextlib.suppress(Exception):  # KeyError: the user has no entry in passwd
            # NCCL does not ask HOME.
            own = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")
    found: dict[str, str] = {}
    for path in filter(None, (own, "/etc/nccl.conf")):
        with contextlib.suppress(OSError, ValueError):
            found = {**conf_lines(Path(path).read_bytes()), **found}
    merged = {**found, **os.environ}
    return {name: value for name, value in merged.items() if value or not name.startswith(_CLEARED)}


def conf_lines(data: bytes) -> dict[str, str]:
    """The variables that a configuration file of NCCL sets, as its ``setEnvFile`` reads them (2.28.9).

    Name and value are taken as they stand; the first line of a name counts. Only a line that begins with ``#`` is a
    comment. A NUL ends a line; bytes beyond 1,023 are cut.

    >>> conf_lines(b"NCCL_PROTO=Simple # safe\n NCCL_ALGO=ring\nNCCL_PROTO=LL\n")
    {'NCCL_PROTO': 'Simple # safe', ' NCCL_ALGO': 'ring'}
    """
    found: dict[str, str] = {}
    for line in data.split(b"\n"):
        name, equal, value = line.partition(b"\0")[0].partition(b"=")
        if equal and name and not line.startswith(b"#"):
            found.setdefault(os.fsdecode(name[:_LONGEST_CONF]), os.fsdecode(value[:_LONGEST_CONF]))
    return found
