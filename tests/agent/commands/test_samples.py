"""The recordings that come with the package: what a new user sees first."""

import json

import pytest
from command import invoke
from paths import ROOT

SAMPLES = ROOT / "agent" / "samples"


def test_a_profile_can_be_advised_on_without_a_gpu():
    """Before: a new user had none, as one of gloo is refused."""
    done = invoke(["advise", "--sample", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and {slot["func"] for slot in told["slots"]} == {
        "all_gather",
        "reduce_scatter",
    }
    assert "GPU, driver and kernels replaced by CPU code" in done.stderr
    assert "two namespaces of one machine; a software cable whose limits we chose" in done.stderr
    assert invoke(["advise", "--sample"]).stdout.splitlines()[-1].startswith(told["outlook"]["answer"])


def test_a_recorded_run_can_be_shown_without_a_gpu():
    done = invoke(["show", "--sample"])
    assert done.exit_code == 0 and "emulated" in done.stderr and "emulated" in done.stdout.lower()
    summary = json.loads(invoke(["show", "--sample", "--json"]).stdout)["summary"]
    assert summary["speedup"] > 1 and summary["ended"]["code"] == "stopped" and not summary["kept"]


def test_the_samples_are_the_first_commands_of_the_pages():
    first = (ROOT / "docs" / "start.md").read_text("utf-8").partition("## 1. ")[2].partition("## 2. ")[0]
    assert (
        first.index("dynamiccl advise --sample")
        < first.index("dynamiccl show --sample")
        < first.index("make demo")
    )
    screen = (ROOT / "README.md").read_text("utf-8").partition("![")[0]
    assert screen.index("show --sample") < screen.index("make demo")


@pytest.mark.parametrize(
    "words", [["advise"], ["advise", "--sample", "x"], ["show"], ["show", "--sample", "x"]]
)
def test_either_a_recording_or_the_sample_is_read(words):
    done = invoke(words)
    assert done.exit_code == 2 and "or --sample" in done.stderr


def test_a_sample_names_nothing_of_the_machine_that_made_it():
    for path in SAMPLES.rglob("*.json*"):
        assert not any(name in path.read_text() for name in ("/work", "/dev/shm", "/tmp", "/root", 'vm"'))
