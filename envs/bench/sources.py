"""Which search a result was made with: a digest of the sources that decide what a policy's actions give.

The version of the package changes too seldom for it, and a suite's digest covers its jobs alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

#: Files and folders of the package that decide: the search, the simulator, NCCL's model, and how a job is accounted.
SOURCES = (
    "envs/search",
    "envs/sim",
    "envs/nccl_model",
    "envs/bench/job_arena.py",
    "envs/bench/job_suites.py",
    "envs/bench/scores.py",
    "traces/fingerprint.py",
    "traces/names.py",
    "traces/records.py",
    "traces/spaces.py",
)
#: Endings of code and of the data that it reads. Pages and compiled files decide nothing.
ENDINGS = (".py", ".c", ".json", ".npz", ".toml")


@functools.cache
def search_digest() -> str:
    """Twelve hex digits that change with the sources, in a checkout and in an installed package alike. A changed
    comment changes them too: two results of different digests may still agree, so replay their decisions."""
    root = resources.files("dynamiccl")
    total = hashlib.sha256()
    for source in SOURCES:
        place = root.joinpath(source)
        for name, file in _files(place, source):
            content = hashlib.sha256(file.read_bytes())
            line = f"{name} {content.hexdigest()}\n"
            total.update(line.encode())
    return total.hexdigest()[:12]


def _files(place: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    """The files of a source with their names, in the order of the names."""
    if place.is_dir():
        for one in sorted(place.iterdir(), key=lambda one: one.name):
            yield from _files(one, f"{name}/{one.name}")
    elif name.endswith(ENDINGS):
        yield name, place
