"""Fixtures that several test files share."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: the matrices here are small, threads only fight

import pytest
from dynamiccl.envs.nccl.shm import RunFolder


@pytest.fixture
def folder():
    run = RunFolder.create()
    yield run
    run.close()
