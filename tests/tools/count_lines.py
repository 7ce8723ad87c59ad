"""Print the lines of the product by folder, Python and C: ``python tests/tools/count_lines.py``. For
information only."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("agent", "envs", "envs/nccl", "envs/sim", "traces", "zero_workload")


def lines(folder: str, *suffixes: str) -> int:
    """Count the lines of the files below a folder, without those below a more specific folder of the list."""
    inner = [ROOT / f for f in FOLDERS if f.startswith(f"{folder}/")]
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sum(len(p.read_text().splitlines()) for p in files if not any(i in p.parents for i in inner))


def main() -> None:
    counts = {folder: (lines(folder, ".py"), lines(folder, ".c", ".h")) for folder in FOLDERS}
    counts["in all"] = (sum(n for n, _ in counts.values()), sum(n for _, n in counts.values()))
    for folder, (python, c) in counts.items():
        print(f"{folder:14} {python:7,} lines of Python {c:6,} of C")


if __name__ == "__main__":
    main()
