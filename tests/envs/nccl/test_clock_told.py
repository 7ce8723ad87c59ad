"""The clock holds however NCCL tells: no call runs in two ways, no correct job is accused, and mutations are found."""

import shutil
import subprocess

import pytest
from clock_jobs import Job, run_job
from dynamiccl.envs.nccl.plugin.build import FLAGS, HERE, SOURCES, compile_once, compiler, plugin_path
from paths import TOOLS

SHORT, LONG, UNSAID = 30, 200, 4
OF_GROUP = "atomic_load_explicit(&seat->group, memory_order_relaxed)"
ASKED = ("clock.c", "memory_order_relaxed) && !has_asked_about_group(seat)", "memory_order_relaxed) && false")
HEARD = "2.27 counts though another thread tells than the one that asked"
TICK = "a tick is a load and a store"
#: Mutations of the plugin's sources: file, what stands there, what stands there instead.
MUTATIONS = {
    "a group counts when its collectives are told": [
        ("profiler.c", "    dccl_note_launch(p->seat, group_of(e->parent));", "    (void)p;"),
        (
            "clock.c",
            "  coll->generation = dccl_generation(seat);\n",
            "  coll->generation = dccl_generation(seat);\n  if (number != 0) dccl_note_launch(seat, seat->group);\n",
        ),
    ],
    "a call counts where it is made, though it may never run": [
        (
            "clock.c",
            "  return n;\n}\n\nvoid dccl_note_launch",
            "  dccl_note_launch(seat, this_group);\n  return n;\n}\n\nvoid dccl_note_launch",
        ),
        ASKED,
    ],
    "calls that were priced alone count with the next group": [
        (
            "clock.c",
            "n_called == 0 || atomic_load_explicit(&seat->group, memory_order_relaxed) != this_group",
            "n_called == 0",
        )
    ],
    "a launch counts whichever group it is of": [
        (
            "clock.c",
            "n_called == 0 || atomic_load_explicit(&seat->group, memory_order_relaxed) != group_of_calls",
            "n_called == 0",
        )
    ],
    "calls that were priced alone are in the hash": [
        ("clock.c", "first ? &seat->hash : &seat->called_hash", "&seat->called_hash")
    ],
    "a question is asked at the count with its own group": [
        (
            "switch.c",
            "  const uint64_t count = atomic_load(&seat->n_colls);\n  if",
            "  const uint64_t count = atomic_load(&seat->n_colls) + seat->n_called;\n  if",
        )
    ],
    "a collective is labelled by the table that answered last": [
        ("clock.c", "if (made >> 32 != (number & UINT32_MAX)) return;", "if (made >> 63 == 0) return;")
    ],
    "2.27 counts on where calls were captured": [
        ("clock.c", "&& !atomic_load(&seat->is_frozen)) dccl_freeze(seat);", "&& false) dccl_freeze(seat);")
    ],
    "2.27 counts where launches block": [
        ("clock.c", "atomic_store(&is_blocked, true);", "atomic_store(&is_blocked, false);")
    ],
    HEARD: [
        ("clock.c", "atomic_store(&seat->is_heard_late, true);", "atomic_store(&seat->is_heard_late, false);")
    ],
    TICK: [
        (
            "clock.c",
            "  atomic_fetch_add(&seat->n_colls, 1);",
            "  extern int sched_yield(void);\n  const uint64_t was = atomic_load(&seat->n_colls);\n  sched_yield();\n"
            "  atomic_store(&seat->n_colls, was + 1);",
        )
    ],
    "broadcasts count": [("clock.c", "if (is_broadcast(call->func)) return", "if (false) return")],
    "a launch counts whether or not NCCL asked": [ASKED],
    "a mark is there before its call counts": [("clock.c", "is_whole && at <= view->count", "is_whole")],
}


def wrong(outcome):
    """What a job shows to be wrong with the clock."""
    return outcome.two_ways or outcome.accused or (outcome.job.is_said and outcome.under_a_trial)


def found_within(library, copies, jobs):
    """The seed of the first job that shows something; None if none does."""
    return next((job.seed for job in jobs if wrong(run_job(job, library, copies))), None)


def holds(copies, seeds):
    outcomes = [run_job(Job.of(seed), plugin_path(), copies) for seed in seeds]
    assert sum(outcome.two_ways for outcome in outcomes) == 0
    assert [outcome.accused for outcome in outcomes if outcome.accused] == []
    tried = [outcome for outcome in outcomes if outcome.under_a_trial > 20]
    assert len(tried) > 0.6 * len(outcomes), "most jobs are tuned all the same"
    late = [outcome for outcome in outcomes if outcome.job.is_said]
    assert late and all(outcome.no_clock and not outcome.under_a_trial for outcome in late)
    compared = sum(outcome.compared for outcome in outcomes)
    print(f"{len(outcomes)} jobs, {compared} calls compared, none in two ways, none accused")


def test_no_call_runs_in_two_ways_however_nccl_tells(tmp_path):
    holds(tmp_path, range(SHORT))


@pytest.mark.slow
def test_no_call_of_200_jobs_runs_in_two_ways_however_nccl_tells(tmp_path):
    """Captured beside eager; launches that block, do not, or are switched; two nodes; releases 2.27 to 2.32."""
    holds(tmp_path, range(LONG))


def test_a_thread_that_had_not_asked_ends_the_clock_and_accuses_nobody(tmp_path):
    """No variable and no capture says that NCCL tells late: the thread alone does, and that ends the clock in time."""
    for seed in range(UNSAID):
        outcome = run_job(Job.unsaid(seed), plugin_path(), tmp_path)
        assert not wrong(outcome) and "another thread than the caller's" in outcome.no_clock


@pytest.fixture(scope="module")
def mutant(tmp_path_factory):
    """mutant(name) -> a build of the plugin with that mutation."""

    def build(name):
        folder = tmp_path_factory.mktemp("mutant")
        for path in HERE.glob("*.[ch]"):
            shutil.copy(path, folder)
        for file, stands, instead in MUTATIONS[name]:
            text = (folder / file).read_text()
            assert text.count(stands) == 1, f"{file}: {stands}"
            (folder / file).write_text(text.replace(stands, instead))
        flags = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-w", "-fvisibility=hidden", "-fPIC", "-shared")
        sources = [str(folder / source) for source in SOURCES]
        library = folder / "mutant.so"
        command = [*compiler(), *flags, *sources, "-o", str(library), "-lpthread", "-ldl"]
        subprocess.run(command, check=True)
        return library

    return build


#: Found after many jobs.
RARE = ("2.27 counts on where calls were captured",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in RARE else ())
        for name in MUTATIONS
        if name != TICK  # the jobs have one thread: see the test of two
    ],
)
def test_a_mutation_of_the_clock_is_found(mutant, tmp_path, name):
    jobs = map(Job.unsaid if name == HEARD else Job.of, range(LONG))
    seed = found_within(mutant(name), tmp_path, jobs)
    assert seed is not None
    print(f"found by job {seed}")


def counted(library, n):
    """How many collectives the plugin counts of 2 n that two threads tell on one communicator at once."""
    program = compile_once("two-tell", (str(TOOLS / "two_tell.c"),), (*FLAGS, f"-I{HERE}"))
    told = subprocess.run([program, library, str(n)], capture_output=True, text=True, check=True)
    return int(told.stdout)


def test_two_threads_that_tell_at_once_are_both_counted(mutant):
    """With 2.27 these are the caller and a thread of CUDA's. Before: a tick was a load and a store, and some were lost.

    From 2.28 on a communicator's group under way is its caller's alone. The mutant's ticks are met at any load.
    """
    assert counted(plugin_path(), 200_000) == 400_000
    assert counted(mutant(TICK), 20_000) < 40_000
