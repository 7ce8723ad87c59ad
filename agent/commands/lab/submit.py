"""``dynamiccl lab submit``: build a folder of measured times for the project. Nothing is uploaded."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from .. import JSON, PATH, argument, command, option, refusing


@command
@argument("results", type=PATH, help="A folder of gpu-check, or of a tuning run.")
@option("--out", type=PATH, help="Folder to make. Default: submission in the current folder.")
@JSON
def submit(results: Path, out: Path | None, json: bool) -> None:
    """Build a folder of measured times for the project, and print its content. Nothing is uploaded.

    It holds times of collectives by setting and size, default step times relative to their median, GPU model,
    numbers of GPUs and nodes, kind of network, versions, some of NCCL's settings, and the week. It holds no host,
    user, path, address, id or model shape, and at most 1 MB. envs/results/README.md says how to send it, what is
    checked, and the terms (CC0).

    \b
    dynamiccl lab submit envs/results/FOLDER
    dynamiccl lab submit runs/tune/latest --out my-cluster
    """
    from ....traces.files import TraceError
    from ....traces.outside import read_json
    from ...checks.results.submit import build

    folder = out or Path("submission")
    with refusing(ValueError, OSError, TraceError):
        sizes = build(results, folder)
    header = read_json(folder / "header.json")
    if json:
        print(json_module.dumps({"folder": str(folder), "bytes": sizes, "header": header}, indent=1))
        return
    print(f"{folder}: {sum(sizes.values()):,} bytes; nothing was sent")
    for name in sizes:
        lines = (folder / name).read_text().splitlines()
        shown = lines if name == "header.json" else lines[:6]
        print(f"\n{name}: {len(lines)} lines\n" + "\n".join(shown))
    print(
        "\nRead it, then open a pull request that adds the folder below envs/results/ (its README.md says how)."
    )
