"""Where things lie, for tests: none of them counts the folders above itself."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "data"
HELPERS = TESTS / "helpers"
TOOLS = TESTS / "tools"
