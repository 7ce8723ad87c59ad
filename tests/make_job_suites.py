"""Make suite 4 anew: ``python tests/make_job_suites.py`` (half a minute).

Seeds from 3,000,000,000 on are kept for suites: nothing trains on them.
"""

from pathlib import Path

from dynamiccl.envs.bench import job_suites
from dynamiccl.envs.bench.job_suites import FAMILIES, draw_suite
from dynamiccl.envs.bench.strata import SUITES

JOBS = 1000
SEEDS = {"standard": 3_000_000_010, "held-out": 3_000_000_011}


def main():
    folder = Path(job_suites.__file__).parent
    for name, file in SUITES.items():
        suite = draw_suite(name, FAMILIES[name], SEEDS[name], JOBS)
        suite.save(folder / file)
        print(f"{file}: {len(suite)} jobs")
        for world, row in suite.record()["figures"].items():
            print(f"  {world:12} {row}")


if __name__ == "__main__":
    main()
