"""Fixtures that several test files share."""

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Before numpy and torch: the matrices here are small, and threads of several workers only fight.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The width of the terminal that starts the tests is none of theirs.
os.environ.pop("COLUMNS", None)

# What tests learn of emulated clusters is no other test's, and not the user's.
os.environ["DYNAMICCL_MEMORY"] = "off"

import pytest
from dynamiccl.envs.nccl.shm import RunFolder
from hypothesis import settings

# ``make test`` draws the same examples each time, so that it fails for everybody or for nobody. ``make test-random``
# loads the other profile and prints its seed.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("random", derandomize=False, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

#: Reasons of skips that nothing in this checkout can do away with: what the machine lacks.
LACKS = (
    "not installed",
    "axe-core",
    "GPU",
    "root",
    "no Python",
    "two nodes cannot be made",
    "does not let us mount",
    "no IPv6",
    "could not import",
)


#: Files that take longest come first, or one of them runs alone at the end: those of slow tests by their seconds below,
#: those of quick tests by this list, from ``--durations``.
FIRST = (
    "test_zero_stages",
    "test_here",
    "test_start",
    "test_one_truth",
    "test_board",
    "test_tune_starts",
    "test_variables",
    "test_protocol",
    "test_job_suites",
    "test_agreement",
    "test_daemon",
    "test_clock_told",
)


#: Seconds that slow tests took when they were measured last (`--write-seconds`, two at a time on two cores). Those that
#: take over LONG_S are marked `long`: CI leaves them out.
SECONDS = Path(__file__).parent / "data" / "seconds.json"
LONG_S = 12.0
_took: Counter[str] = Counter()
_not_passed: set[str] = set()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    seconds = json.loads(SECONDS.read_text())
    for item in items:
        if seconds.get(item.nodeid, 0.0) > LONG_S:
            item.add_marker("long")
    yield  # now those that ``-m`` leaves out are gone
    of_file = Counter[Path]()
    for item in items:
        of_file[item.path] += seconds.get(item.nodeid, 0.0)
    rank = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: (-of_file[item.path], rank.get(item.path.stem, len(FIRST))))


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage looks through it again, and fewer are made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips", action="store_true", help="fail on a skip that this machine could have run"
    )
    parser.addoption(
        "--write-seconds", action="store_true", help=f"note in {SECONDS.name} how long slow tests took"
    )


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """A worker that a test has made nice, or deaf to a signal, runs a thousand other tests so."""
    before = _of_the_process()
    yield
    changed = {name: now for name, now in _of_the_process().items() if now != before[name]}
    assert not changed, "this test changes what the tests after it run with"


def _of_the_process() -> dict[str, Any]:
    handlers = {str(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {"nice": os.getpriority(os.PRIO_PROCESS, 0), "folder": os.getcwd(), **handlers}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slow" in report.keywords:
        _took[report.nodeid] += report.duration
        if not report.passed:
            _not_passed.add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(in_one_line(skipped))
    if found := could_have_run(skipped, config):
        terminalreporter.write_line(f"this machine could have run: {', '.join(found)}", red=True)
    # A new name has no time, so CI runs it, however long it takes: then somebody shall hear of it.
    known = json.loads(SECONDS.read_text())
    for name, seconds in _took.items():
        if seconds > LONG_S and name not in known:
            terminalreporter.write_line(
                f"{name} took {seconds:.0f} s and has no time in {SECONDS.name}: --write-seconds notes it"
            )


def in_one_line(skipped: Sequence[Any]) -> str:
    """How many tests were skipped for which reason, the most frequent one first."""
    reasons = Counter(" ".join(report.longrepr[2].removeprefix("Skipped: ").split()) for report in skipped)
    return "skipped: " + ", ".join(f"{n} ({reason})" for reason, n in reasons.most_common())


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--write-seconds") and not is_worker:
        new = {name: round(s, 1) for name, s in _took.items() if name not in _not_passed}
        known = json.loads(SECONDS.read_text()) | new
        SECONDS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter
        and session.exitstatus == 0
        and could_have_run(reporter.stats.get("skipped", []), session.config)
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def could_have_run(skipped: list[pytest.TestReport], config: pytest.Config) -> list[str]:
    """The tests that were skipped for anything but what the machine lacks; asked for by ``--strict-skips``."""
    if not config.getoption("--strict-skips"):
        return []
    return [report.nodeid for report in skipped if not any(lack in str(report.longrepr) for lack in LACKS)]


@pytest.fixture
def folder():
    run = RunFolder.create()
    yield run
    run.close()


@pytest.fixture(scope="session")
def one() -> Iterator[Any]:
    """One process in a group of its own."""
    yield from _world(1)


@pytest.fixture(scope="session")
def two() -> Iterator[Any]:
    """Two processes joined over gloo."""
    yield from _world(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Any]:
    """Three of them."""
    yield from _world(3)


@pytest.fixture(scope="session")
def four() -> Iterator[Any]:
    """Four of them."""
    yield from _world(4)


def _world(size: int) -> Iterator[Any]:
    from world import World  # imports torch, which most tests can do without

    world = World(size)
    yield world
    world.close()
