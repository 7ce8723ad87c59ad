"""The page that trains GPT-2 of the transformers package under the tuner, as it is pasted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_gpt2_of_the_page_trains_under_the_tuner(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="not installed")
    page = (ROOT / "zero_workload" / "README.md").read_text()
    section = page.partition("## GPT-2 of the transformers package")[2]
    code = re.search(r"```python\n(.*?)```", section, flags=re.S)
    assert code
    (tmp_path / "gpt2.py").write_text(code[1])
    command = re.search(r"`(dynamiccl tune .*?)`", section, flags=re.S)
    assert command
    words = command[1].split()
    words[words.index("--")] = "--out out --no-memory --json --"
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone"
    line = " ".join(words[1:]).replace("torchrun", torchrun)
    done = subprocess.run(
        [sys.executable, "-m", "dynamiccl.agent.cli", *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(
        r"loss (\d\.\d+)", done.stdout + done.stderr + (tmp_path / "out" / "job.log").read_text()
    )
    assert loss and float(loss[1]) < 3.5  # of 5.5 at the start
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["job_status"] == 0 and 0 < summary["steps_to_verdict"] <= 300
