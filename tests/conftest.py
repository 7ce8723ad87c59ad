"""Fixtures that several test files share."""

import pytest
from dynamiccl.envs.nccl.shm import RunFolder


@pytest.fixture
def folder():
    run = RunFolder.create()
    yield run
    run.close()
