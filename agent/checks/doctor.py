"""Traps in a job's environment that make a tuner ineffective or unsafe: what ``dynamiccl doctor`` looks for.

Each is a row of TRAPS. Sources: NCCL's code and issue tracker, as far as they bear on all_gather and reduce_scatter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...envs.nccl.plugin.build import (
    PluginBuildError,
    compiler,
    configured,
    nccl_release,
    needs_compiler,
    takes_no_path,
)
from ...envs.nccl.run_folder import free_bytes
from ...envs.nccl.steps.nvml import gpus
from .profiler import no_room_for_kernel_times, whose_profiler

if TYPE_CHECKING:  # numpy with it, which a job that is to be started does not wait for
    from ...traces.records import Table


@dataclass(frozen=True)
class Finding:
    """One trap that applies. ``must_change``: the tuner does nothing, or the job is at risk, until it is cured."""

    name: str
    what: str
    cure: str
    must_change: bool


@dataclass(frozen=True)
class Facts:
    """What is known of the machine and the job. Everything may be unknown (None)."""

    env: Mapping[str, str] = field(default_factory=dict)  # NCCL's configuration files are merged into it
    nccl: tuple[int, int, int] | None = None
    n_gpus: int | None = None
    ranks_per_node: int | None = None
    shm_free: int | None = None  # bytes
    has_compiler: bool = True  # or what it would compile is there
    table: Table | None = None
    machine: str = ""  # x86_64, aarch64

    def release(self, first: tuple[int, ...], below: tuple[int, ...] = (99,)) -> bool:
        """Whether NCCL is known to be of the release ``first`` or newer, and older than ``below``."""
        return self.nccl is not None and first <= self.nccl < below


def _channel_limit(facts: Facts) -> tuple[int, int] | None:
    limits = [facts.env.get(name, "") for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")]
    most = max((rule.decision.n_channels for rule in facts.table.rules), default=0) if facts.table else 8
    limit = min((int(limit) for limit in limits if limit.isdigit()), default=most)
    return (limit, most) if limit < most else None


def _never_offered(facts: Facts) -> tuple[int, Any, str] | None:
    """Number of the table's first rule that NCCL cannot obey, the rule, and what it could."""
    if facts.table is None:
        return None
    from ...traces.records import PAIRS

    off = {
        a
        for a, name in (("pat", "NCCL_PAT_ENABLE"), ("nvls", "NCCL_NVLS_ENABLE"))
        if facts.env.get(name) == "0"
    }
    if facts.release((0,), (2, 23)):
        off.add("pat")
    offered = [pair for pair in PAIRS if pair[0] not in off]
    for number, rule in enumerate(facts.table.rules, 1):
        pair = (rule.decision.algo, rule.decision.proto)
        if rule.func in ("all_gather", "reduce_scatter") and pair[0] is not None and pair not in offered:
            return number, rule, ", ".join(map("/".join, offered))
    return None


def _little_shared_memory(facts: Facts) -> tuple[int, int, int] | None:
    ranks = facts.ranks_per_node or facts.n_gpus or 1
    if facts.shm_free is None or facts.shm_free >= ranks * 9 * 2**20:
        return None
    return facts.shm_free // 2**20, ranks, ranks * 9


CHANGE, NOTE = True, False
#: Name, condition, words, cure, whether it must be changed. Words and cure are filled from the environment, the facts,
#: and {found}: what the condition returns.
# fmt: off
TRAPS: tuple[tuple[str, Callable[[Facts], Any], str, str, bool], ...] = (
    ("NCCL_ALGO", lambda f: "NCCL_ALGO" in f.env,
     "NCCL_ALGO={NCCL_ALGO}: other algorithms are taken out of the offer before a tuner sees it",
     "unset NCCL_ALGO", CHANGE),
    ("NCCL_PROTO", lambda f: "NCCL_PROTO" in f.env and "LL128" not in f.env["NCCL_PROTO"].upper(),
     "NCCL_PROTO={NCCL_PROTO}: other protocols are taken out of the offer before a tuner sees it",
     "unset NCCL_PROTO", CHANGE),
    ("NCCL_PROTO", lambda f: "LL128" in f.env.get("NCCL_PROTO", "").upper(),
     "NCCL_PROTO={NCCL_PROTO}: other protocols are taken out of the offer before a tuner sees it; LL128 named so skips "
     "NCCL's safety test and can corrupt data", "unset NCCL_PROTO", CHANGE),
    ("NCCL_TUNER_PLUGIN", lambda f: "dynamiccl" not in f.env.get("NCCL_TUNER_PLUGIN", "dynamiccl"),
     "NCCL_TUNER_PLUGIN={NCCL_TUNER_PLUGIN}: NCCL loads one tuner only; ours takes its place and asks it first, so "
     "that the default stays what the job had", "nothing if that is wanted", NOTE),
    ("NCCL_PROFILER_PLUGIN", whose_profiler,
     "NCCL_PROFILER_PLUGIN={NCCL_PROFILER_PLUGIN} ({found}): NCCL loads one profiler only, and ours takes its place",
     "unset NCCL_PROFILER_PLUGIN, or go on without that profiler by --force", CHANGE),
    ("NCCL_NET_PLUGIN", lambda f: any(name in f.env.get("NCCL_NET_PLUGIN", "") for name in ("ofi", "aws")),
     "NCCL_NET_PLUGIN={NCCL_NET_PLUGIN} brings a tuner of its own: ours takes its place and asks it first",
     "nothing: its hand-made choices are the default to beat", NOTE),
    ("old NCCL", lambda f: f.release((0,), (2, 22)),
     "NCCL {nccl} has no tuner interface that we serve", "use NCCL 2.24 or newer", CHANGE),
    ("no profiler", lambda f: f.release((2, 22), (2, 27)),
     "NCCL {nccl} does not report collectives as we need it (2.27 is the first): tables are obeyed, but nothing is "
     "seen of what ran", "use NCCL 2.27 or newer, or dynamiccl apply --no-gate with a fixed table", CHANGE),
    ("plugin path", lambda f: takes_no_path(f.nccl) and "/" in f.env.get("NCCL_TUNER_PLUGIN", ""),
     "NCCL 2.27.0 to 2.27.4 takes a plugin's name and not its path",
     "name it as `dynamiccl env` does, with its folder on LD_LIBRARY_PATH", CHANGE),
    ("profiler fault", lambda f: f.nccl == (2, 30, 3),
     "NCCL 2.30.3 can crash in a multi-node all-to-all while a profiler is loaded", "use NCCL 2.30.4 or newer", CHANGE),
    ("profiler overhead", lambda f: f.release((2, 31), (2, 32)) and f.env.get("DYNAMICCL_SAMPLE_EVERY") != "0",
     "NCCL {nccl}: kernel times cost small collectives 4 to 13 %",
     "set DYNAMICCL_SAMPLE_EVERY=0, or use NCCL 2.30", CHANGE),
    ("profiler overhead", lambda f: f.release((2, 31), (2, 32)) and f.env.get("DYNAMICCL_SAMPLE_EVERY") == "0",
     "NCCL {nccl}: kernel times cost small collectives 4 to 13 %",
     "set DYNAMICCL_SAMPLE_EVERY=0, or use NCCL 2.30", NOTE),
    ("channels", lambda f: f.release((2, 31)) and "NCCL_MIN_CTAS" not in f.env,
     "NCCL {nccl} lets a tuner lower the channel count and not raise it",
     "dynamiccl tune --headroom with the most channels worth trying (costs GPU memory for buffers)", NOTE),
    ("channel limit", _channel_limit,
     "the environment limits communicators to {found[0]} channels, {found[1]} are asked for",
     "raise NCCL_MAX_NCHANNELS and NCCL_MAX_CTAS", CHANGE),
    ("proxy slots", lambda f: f.machine == "aarch64" and f.release((0,), (2, 29, 3)),
     "NCCL {nccl} on aarch64 loses slots of its proxy until all ranks hang without a word (NVIDIA/nccl#2353)",
     "use NCCL 2.29.3 or newer", CHANGE),
    ("registered buffers", lambda f: f.release((2, 24), (2, 33)),
     "NCCL {nccl} can hang over nodes for good where buffers are registered with the network and LL is followed by "
     "Simple (NVIDIA/nccl#2389); a table has no LL over nodes here", "nothing, unless ranks hang at 100 %: register no "
     "buffers then (NCCL_LOCAL_REGISTER=0, NCCL_GRAPH_REGISTER=0), or use a release that has the fix", NOTE),
    ("CUDA graphs", lambda f: f.release((0,), (2, 28)),
     "NCCL {nccl} does not tell which calls are captured into a CUDA graph (2.28 is the first that does): PyTorch's "
     "CUDAGraph tells us, and what is captured otherwise, or enqueued by another thread meanwhile, may be counted on "
     "one rank alone", "nothing if the job captures no collective, or by PyTorch and in one thread; else use NCCL 2.28 "
     "or newer", NOTE),
    ("never offered", _never_offered,
     "rule {found[0]} of the table wants {found[1].decision} for {found[1].func}, which NCCL does not offer here",
     "take the rule out, or choose one of {found[2]}", CHANGE),
    ("bypass", lambda f: f.env.get("NCCL_SYM_NOWIN_ENABLE") == "1",
     "NCCL_SYM_NOWIN_ENABLE=1: symmetric kernels are used where they can be, and ask no tuner",
     "unset NCCL_SYM_NOWIN_ENABLE", CHANGE),
    ("bypass", lambda f: f.env.get("NCCL_CTA_POLICY") in ("2", "ZERO"),
     "NCCL_CTA_POLICY={NCCL_CTA_POLICY}: copy-engine collectives are used where they can be, and ask no tuner",
     "unset NCCL_CTA_POLICY", CHANGE),
    ("CTA policy", lambda f: f.env.get("NCCL_CTA_POLICY") in ("1", "EFFICIENCY"),
     "NCCL_CTA_POLICY=EFFICIENCY prefers NVLS for registered buffers; NCCL drops that rule when a tuner is loaded",
     "unset NCCL_CTA_POLICY, so that default and tuned job are alike", CHANGE),
    ("ranks on a GPU", lambda f: 0 < (f.n_gpus or 0) < (f.ranks_per_node or 0) and f.release((0,), (2, 30, 3)),
     "{ranks_per_node} ranks share {n_gpus} GPUs: NCCL refuses",
     "use NCCL 2.30.3, or one NCCL_HOSTID a rank and --force", CHANGE),
    ("ranks on a GPU", lambda f: 0 < (f.n_gpus or 0) < (f.ranks_per_node or 0) and not f.release((0,), (2, 30, 3))
     and f.env.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
     "{ranks_per_node} ranks share {n_gpus} GPUs: NCCL refuses", "set NCCL_MULTI_RANK_GPU_ENABLE=1", CHANGE),
    ("autoload", lambda f: f.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0",
     "TORCH_DEVICE_BACKEND_AUTOLOAD=0: PyTorch does not load the probe",
     "unset it, or call dynamiccl_autoload.autoload() after import torch", CHANGE),
    ("compiler", lambda f: not f.has_compiler,
     "no C compiler: the plugin cannot be built", "install gcc or clang, or set CC", CHANGE),
    ("shared memory", _little_shared_memory,
     "shared memory has {found[0]} MiB free; {found[1]} ranks need {found[2]} for whole rings: smaller ones lose "
     "records when the tuner is late", "give the container more (docker run --shm-size=1g)", NOTE),
    ("kernel times", no_room_for_kernel_times,
     "shared memory has {found[0]} MiB free, and NCCL takes {found[2]} for the kernel times of {found[1]} ranks; where "
     "it is short a rank crashes (NVIDIA/nccl#2326): kernel times stay off, step times do not",
     "give the container more (docker run --shm-size=1g), or use NCCL 2.32", NOTE),
    ("fixed table", lambda f: f.env.get("DYNAMICCL_TABLE") and f.env.get("DYNAMICCL_RUN"),
     "DYNAMICCL_TABLE is ignored while a daemon tunes (DYNAMICCL_RUN)", "unset one of them", CHANGE),
)
# fmt: on
#: Traps that also hold for a job on the emulated cluster, in which NCCL has no part.
WITHOUT_NCCL = ("autoload", "compiler", "shared memory", "fixed table")


def examine(facts: Facts) -> list[Finding]:
    """All traps that apply, those that must be cured first."""
    findings = []
    known = {**facts.env, **vars(facts), "nccl": ".".join(map(str, facts.nccl or ()))}
    for name, condition, words, cure, must_change in TRAPS:
        if found := condition(facts):
            said, cured = (text.format_map({**known, "found": found}) for text in (words, cure))
            findings.append(Finding(name, said, cured, must_change))
    return sorted(findings, key=lambda finding: not finding.must_change)


def checked(facts: Facts) -> dict[str, str]:
    """What was looked at, and what is there."""
    set_here = sorted(name for name in facts.env if name.startswith(("NCCL_", "DYNAMICCL_")))
    release = ".".join(map(str, facts.nccl or ())) or "none among this Python's packages"
    told = {"NCCL": release, "GPUs": str(facts.n_gpus or "none in sight")}
    told["PyTorch"] = "loads the probe" if find_spec("torch") else "not among this Python's packages"
    built = "built at first use, a C compiler is here" if facts.has_compiler else "no C compiler"
    told["plugin"] = built if needs_compiler() else "built, no compiler needed"
    told["variables"] = ", ".join(set_here) or "none of NCCL's or ours is set"
    told["shared memory"] = "none" if facts.shm_free is None else f"{facts.shm_free / 2**30:.1f} GiB free"
    return {**told, "traps": f"{len({name for name, *_ in TRAPS})} known, {len(examine(facts))} here"}


def gather(command: list[str] | None = None, table: Table | None = None) -> Facts:
    """The facts of this machine and environment, and of ``command`` as far as its words tell."""
    try:
        has_compiler = not needs_compiler() or bool(compiler())
    except PluginBuildError:
        has_compiler = False
    env = configured()
    told = re.search(r"(?:^| )-*nproc[-_]per[-_]node[= ](\d+)(?!\S)", " ".join(command or ()))
    ranks = told[1] if told else env.get("LOCAL_WORLD_SIZE", "")
    ranks_per_node = int(ranks) if ranks.isdigit() else None
    n_gpus, shm_free = len(gpus()) or None, free_bytes()
    return Facts(
        env, nccl_release(), n_gpus, ranks_per_node, shm_free, has_compiler, table, os.uname().machine
    )
