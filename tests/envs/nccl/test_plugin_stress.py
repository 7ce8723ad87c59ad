"""Random jobs of eight ranks with switches all the time, through every tuner version; what an answer takes."""

import subprocess

import pytest
from dynamiccl.envs.nccl.plugin.build import FLAGS, HERE, compile_once, plugin_path
from fuzz import fuzz
from paths import TOOLS
from stress import MODES, SANITIZERS, stress

WRONG = ("disagreements", "outside", "failures", "crashed")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_random_jobs_agree_call_by_call(sanitize, mode):
    jobs = 200 if sanitize == "none" else 30
    counted = stress(jobs, sanitize=sanitize, mode=mode)
    assert {name: counted[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
    assert counted["jobs"] == jobs and counted["forced"] > 0.1 * counted["calls"]
    assert counted["switches"] > 50 * jobs


@pytest.mark.timing
def test_an_answer_under_64_rows_takes_at_most_30_ns(folder):
    """With a switch on the communicator. ``path_speed.c`` also takes other builds of the plugin, to compare with."""
    source = TOOLS / "path_speed.c"
    program = compile_once("path-speed", (str(source),), (*FLAGS, f"-I{HERE}"))
    timed = subprocess.run(
        [program, str(folder.path), plugin_path()], capture_output=True, text=True, check=True
    )
    answer_ns, note_ns = map(float, timed.stdout.split())
    print(f"an answer takes {answer_ns:.1f} ns, a note of the profiler {note_ns:.1f} ns")
    assert answer_ns <= 30


@pytest.mark.slow
def test_a_process_that_does_not_wait_at_its_limit_is_found_out():
    assert stress(20, mode="passes limits")["disagreements"] > 20


def test_fuzzed_readers_refuse_or_understand():
    """Some hundred inputs here; ``python tests/tools/fuzz.py --minutes 5`` for the long run."""
    counts = fuzz(400, seed=7)
    assert min(counts[what] for what in ("table taken", "table refused", "ring read", "text refused")) > 4
