"""``dynamiccl clusters``: what runs have left for the next one on their cluster; with --forget, no more."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

from . import Json, Option, fail, refusing

Where = Annotated[
    str | None,
    Option(
        "--memory",
        metavar="URL",
        help="Where tables are kept for the next run: a folder or s3://... Default: DYNAMICCL_MEMORY, else "
        "dynamiccl/clusters in the user's data folder.",
    ),
]


def clusters(
    memory: Where = None,
    forget: Annotated[str | None, Option(metavar="CLUSTER", help="Remove all that is known of it.")] = None,
    json: Json = False,
) -> None:
    """The tables that earlier runs have found, kept for the next run on the same cluster.

    A cluster is known by its GPUs, nodes x ranks and NCCL. The same job begins with the table of its last verdict, as
    the first that is compared with NCCL's own choice. `dynamiccl tune --no-memory` does without.

    \b
    dynamiccl clusters
    dynamiccl clusters --forget 3f2a91c07b5e
    """
    from ...traces.header import plain
    from ..daemon.memory import Store
    from ..report.outputs import VARIABLE, default_url

    where = memory or default_url()
    if where is None:
        fail(f"the memory is switched off by {VARIABLE}: name one with --memory")
    with refusing(ValueError, OSError):
        store = Store(where)
        keys = store.keys()
        if forget is not None:
            if forget not in keys:
                fail(f"nothing is known of a cluster {forget}; known are: {', '.join(keys) or 'none'}")
            store.files.rm(f"{store.root}/{forget}", recursive=True)
            keys.remove(forget)
        known = {key: store.read(key) for key in keys}
    if json:
        told = {}
        for key, (runs, passed) in known.items():
            runs = [{**run, "slots": plain([vars(slot) for slot in run["slots"]])} for run in runs]
            told[key] = {"runs": runs, "passed_over": passed}
        print(json_module.dumps({"memory": store.url, "clusters": told}, indent=1))
        return
    _show(known, store.url)


def _show(known: dict[str, Any], url: str) -> None:
    from ..report.verdict import change

    if not known:
        print(f"nothing is known of any cluster in {url}: `dynamiccl tune` fills it")
    for key, (runs, passed) in known.items():
        print(f"{key}  " + (", ".join(map(str, runs[0]["cluster"].values())) if runs else "unknown"))
        for run in runs:
            told = run["speedup"]
            gain = "nothing confirmed" if told is None else f"steps {change(told[0], told[1:])}"
            print(f"  {run['written']}  {gain}, {len(run['slots'])} slots  {run['job']}")
        for text in passed:
            print(f"  passed over: {text}")
