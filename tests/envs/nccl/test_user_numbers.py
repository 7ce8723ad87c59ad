"""Numbers that the user gives in variables."""

from types import SimpleNamespace

import pytest
from dynamiccl.envs.nccl.agreement.leader import Leader
from dynamiccl.envs.nccl.steps.clock import StepRecorder
from dynamiccl.envs.nccl.steps.sampling import START
from dynamiccl.envs.nccl.steps.user_numbers import (
    ATTACH_S,
    SAMPLE_EVERY,
    attach_s,
    sample_every,
    wrong_number,
)
from test_leader import Box


@pytest.fixture(autouse=True)
def rank_0(monkeypatch):
    for name in ("RANK", ATTACH_S, SAMPLE_EVERY):
        monkeypatch.delenv(name, raising=False)


def every():
    return StepRecorder(SimpleNamespace(cuda=None), None)._sampling.every


@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "1e3", str(2**32)])
def test_a_wrong_number_of_steps_is_named_and_counts_as_not_set(monkeypatch, capfd, value):
    """Before: "no plugin in this process", rank 0 recorded no step, and the tuner waited for one for ever."""
    monkeypatch.setenv(SAMPLE_EVERY, value)
    assert every() == START and f"{SAMPLE_EVERY}={value} is no number" in capfd.readouterr().err
    said = f"{SAMPLE_EVERY}={value}: this variable takes a whole number from 0 to {2**32 - 1}"
    assert wrong_number({SAMPLE_EVERY: value}) == said, 'before: "a number of 0 or more", of 1.5 too'
    monkeypatch.setenv("RANK", "3")
    assert sample_every() is None and capfd.readouterr().err == ""


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_number_of_seconds_is_named_and_counts_as_not_set(monkeypatch, capfd, value):
    """Before: "not attached: ValueError: could not convert string to float", without the variable's name."""
    monkeypatch.setenv(ATTACH_S, value)
    assert Leader(2, Box()).is_waiting({7}) and f"{ATTACH_S}={value} is no number" in capfd.readouterr().err
    said = f"{ATTACH_S}={value}: this variable takes a number of seconds, 0 or more"
    assert attach_s() == 60.0 and wrong_number({ATTACH_S: value}) == said


@pytest.mark.parametrize(("value", "number"), [("", None), ("0", 0), ("16", 16)])
def test_a_number_that_the_variable_takes_counts(monkeypatch, capfd, value, number):
    monkeypatch.setenv(SAMPLE_EVERY, value)
    monkeypatch.setenv(ATTACH_S, value)
    assert sample_every() == number and attach_s() == (60.0 if number is None else number)
    assert wrong_number({SAMPLE_EVERY: value, ATTACH_S: value}) == "" and capfd.readouterr().err == ""
