"""Fixtures that several test files share."""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the matrices here are small, threads only fight

# Ranks that share two cores with other tests may take longer to come together than in a job.
os.environ.setdefault("DYNAMICCL_MEET_MS", "2000")

# What tests learn of emulated clusters is no other test's, and not the user's.
os.environ["DYNAMICCL_MEMORY"] = "off"

import pytest
from dynamiccl.envs.nccl.shm import RunFolder


@pytest.fixture
def folder():
    run = RunFolder.create()
    yield run
    run.close()


@pytest.fixture(scope="session")
def two() -> Iterator[Any]:
    """Two processes joined over gloo."""
    yield from _world(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Any]:
    """Three of them."""
    yield from _world(3)


@pytest.fixture(scope="session")
def four() -> Iterator[Any]:
    """Four of them."""
    yield from _world(4)


def _world(size: int) -> Iterator[Any]:
    from world import World  # imports torch, which most tests can do without

    world = World(size)
    yield world
    world.close()
