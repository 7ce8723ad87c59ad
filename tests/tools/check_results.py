"""Check folders that somebody gave (``dynamiccl lab submit``): ``python tests/tools/check_results.py FOLDER...``.

Looks at schema, privacy, obedience, A/A and plausibility. Exit status 1 where something is wrong. Emulated results are
refused: they are no measurement.
"""

import json
import sys
from pathlib import Path

from dynamiccl.agent.checks.results.checked import faults
from dynamiccl.agent.checks.results.submit import HEADER


def emulated(folder):
    """A fault where the times are the emulated cluster's."""
    try:
        header = json.loads((folder / HEADER).read_text())
    except (OSError, ValueError):
        return []
    return ["plausibility: times of the emulated cluster are not filed"] if header.get("emulated") else []


def main(folders):
    """The number of folders that are refused."""
    refused = 0
    for folder in folders:
        found = [*faults(folder), *emulated(folder)]
        print(f"{folder}: {'refused' if found else 'accepted'}")
        for line in found:
            print(f"  {line}")
        refused += bool(found)
    return refused


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(min(main([Path(word) for word in sys.argv[1:]]), 1))
