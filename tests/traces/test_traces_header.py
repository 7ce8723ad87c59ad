"""Secrets in command lines never reach a header; everything else does."""

import json

import pytest
from dynamiccl.traces.header import masked
from dynamiccl.traces.writer import TraceWriter

SECRETS = [
    ("train.py --hf-token hf_abcdefghijklmnopqrst --lr 3", "train.py --hf-token *** --lr 3"),
    ("train.py --token=abc123 --steps 5", "train.py --token=*** --steps 5"),
    ("WANDB_API_KEY=0123456789 python train.py", "WANDB_API_KEY=*** python train.py"),
    ("run --password 'open sesame'", None),
    ("python x.py --db postgres://user:pa55@host/db", "python x.py --db postgres://user:***@host/db"),
    ('curl -H "Authorization: Bearer abcdefgh12345"', 'curl -H "Authorization: Bearer ***"'),
    ("push ghp_abcdefghijklmnopqrstuvwx", "push ***"),
    ("aws AKIAABCDEFGHIJKLMNOP", "aws ***"),
    ("--openai sk-abcdefghijklmnop1234", "--openai ***"),
    ("--aws-secret-access-key wJalrXUtnFEMI", "--aws-secret-access-key ***"),
]
PLAIN = [
    "torchrun --nproc-per-node 8 train.py --lr 1e-3 --tokens-per-step 4096",
    "python train.py --tokenizer meta/llama --max-tokens 100 --data s3://bucket/key",
    "python -m dynamiccl.zero_workload --stage 3 --steps 20",
]


@pytest.mark.parametrize(("text", "wanted"), SECRETS)
def test_a_secret_is_masked(text, wanted):
    assert "***" in masked(text)
    assert wanted is None or masked(text) == wanted
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text):
    assert masked(text) == text


def test_a_trace_holds_none(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dynamiccl", "tune", "--", "train.py", "--token", "abc123"])
    with TraceWriter(tmp_path / "t", {"job": "train.py --api-key qwertz"}) as writer:
        writer.update_header(note="PASSWORD=hunter2")
    text = (tmp_path / "t" / "header.json").read_text()
    assert not any(secret in text for secret in ("abc123", "qwertz", "hunter2"))
    assert json.loads(text)["job"] == "train.py --api-key ***"
