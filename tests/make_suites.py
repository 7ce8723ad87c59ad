"""Make the benchmark's suites anew: ``python tests/make_suites.py`` (seconds). A changed suite needs a new number."""

from pathlib import Path

from dynamiccl.envs.arena import SUITES, Suite
from dynamiccl.envs.sim import family
from dynamiccl.envs.sim_env import BatchSim

ENVS = Path(__file__).parents[1] / "envs"
#: Seeds that nothing is trained on (training counts up from small numbers).
FAMILIES = {"standard": (family.STANDARD, 2_000_000_001), "held-out": (family.HELD_OUT, 2_000_000_002)}
TASKS = 128


def make(name: str) -> Suite:
    """The suite as it is shipped."""
    drawn, seed = FAMILIES[name]
    batch = BatchSim(TASKS, seed, drawn)
    batch.reset()
    return Suite.of(Path(SUITES[name]).stem.removeprefix("suite_").replace("_", "-"), batch)


if __name__ == "__main__":
    for name, file in SUITES.items():
        suite = make(name)
        suite.save(ENVS / file)
        print(f"{file}: {len(suite)} tasks, {suite.digest}, {(suite.drift_at < 64).sum()} drift")
