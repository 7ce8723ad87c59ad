"""The next PyTorch (``make test-next``): which backend is behind the name "nccl", and the probe in a job that has it.

Without a GPU the object of the backend is made, and no communicator of NCCL: what NCCL does there is not shown here.
"""

import os
import subprocess
import sys

import pytest
import torch
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from test_probe import finish, start

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14), reason="PyTorch 2.14 is not installed here"
)
MAKES = """
import torch, torch.distributed as dist
try:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    print(type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__)
except ValueError as error:
    print(error)
"""


def test_which_backend_is_behind_the_name(capsys):
    done = subprocess.run([sys.executable, "-c", MAKES], capture_output=True, text=True, check=True)
    found, is_second = done.stdout.strip(), os.environ.get("TORCH_DIST_USE_NCCL2") == "1"
    with capsys.disabled():
        print(f"\nbehind 'nccl': {found}; a GPU: {torch.cuda.is_available()}")
    if is_second:
        assert found == "ProcessGroupNCCL2"
    else:
        assert found == "ProcessGroupNCCL" or "no GPUs found" in found


@pytest.mark.skipif(
    os.environ.get("TORCH_DIST_USE_NCCL2") != "1", reason="nccl needs a GPU, nccl2 does not to be made"
)
def test_ranks_change_tables_in_a_job_whose_group_holds_nccl2():
    """Its default group holds gloo, which moves the bytes here, and nccl2, made and never used."""
    run = RunFolder.create()
    try:
        env = {**job_env(run.path), "BACKEND": "cpu:gloo,cuda:nccl", "JITTER_S": "0.05", "STEPS": "40"}
        said, errors = finish(start(["plain"], 2, env), run)
    finally:
        run.close()
    first, second = (one["generations"]["plain"] for one in said)
    assert first == second and len(set(first)) > 2, errors
    assert not any("dynamiccl" in text or "Traceback" in text for text in errors), errors
