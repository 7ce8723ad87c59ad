"""The clock holds however NCCL tells: no call runs in two ways, no correct job is accused, and mutations are found."""

import shutil
import subprocess

import pytest
from clock_jobs import Job, run_job
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import HERE, SOURCES, compiler, plugin_path
from nccl_groups import Groups
from nccl_halves import Call
from plugin_run import offer

SHORT, LONG = 30, 200
OF_GROUP = "atomic_load_explicit(&seat->group, memory_order_relaxed)"
LAUNCHED = ("clock.c", "if (has_tuner && !has_asked(seat, FUNC_BROADCAST + 1, N_FUNCS - 1)) return;", "")
BEGUN = "  atomic_store_explicit(&seat->has_begun, true, memory_order_relaxed);\n"
COUNTED = ("clock.c", "!has_tuner || has_asked(seat, FUNC_ALL_GATHER, seat->last_tuned)", "true")
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
        LAUNCHED,
        COUNTED,
    ],
    "calls that were priced alone count with the next group": [
        (
            "clock.c",
            " ||\n                     atomic_load_explicit(&seat->group, memory_order_relaxed) != this_group",
            "",
        )
    ],
    "a launch counts whichever group it is of": [
        (
            "clock.c",
            "if (atomic_load_explicit(&seat->group, memory_order_relaxed) != group_of_calls) return;",
            "",
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
    "broadcasts are in the hash, and count": [
        ("clock.c", "if (is_broadcast(call->func)) return", "if (false) return"),
        ("clock.c", "if (!counts(seat, call->func)) return", "if (false) return"),
    ],
    "a launch counts whether or not NCCL asked": [LAUNCHED, COUNTED],
    "what was not asked about is in the hash": [LAUNCHED],
    "a mark is there before its call counts": [("clock.c", "is_whole && at <= view->count", "is_whole")],
}


#: Mutations of what is in the hash. No job of ranks that call alike shows them.
HASH_MUTATIONS = {
    "a group that begins with an all-reduce begins anew": [
        (
            "clock.c",
            f"{BEGUN}  if (!counts(seat, call->func)) return beside;\n",
            f"  if (!counts(seat, call->func)) return beside;\n{BEGUN}",
        )
    ],
    "all-reduces are not in the hash": [
        ("clock.c", "if (is_broadcast(call->func)) return", "if (!counts(seat, call->func)) return")
    ],
    "the hash of a group of all-reduces is dropped": [
        (
            "clock.c",
            "  const uint64_t hash = atomic_load_explicit(&seat->called_hash, memory_order_relaxed);\n",
            "  if (seat->n_called == 0) return;\n  const uint64_t hash = atomic_load(&seat->called_hash);\n",
        )
    ],
}


def wrong(outcome):
    """What a job shows to be wrong with the clock."""
    return outcome.two_ways or outcome.accused


def found_within(library, copies, jobs):
    """The seed of the first job that shows something; None if none does."""
    return next((job.seed for job in jobs if wrong(run_job(job, library, copies))), None)


def holds(copies, seeds):
    outcomes = [run_job(Job.of(seed), plugin_path(), copies) for seed in seeds]
    assert sum(outcome.two_ways for outcome in outcomes) == 0
    assert [outcome.accused for outcome in outcomes if outcome.accused] == []
    tried = [outcome for outcome in outcomes if outcome.under_a_trial > 20]
    assert len(tried) > 0.6 * len(outcomes), "most jobs are tuned all the same"
    compared = sum(outcome.compared for outcome in outcomes)
    print(f"{len(outcomes)} jobs, {compared} calls compared, none in two ways, none accused")


def test_no_call_runs_in_two_ways_however_nccl_tells(tmp_path):
    holds(tmp_path, range(SHORT))


@pytest.mark.slow
def test_no_call_of_200_jobs_runs_in_two_ways_however_nccl_tells(tmp_path):
    """Captured beside eager; launches that block, do not, or are switched; two nodes; releases 2.28 to 2.32."""
    holds(tmp_path, range(LONG))


def compiled(folder, sources):
    """Compiles these sources, each to an object beside it."""
    flags = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-w", "-fvisibility=hidden", "-fPIC", "-c")
    subprocess.run([*compiler(), *flags, *sources], cwd=folder, check=True)


@pytest.fixture(scope="module")
def mutant(tmp_path_factory):
    """mutant(name) -> a build of the plugin with that mutation. What it leaves as it is is compiled once."""
    plain = tmp_path_factory.mktemp("plain")
    for path in HERE.glob("*.[ch]"):
        shutil.copy(path, plain)
    compiled(plain, SOURCES)

    def build(name):
        folder = tmp_path_factory.mktemp("mutant") / "plugin"
        shutil.copytree(plain, folder)
        changed = set()
        for file, stands, instead in {**MUTATIONS, **HASH_MUTATIONS}[name]:
            text = (folder / file).read_text()
            assert text.count(stands) == 1, f"{file}: {stands}"
            (folder / file).write_text(text.replace(stands, instead))
            changed.add(file)
        compiled(folder, changed)
        library = folder / "mutant.so"
        objects = [folder / source.replace(".c", ".o") for source in SOURCES]
        subprocess.run([*compiler(), "-shared", *objects, "-o", library, "-lpthread", "-ldl"], check=True)
        return library

    return build


#: The job that finds a mutation, where none of the first few does: it is tried first.
FINDS = {
    "calls that were priced alone count with the next group": 51,
    "a mark is there before its call counts": 69,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_the_clock_is_found(mutant, tmp_path, name):
    seeds = sorted(range(LONG), key=lambda seed: seed != FINDS.get(name))
    seed = found_within(mutant(name), tmp_path, map(Job.of, seeds))
    assert seed is not None
    print(f"found by job {seed}")


#: What 16 groups of a rank are: g an all-gather, r an all-reduce.
WAYS = ("g", "g r", "gr", "r g", "rg", "r r g", "rr g", "rrg")


def hashes(library, folder, monkeypatch):
    """The hash of the first 16 all-gathers, each way; communicators with ids of their own stand for ranks."""
    monkeypatch.setenv("DYNAMICCL_RUN", str(folder / "of another node"))
    plugin, names = Plugin.load(library), {"g": "all_gather", "r": "all_reduce"}
    for number, way in enumerate(WAYS, 1):
        comm = Groups(library, number, 8, 1, 0)
        for group in way.split() * 16:
            comm.group([Call(names[one], 4096) for one in group], offer(ring_ll=10))
    return [plugin.comms()[number].marks[16] for number in range(1, len(WAYS) + 1)]


def test_ranks_that_make_or_group_all_reduces_otherwise_have_other_hashes(tmp_path, monkeypatch, mutant):
    """They do not count, and would let ranks that differ in them switch at other calls."""
    copy = shutil.copy(plugin_path(), tmp_path / "plugin.so")
    assert len(set(hashes(copy, tmp_path, monkeypatch))) == len(WAYS)
    for name in HASH_MUTATIONS:
        assert len(set(hashes(mutant(name), tmp_path, monkeypatch))) < len(WAYS), name
