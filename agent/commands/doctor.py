"""``dynamiccl doctor``: the traps in this environment, each with its cure."""

from pathlib import Path
from typing import Annotated

from . import Argument, Json, Option, refusing


def doctor(
    command: Annotated[list[str] | None, Argument(help="The job, after --; it is only read, not run.")] = None,
    table: Annotated[Path | None, Option(help="Also check this table against the environment.")] = None,
    ranks: Annotated[int | None, Option(help="Ranks of the job, for a table that depends on it.")] = None,
    nodes: Annotated[int | None, Option(help="Nodes of the job, for a table that depends on it.")] = None,
    json: Json = False,
) -> None:
    """Name each trap in this environment that would make tuning useless or unsafe, and how to cure it.

    Exit status 1 if something must be changed, 0 if not.
    """
    import json as json_module

    from ..checks.doctor import examine, gather

    loaded = None
    if table:
        from ...envs.nccl.tables import load_table

        with refusing(ValueError):
            loaded = load_table(table, n_ranks=ranks, n_nodes=nodes)
    facts = gather(command, loaded)
    findings = examine(facts)
    if json:
        print(json_module.dumps([vars(finding) for finding in findings], indent=1))
    else:
        nccl = ".".join(map(str, facts.nccl)) if facts.nccl else "no NCCL found"
        gpus = "no GPU" if not facts.n_gpus else f"{facts.n_gpus} GPUs"
        print(f"NCCL: {nccl}; {gpus} in sight")
        if not facts.nccl and not facts.n_gpus:  # where the GPUs are this may be another Python's
            print("Without NCCL a job is tuned on the emulated cluster only: dynamiccl tune --cluster dgx-h100-2x8")
        for finding in findings:
            print(f"{'CHANGE' if finding.must_change else 'note  '}  {finding.what}\n        -> {finding.cure}")
        if not findings:
            print("nothing in the way of the tuner")
    if any(finding.must_change for finding in findings):
        raise SystemExit(1)
