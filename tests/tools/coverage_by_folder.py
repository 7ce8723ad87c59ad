"""What ``make coverage`` has measured, by folder: lines, and branches taken of those that there are."""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path


def main():
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", out], check=True)
        files = json.loads(out.read_text())["files"]
    sums = defaultdict(lambda: [0, 0, 0, 0])
    for name, told in files.items():
        s = told["summary"]
        values = s["covered_lines"], s["num_statements"], s["covered_branches"], s["num_branches"]
        for place in (str(Path(name).parent), "in all"):
            sums[place] = [a + b for a, b in zip(sums[place], values, strict=True)]
    for place in [*sorted(set(sums) - {"in all"}), "in all"]:
        lines, of_lines, branches, of_branches = sums[place]
        print(f"{place:16} {lines / of_lines:6.1%} of {of_lines:6,} lines  {branches / max(of_branches, 1):6.1%} of "
              f"{of_branches:6,} branches")  # fmt: skip


if __name__ == "__main__":
    main()
