"""Random jobs of eight ranks against the plugin, in C, with or without a sanitizer: ``python
tests/tools/stress.py --jobs 200 --sanitize thread``. Exits 1 if the ranks of any job disagreed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from dynamiccl.envs.nccl.plugin.build import FLAGS, HERE, SOURCES, TOGETHER, compile_once
from dynamiccl.envs.nccl.shm import RunFolder

PROGRAM = [str(Path(__file__).with_name(name)) for name in ("stress.c", "stress_calls.c")]
#: When collectives are told; in the last the ranks obey no limit.
MODES = ("at once", "later", "passes limits")
SANITIZERS = ("none", "address,undefined", "thread")


def stress(jobs: int, seed: int = 1, sanitize: str = "none", mode: str = "at once") -> dict[str, int]:
    """Run ``jobs`` random jobs; what was counted: calls, forced, switches, disagreements, outside, failures, crashed.

    Raises PluginBuildError, or RuntimeError with the sanitizer's report.
    """
    flags = [*FLAGS, "-g", f"-I{HERE}", f"-I{Path(__file__).parent}"]
    if sanitize == "none":
        flags.append(TOGETHER)  # as it is shipped
    else:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    program = compile_once("stress-" + sanitize.replace(",", "-"), (*PROGRAM, *SOURCES), tuple(flags))
    total: dict[str, int] = {}
    for first in range(0, jobs, 20):  # every process leaves a ring of 8 MiB: clear them now and then
        run = RunFolder.create()
        try:
            command = [str(program), str(min(20, jobs - first)), str(seed + first), str(run.path)]
            env = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")}
            done = subprocess.run(
                [*command, str(MODES.index(mode))], env=env, capture_output=True, text=True, check=False
            )
        finally:
            run.close()
        if done.returncode not in (0, 1) or done.stderr:
            raise RuntimeError(f"exit status {done.returncode}\n{done.stderr}")
        for line in done.stdout.splitlines():
            name, value = line.split()
            total[name] = total.get(name, 0) + int(value)
    return total


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, default=MODES[0])
    parser.add_argument("--sanitize", choices=SANITIZERS, default="none")
    args = parser.parse_args()
    counted = stress(args.jobs, args.seed, args.sanitize, args.mode)
    print(", ".join(f"{value} {name}" for name, value in counted.items()))
    return int(any(counted[name] for name in ("disagreements", "outside", "failures", "crashed")))


if __name__ == "__main__":
    sys.exit(main())
