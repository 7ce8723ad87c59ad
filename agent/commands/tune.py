"""``dynamiccl tune``: start a job, or join one, and tune it while it trains."""

from __future__ import annotations

import json as json_module
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import Headroom, fail

#: Our own job on an emulated cluster: bytes are stretched so that a block weighs what a 2.7B model's does in bf16
#: (160 MB), time so that communication and compute keep the proportion of a ZeRO-3 step with a small batch.
DEMO_CLUSTER, DEMO_BYTES_SCALE, DEMO_TIME_SCALE = "dgx-h100-2x8", 90.0, 30.0


def tune(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The training job, after --; without one our own ZeRO job runs.", show_default=False),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Emulate this cluster (a preset's name or a TOML file); no GPU is needed."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(help="Who decides: lstm, default, random, coordinate-descent, thompson, ..., or MODULE:NAME."),
    ] = "lstm",
    stage: Annotated[int, typer.Option(help="ZeRO stage of our own job, 0 to 3.")] = 3,
    steps: Annotated[
        int, typer.Option(help="Steps of our own job; the last ones are kept for the closing A/B.")
    ] = 1000,
    ranks: Annotated[int | None, typer.Option(help="Processes of our own job; default 2, or one a GPU.")] = None,
    windows: Annotated[int, typer.Option(help="Most windows that the search may take.")] = 60,
    verify: Annotated[int, typer.Option(help="Windows of the table in the closing A/B.")] = 20,
    window_steps: Annotated[
        int | None, typer.Option(help="Steps counted in a window; default 20, for our own job 4: it has few steps.")
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0, help="Share of the job's time that the search may lose against the default.")
    ] = 0.05,
    bytes_scale: Annotated[float | None, typer.Option(help="Emulated bytes for each byte of the job.")] = None,
    time_scale: Annotated[float | None, typer.Option(help="Wall-clock time for each emulated time.")] = None,
    weather: Annotated[
        str, typer.Option(help="How the emulated network changes: drift=0.2,burst=1,neighbour=0.5; empty: it does not.")
    ] = "",
    headroom: Headroom = None,
    attach: Annotated[
        str | None, typer.Option(help="Join a running job by its run folder, as `dynamiccl env` made it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the trace, the summary and the report.")] = Path("runs/tune"),
    seed: Annotated[int, typer.Option(help="Seed of the job, the emulation and the policy.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Also write the summary here; - prints it instead of text.")] = None,
) -> None:
    """Tune a training job while it trains.

    Every window changes one thing: the algorithm, protocol or channel count of one kind of all-gather or
    reduce-scatter. All ranks switch at the same step. The measured step time decides, always next to windows in which
    NCCL does as it likes, and an interleaved comparison at the end has the last word: where the table does not win,
    NCCL's own choice stays.

    \b
    dynamiccl tune                                   our ZeRO-3 job on the GPUs here, or emulated without GPUs
    dynamiccl tune --cluster dgx-h100-2x8            the same on an emulated cluster
    dynamiccl tune -- torchrun --nproc-per-node 8 train.py
    """
    from ...envs.nccl.build import PluginBuildError
    from ...envs.nccl.shm import RunFolder
    from ...traces.files import TraceError
    from ..console import Show, show_summary
    from ..daemon import Daemon, Emulated, Request, workload
    from ..tuner import Settings

    window_steps = window_steps if window_steps is not None else 20 if command or attach else 4
    _check(stage, steps, windows, verify, window_steps, command, attach)
    gpus = 0 if cluster or attach else n_gpus()
    if not (command or attach or cluster) and gpus < 2:
        cluster = DEMO_CLUSTER
    emulated = None
    if cluster:
        emulated = Emulated(cluster, bytes_scale or DEMO_BYTES_SCALE, time_scale or DEMO_TIME_SCALE, seed, weather)
        _check_cluster(emulated)
    facts: dict[str, Any] = {}
    job_log = None
    if attach and headroom:
        fail("the job's communicators are made already: give --headroom to `dynamiccl env`, before the job starts")
    own = not (command or attach)
    if own:
        facts = {"stage": stage, "n_processes": ranks or (2 if emulated else gpus)}
        job_log = out / "job.jsonl"
        job_log.unlink(missing_ok=True)
        backend = "emulated" if emulated else "nccl"
        command = workload(stage, steps, facts["n_processes"], job_log, backend=backend, seed=seed)
    elif command and shutil.which(command[0]) is None:
        fail(f"cannot start {command[0]!r}: no such program; give the job after --, e.g. -- torchrun train.py")
    settings = Settings(windows, verify, window_steps, steps if own else None, budget)
    quiet = json is not None and str(json) == "-"
    try:
        run = RunFolder.open(attach) if attach else None
        with Show(windows + verify, quiet) as show:
            request = Request(out, command or (), run, emulated, policy, seed, settings, facts, headroom, job_log)
            summary = Daemon(request, show.window, show.phase).serve()
    except (PluginBuildError, TraceError, ValueError, OSError) as error:
        fail(str(error))
    if json is not None:
        text = json_module.dumps(summary, indent=2)
        sys.stdout.write(text + "\n") if quiet else json.write_text(text + "\n")
    if not quiet:
        show_summary(show.console, summary)
    raise SystemExit(_exit_code(summary, out, own))


def _check(
    stage: int,
    steps: int,
    windows: int,
    verify: int,
    window_steps: int,
    command: list[str] | None,
    attach: str | None,
) -> None:
    from ..tuner import LEAST_PAIRS

    if stage not in (0, 1, 2, 3):
        fail(f"stage is 0, 1, 2 or 3, not {stage}")
    if command and attach:
        fail("give a command to start or --attach to join one, not both")
    if windows < 1 or verify < LEAST_PAIRS or window_steps < 1:
        fail(f"windows and window-steps start at 1, verify at {LEAST_PAIRS}: fewer pairs give no interval")
    least = (2 * verify + 12) * (window_steps + 3)
    if not (command or attach) and steps < least:
        fail(
            f"{steps} steps are too few: the closing A/B takes {least}; give --steps {2 * least} or a smaller --verify"
        )


def _check_cluster(emulated: Any) -> None:
    """Refuse an unknown preset before anything is started."""
    from ...envs.sim.clusters import cluster
    from ...envs.sim.weather import Weather

    try:
        cluster(emulated.cluster)
        Weather.parse(emulated.weather)
    except (ValueError, OSError) as error:
        fail(str(error))
    if emulated.bytes_scale <= 0 or emulated.time_scale <= 0:
        fail("bytes-scale and time-scale must be above 0")


def _exit_code(summary: dict[str, Any], out: Path, own: bool) -> int:
    """0 when the job ended well (or was interrupted by us), 1 when it failed, 2 when it could not be tuned."""
    if summary["ended"] in ("interrupted", "terminated"):  # as a shell says it: 128 + SIGINT, 128 + SIGTERM
        return 130 if summary["ended"] == "interrupted" else 143
    if summary["job_status"]:
        print(
            f"error: the job failed with status {summary['job_status']}; see {out / 'job.log'}",
            file=sys.stderr,
        )
        return 1
    if summary["speedup"] is None:
        hint = "give it more --steps" if own else "a job to tune trains with torch.distributed, for some hundred steps"
        print(f"error: no result: {summary['ended']} ({hint}); what was seen is in {out}", file=sys.stderr)
        return 2
    return 0


def n_gpus() -> int:
    """GPUs that NVML sees; 0 without a driver. (torch would take seconds to ask.)"""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no library, no driver, no permission: all mean that no GPU can be used
        return 0
