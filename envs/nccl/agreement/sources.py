"""Which code takes part: ranks whose code differs must not decide together. A version alone does not say: two commits
may have the same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

_NCCL = Path(__file__).parents[1]
#: What the ranks run beside the plugin, which has a hash of its own.
FILES = (
    *sorted(_NCCL.rglob("*.py")),
    *(_NCCL.parents[1] / "traces" / name for name in ("reasons.py", "records.py")),
)


def digest_of(files: tuple[Path, ...]) -> str:
    """Twelve hex digits of these files and their names; "" if there are none to read (a package in a zip file)."""
    text = hashlib.sha256()
    try:
        for path in files:
            text.update(path.name.encode())
            text.update(path.read_bytes())
    except OSError:
        return ""
    return text.hexdigest()[:12] if files else ""


#: Read as the probe is imported: the code that runs, whatever becomes of the files.
DIGEST = digest_of(FILES) if _NCCL.is_dir() else ""
