"""Traps in a job's environment that make a tuner ineffective or unsafe: what ``dynamiccl doctor`` looks for.

Each trap is one function of :class:`Facts`; it returns what is wrong and how to cure it, or None. Sources are NCCL's
own code and issue tracker (release ranges) as far as they bear on all_gather and reduce_scatter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...traces.records import PAIRS, Table
from .nvml import gpus

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """One trap that applies. ``must_change``: the tuner does nothing, or the job is at risk, until it is cured."""

    name: str
    what: str
    cure: str
    must_change: bool = True


@dataclass(frozen=True)
class Facts:
    """What is known of the machine and the job. Everything may be unknown (None)."""

    env: Mapping[str, str] = field(default_factory=dict)  # NCCL's configuration files are merged into it
    nccl: Version | None = None
    n_gpus: int | None = None
    ranks_per_node: int | None = None
    shm_free: int | None = None  # bytes
    has_compiler: bool = True  # or what it would compile is there
    table: Table | None = None


def _masks_algorithms(facts: Facts) -> Finding | None:
    value = facts.env.get("NCCL_ALGO")
    if value is None:
        return None
    return Finding(
        "NCCL_ALGO",
        f"NCCL_ALGO={value}: other algorithms are taken out of the offer before a tuner sees it",
        "unset NCCL_ALGO",
    )


def _masks_protocols(facts: Facts) -> Finding | None:
    value = facts.env.get("NCCL_PROTO")
    if value is None:
        return None
    risk = "; LL128 named so skips NCCL's safety test and can corrupt data" if "LL128" in value.upper() else ""
    return Finding(
        "NCCL_PROTO",
        f"NCCL_PROTO={value}: other protocols are taken out of the offer before a tuner sees it{risk}",
        "unset NCCL_PROTO",
    )


def _other_tuner(facts: Facts) -> Finding | None:
    value = facts.env.get("NCCL_TUNER_PLUGIN")
    if value is None or "dynamiccl" in value:
        return None
    return Finding(
        "NCCL_TUNER_PLUGIN",
        f"NCCL_TUNER_PLUGIN={value}: NCCL loads one tuner only; ours takes its place and asks it first, so that the "
        "default stays what the job had",
        "nothing if that is wanted",
        must_change=False,
    )


def _other_profiler(facts: Facts) -> Finding | None:
    value = facts.env.get("NCCL_PROFILER_PLUGIN")
    if value is None or "dynamiccl" in value:
        return None
    return Finding(
        "NCCL_PROFILER_PLUGIN",
        f"NCCL_PROFILER_PLUGIN={value}: NCCL loads one profiler only; ours takes its place and hands on to it what it "
        "asks for, if it has the interface version that NCCL calls (4 in 2.27, 5 or 6 later)",
        "nothing if that is wanted; what it costs is added to the job",
        must_change=False,
    )


def _net_plugin_with_tuner(facts: Facts) -> Finding | None:
    value = facts.env.get("NCCL_NET_PLUGIN", "")
    if not any(name in value for name in ("ofi", "aws")):
        return None
    return Finding(
        "NCCL_NET_PLUGIN",
        f"NCCL_NET_PLUGIN={value} brings a tuner of its own: ours takes its place and asks it first",
        "nothing: its hand-made choices are the default to beat",
        must_change=False,
    )


def _too_old(facts: Facts) -> Finding | None:
    if facts.nccl is None or facts.nccl >= (2, 22, 0):
        return None
    return Finding(
        "old NCCL", f"NCCL {_text(facts.nccl)} has no tuner interface that we serve", "use NCCL 2.24 or newer"
    )


def _no_profiler(facts: Facts) -> Finding | None:
    if facts.nccl is None or not (2, 22, 0) <= facts.nccl < (2, 27, 0):
        return None
    return Finding(
        "no profiler",
        f"NCCL {_text(facts.nccl)} does not report collectives as we need it (2.27 is the first): tables are obeyed, "
        "but nothing is seen of what ran",
        "use NCCL 2.27 or newer, or dynamiccl apply with a fixed table",
    )


def _name_only(facts: Facts) -> Finding | None:
    if facts.nccl != (2, 27, 3) or "/" not in facts.env.get("NCCL_TUNER_PLUGIN", ""):
        return None
    return Finding(
        "plugin path",
        "NCCL 2.27.3 takes a plugin's name and not its path",
        "name it as `dynamiccl env` does, with its folder on LD_LIBRARY_PATH",
    )


def _profiler_fault(facts: Facts) -> Finding | None:
    if facts.nccl != (2, 30, 3):
        return None
    return Finding(
        "profiler fault",
        "NCCL 2.30.3 can crash in a multi-node all-to-all while a profiler is loaded",
        "use NCCL 2.30.4 or newer",
    )


def _profiler_overhead(facts: Facts) -> Finding | None:
    if facts.nccl is None or not (2, 31, 0) <= facts.nccl < (2, 32, 0):
        return None
    return Finding(
        "profiler overhead",
        f"NCCL {_text(facts.nccl)}: kernel times cost small collectives 4 to 13 %",
        "set DYNAMICCL_SAMPLE_EVERY=0, or use NCCL 2.30",
        must_change=facts.env.get("DYNAMICCL_SAMPLE_EVERY") != "0",
    )


def _only_fewer_channels(facts: Facts) -> Finding | None:
    if facts.nccl is None or facts.nccl < (2, 31, 0) or "NCCL_MIN_CTAS" in facts.env:
        return None
    return Finding(
        "channels",
        f"NCCL {_text(facts.nccl)} lets a tuner lower the channel count and not raise it",
        "dynamiccl tune --headroom with the most channels worth trying (costs GPU memory for buffers)",
        must_change=False,
    )


def _channel_limit(facts: Facts) -> Finding | None:
    limits = [_number(facts.env.get(name)) for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")]
    limit = min((n for n in limits if n is not None), default=None)
    most = max((rule.decision.n_channels for rule in facts.table.rules), default=0) if facts.table else 8
    if limit is None or limit >= most:
        return None
    return Finding(
        "channel limit",
        f"the environment limits communicators to {limit} channels, {most} are asked for",
        "raise NCCL_MAX_NCHANNELS and NCCL_MAX_CTAS",
    )


def _never_offered(facts: Facts) -> Finding | None:
    if facts.table is None:
        return None
    off = {a for a, name in (("pat", "NCCL_PAT_ENABLE"), ("nvls", "NCCL_NVLS_ENABLE")) if facts.env.get(name) == "0"}
    if facts.nccl is not None and facts.nccl < (2, 23, 0):
        off.add("pat")
    for number, rule in enumerate(facts.table.rules, 1):
        pair = (rule.decision.algo, rule.decision.proto)
        if rule.func not in ("all_gather", "reduce_scatter") or pair[0] is None:
            continue
        if pair not in PAIRS or pair[0] in off:
            return Finding(
                "never offered",
                f"rule {number} of the table wants {rule.decision} for {rule.func}, which NCCL does not offer here",
                "take the rule out, or choose one of " + ", ".join("/".join(p) for p in PAIRS if p[0] not in off),
            )
    return None


def _bypassed(facts: Facts) -> Finding | None:
    for name, value, what in (
        ("NCCL_SYM_NOWIN_ENABLE", "1", "symmetric kernels"),
        ("NCCL_CTA_POLICY", "2", "copy-engine collectives"),
        ("NCCL_CTA_POLICY", "ZERO", "copy-engine collectives"),
    ):
        if facts.env.get(name) == value:
            return Finding(
                "bypass", f"{name}={value}: {what} are used where they can be, and ask no tuner", f"unset {name}"
            )
    return None


def _policy_lost(facts: Facts) -> Finding | None:
    if facts.env.get("NCCL_CTA_POLICY") not in ("1", "EFFICIENCY"):
        return None
    return Finding(
        "CTA policy",
        "NCCL_CTA_POLICY=EFFICIENCY prefers NVLS for registered buffers; NCCL drops that rule when a tuner is loaded",
        "unset NCCL_CTA_POLICY, so that default and tuned job are alike",
    )


def _ranks_share_gpu(facts: Facts) -> Finding | None:
    if not facts.n_gpus or facts.ranks_per_node is None or facts.ranks_per_node <= facts.n_gpus:
        return None
    allowed = facts.nccl is None or facts.nccl >= (2, 30, 3)
    if allowed and facts.env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return None
    cure = "set NCCL_MULTI_RANK_GPU_ENABLE=1" if allowed else "use NCCL 2.30.3, or one NCCL_HOSTID a rank and --force"
    return Finding("ranks on a GPU", f"{facts.ranks_per_node} ranks share {facts.n_gpus} GPUs: NCCL refuses", cure)


def _no_autoload(facts: Facts) -> Finding | None:
    if facts.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        return None
    return Finding(
        "autoload",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0: PyTorch does not load the probe",
        "unset it, or call dynamiccl_autoload.autoload() after import torch",
    )


def _no_compiler(facts: Facts) -> Finding | None:
    if facts.has_compiler:
        return None
    return Finding("compiler", "no C compiler: the plugin cannot be built", "install gcc or clang, or set CC")


def _little_shared_memory(facts: Facts) -> Finding | None:
    ranks = facts.ranks_per_node or facts.n_gpus or 1
    if facts.shm_free is None or facts.shm_free >= ranks * 9 * 2**20:
        return None
    return Finding(
        "shared memory",
        f"/dev/shm has {facts.shm_free // 2**20} MiB free; {ranks} ranks need {ranks * 9} for whole rings: smaller "
        "ones lose records when the tuner is late",
        "give the container more (docker run --shm-size=1g)",
        must_change=False,
    )


def _cpu_vendors(facts: Facts) -> Finding | None:
    if facts.nccl is None or facts.nccl >= (2, 22, 3):
        return None
    return Finding(
        "CPU vendors",
        "NCCL before 2.22.3 hangs when nodes have CPUs of different vendors and decide differently",
        "use NCCL 2.22.3 or newer",
    )


def _table_and_run(facts: Facts) -> Finding | None:
    if not (facts.env.get("DYNAMICCL_TABLE") and facts.env.get("DYNAMICCL_RUN")):
        return None
    return Finding(
        "fixed table", "DYNAMICCL_TABLE is ignored while a daemon tunes (DYNAMICCL_RUN)", "unset one of them"
    )


TRAPS: tuple[Callable[[Facts], Finding | None], ...] = (
    *(_masks_algorithms, _masks_protocols, _other_tuner, _other_profiler, _net_plugin_with_tuner, _too_old),
    *(_no_profiler, _name_only, _profiler_fault, _profiler_overhead, _only_fewer_channels, _channel_limit),
    *(_never_offered, _bypassed, _policy_lost, _ranks_share_gpu, _no_autoload, _no_compiler),
    *(_little_shared_memory, _cpu_vendors, _table_and_run),
)

#: Traps that also hold for a job on the emulated cluster, in which NCCL has no part.
WITHOUT_NCCL = ("autoload", "compiler", "shared memory", "fixed table")


def examine(facts: Facts) -> list[Finding]:
    """All traps that apply, those that must be cured first."""
    found = [finding for trap in TRAPS if (finding := trap(facts)) is not None]
    return sorted(found, key=lambda finding: not finding.must_change)


def gather(command: list[str] | None = None, table: Table | None = None) -> Facts:
    """The facts of this machine and environment, and of ``command`` as far as its words tell."""
    from .build import PluginBuildError, compiler, configured, needs_compiler

    try:
        has_compiler = not needs_compiler() or bool(compiler())
    except PluginBuildError:
        has_compiler = False
    env = configured()
    free = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Facts(
        env,
        _nccl_version(),
        len(gpus()) or None,
        _ranks_per_node(command or [], env),
        free.f_bavail * free.f_frsize if free else None,
        has_compiler,
        table,
    )


def _nccl_version() -> Version | None:
    """Of the NCCL wheel that PyTorch would load; None without one (a build for CPUs, a system NCCL)."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            parts = [int(part) for part in version(package).split(".")[:3]]
        except (PackageNotFoundError, ValueError):
            continue
        return parts[0], parts[1], parts[2]
    return None


def _ranks_per_node(command: list[str], env: Mapping[str, str]) -> int | None:
    for i, word in enumerate(command):
        name, _, value = word.lstrip("-").replace("_", "-").partition("=")
        if name == "nproc-per-node":
            return _number(value or (command[i + 1] if i + 1 < len(command) else ""))
    return _number(env.get("LOCAL_WORLD_SIZE"))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _text(version: Version) -> str:
    return ".".join(map(str, version))
