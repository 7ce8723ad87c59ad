"""Which NCCL this Python's PyTorch would load. Installed is not loaded: every copy in sight is told apart.

Standard library only, and PyTorch is not imported: the launcher asks before the job starts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from ....traces.here import release_of, version_of

#: NCCL's wheels, by CUDA's major release.
WHEELS = {13: "nvidia-nccl-cu13", 12: "nvidia-nccl-cu12", 11: "nvidia-nccl-cu11"}
_LIBRARY = "libnccl.so"
_MOST_ENTRIES = 4096  # of a folder on LD_LIBRARY_PATH

Release = tuple[int, int, int]


@dataclass(frozen=True)
class Copy:
    """One NCCL: where it comes from, and its release where that can be told."""

    source: str  # a package, or "LD_PRELOAD: PATH"
    release: Release | None

    def __str__(self) -> str:
        release = ".".join(map(str, self.release)) if self.release else "release not known"
        return f"{release} ({self.source})"


def torch_cuda() -> int | None:
    """CUDA's major release of the installed PyTorch; 0 for a build without CUDA, None where it is not known."""
    with contextlib.suppress(Exception):  # finding a package can raise whatever its loader raises
        spec = util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"](\d+))", text, flags=re.MULTILINE)
            return int(found[1] or 0) if found else None
    return None


def has_torch() -> bool | None:
    """Whether PyTorch is among this Python's packages; None where that is not known."""
    with contextlib.suppress(Exception):
        return util.find_spec("torch") is not None
    return None


def wheels() -> list[Copy]:
    """NCCL's wheels that PyTorch may load: that of its CUDA; all that are installed where its CUDA is not known."""
    cuda = torch_cuda()
    if cuda == 0:
        return []
    names = [name for major, name in WHEELS.items() if cuda in (None, major)]
    return [Copy(name, release_of(version_of(name))) for name in names if _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    except Exception:  # there is something, and it is damaged
        return True
    return True


def copies(env: Mapping[str, str]) -> list[Copy]:
    """Other NCCLs that the loader is told of: files on LD_PRELOAD, and in folders on LD_LIBRARY_PATH."""
    found = dict[str, Copy]()
    for source, path in _named(env):
        real = os.path.realpath(path)
        release = re.search(r"\.so\.(\d+\.\d+\.\d+)$", real)
        found.setdefault(real, Copy(f"{source}: {path}", release_of(release[1]) if release else None))
    return list(found.values())


def _named(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(variable, path of a file that is an NCCL by its name)."""
    for path in re.split(r"[:\s]+", env.get("LD_PRELOAD", "")):
        if os.path.basename(path).startswith(_LIBRARY):
            yield "LD_PRELOAD", path
    for folder in filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(folder)[:_MOST_ENTRIES] if name.startswith(_LIBRARY))
            yield from (("LD_LIBRARY_PATH", os.path.join(folder, name)) for name in names[:1])


def in_sight(env: Mapping[str, str]) -> list[Copy]:
    """All NCCLs that a job may load from here; a preloaded one leaves no choice."""
    named = copies(env)
    preloaded = [copy for copy in named if copy.source.startswith("LD_PRELOAD")]
    return preloaded or [*wheels(), *named]


def nccl_release(env: Mapping[str, str] | None = None) -> Release | None:
    """The release that a job would load; None where there is none in sight, or where the copies in sight differ."""
    releases = {copy.release for copy in in_sight(os.environ if env is None else env)}
    return releases.pop() if len(releases) == 1 else None
