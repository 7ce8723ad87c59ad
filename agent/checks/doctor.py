"""Traps in a job's environment that make a tuner ineffective or unsafe: what ``dynamiccl doctor`` looks for.

Each is a row of TRAPS. Sources: NCCL's code and issue tracker, as far as they bear on all_gather and reduce_scatter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...envs.nccl.plugin.build import (
    ALL_REDUCE_VARIABLE,
    PluginBuildError,
    compiler,
    load_fault,
    names_none,
    needs_compiler,
    takes_no_path,
)
from ...envs.nccl.plugin.installed import WHEELS, in_sight, nccl_release
from ...envs.nccl.run_folder import free_bytes
from ...envs.nccl.site_switch import switched_off
from ...envs.nccl.steps.nvml import gpus
from ...envs.nccl.steps.user_numbers import wrong_number
from ...envs.nccl.variables import ALGO, PROTO
from ...traces.here import configured, machine, release_of
from ...traces.names import PAIRS_OF, TUNABLE_FUNCS, tuned_funcs
from ...traces.outside import shown
from .facts import Facts
from .faults import FAULTS, Fault
from .interpreter import of_command
from .profiler import MORE_MEMORY, little_room_for_rings, whose_profiler

if TYPE_CHECKING:  # numpy with it, which a job that is to be started does not wait for
    from ...traces.records import Table


@dataclass(frozen=True)
class Finding:
    """One trap that applies. ``must_change``: the tuner does nothing, or the job is at risk, until it is cured."""

    name: str
    what: str
    cure: str
    must_change: bool


def _channel_limit(facts: Facts) -> tuple[int, int] | None:
    limits = [facts.env.get(name, "") for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")]
    most = max((rule.decision.n_channels for rule in facts.table.rules), default=0) if facts.table else 8
    limit = min((int(limit) for limit in limits if limit.isdigit()), default=most)
    return (limit, most) if limit < most else None


def _never_offered(facts: Facts) -> tuple[int, Any, str] | None:
    """Number of the table's first rule that NCCL cannot obey, the rule, and the pairs that it could."""
    if facts.table is None:
        return None
    switched_off = {algo for algo, name in _SWITCHES.items() if facts.env.get(name) == "0"}
    if facts.release((0,), (2, 23)):
        switched_off.add("pat")
    for number, rule in enumerate(facts.table.rules, 1):
        if rule.func not in TUNABLE_FUNCS or rule.decision.algo is None:
            continue
        offered = [pair for pair in facts.narrowing.offered(rule.func) if pair[0] not in switched_off]
        if (rule.decision.algo, rule.decision.proto) not in offered:
            return number, rule, ", ".join(map("/".join, offered)) or "nothing"
    return None


def _set_of(facts: Facts) -> str:
    """NCCL_ALGO and NCCL_PROTO as they are set."""
    return " ".join(f"{name}={facts.env[name]}" for name in (ALGO, PROTO) if facts.env.get(name))


def _leaves_nothing(facts: Facts) -> bool:
    return facts.narrowing.leaves_nothing(facts.all_reduce)


def _removed(facts: Facts) -> tuple[str, str] | None:
    """The two variables as they are set, and the cells that they take away, by function."""
    cells = facts.narrowing.removed
    texts = []
    for func in tuned_funcs(facts.all_reduce):
        pairs = [f"{algo}/{proto}" for algo, proto in PAIRS_OF[func] if (func, algo, proto) in cells]
        texts += [f"{', '.join(pairs)} of {func}"] if pairs else []
    return (_set_of(facts), " and ".join(texts)) if texts else None


def _env_plugin(facts: Facts) -> str:
    """What makes NCCL load an environment plugin; empty where nothing is known to."""
    if facts.release((0,), (2, 28)):
        return ""
    if value := facts.env.get("NCCL_ENV_PLUGIN", ""):
        return "" if names_none(value) else f"NCCL_ENV_PLUGIN={value}"
    for folder in filter(None, facts.env.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if os.path.exists(os.path.join(folder, _ENV_PLUGIN)):
            return f"{_ENV_PLUGIN} in {folder}, on LD_LIBRARY_PATH"
    return ""


def _more_than_a_value(facts: Facts) -> str:
    """NCCL_ALGO or NCCL_PROTO as it is set, where more than a value stands there."""
    if facts.release((0,), (2, 24)):
        return ""
    values = [(name, facts.env.get(name, "")) for name in (ALGO, PROTO)]
    if facts.release((2, 30)):  # 2.30.7 was seen to leave out a carriage return
        values = [(name, value.rstrip("\r")) for name, value in values]
    return ", ".join(f"{name}={value}" for name, value in values if re.search(r"[\s#\"']", value))


#: What NCCL looks for where no variable names an environment plugin.
_ENV_PLUGIN = "libnccl-env.so"
#: Algorithms that a variable of their own switches off.
_SWITCHES = {"pat": "NCCL_PAT_ENABLE", "nvls": "NCCL_NVLS_ENABLE"}
CHANGE, NOTE = True, False
#: Name, condition, words, cure, whether it must be changed. Words and cure are filled from the environment, the facts,
#: and {found}: what the condition returns.
# fmt: off
TRAPS: tuple[tuple[str, Callable[[Facts], Any], str, str, bool], ...] = (
    ("nothing offered", lambda f: _leaves_nothing(f) and not _more_than_a_value(f) and _set_of(f),
     "{found} takes every algorithm and protocol from what is tuned here: nothing is left to tune",
     "unset {found}, or name one that all_gather and reduce_scatter have: ring, nvls, collnetdirect, pat; LL, LL128, "
     "Simple", CHANGE),
    ("narrowed offer", lambda f: not _leaves_nothing(f) and _removed(f),
     "{found[0]} takes {found[1]} out of NCCL's offer: a table has none of these",
     "nothing if that is wanted: the rest is tuned", NOTE),
    ("unguarded LL128", lambda f: not set(tuned_funcs(f.all_reduce)).isdisjoint(f.narrowing.unguarded) and _set_of(f),
     "{found} enables LL128 without NCCL's safety test, by its name or by excluding another protocol: on paths that "
     "tear 128 bytes apart it corrupts data", "add LL128 to what is excluded, e.g. NCCL_PROTO=^LL,LL128; nothing where "
     "LL128 is known to be safe", NOTE),
    ("unknown words", lambda f: ", ".join(f.narrowing.unknown),
     "NCCL 2.24 and newer end a job at words that they do not know ({found})",
     "write functions as allgather, reducescatter, algorithms as ring, nvls, collnetdirect, pat, without spaces", NOTE),
    ("more than a value", _more_than_a_value,
     "NCCL takes all that follows the equal sign as the value, in nccl.conf too: comments, quotes, spaces and the "
     "carriage return of a DOS line end. It ends the job at {found}",
     "leave the value alone there, and put comments on lines of their own", CHANGE),
    ("launch blocking", lambda f: f.env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
     "CUDA_LAUNCH_BLOCKING={CUDA_LAUNCH_BLOCKING} slows every step: its times are not those of the job without it",
     "unset CUDA_LAUNCH_BLOCKING: it is for debugging", CHANGE),
    ("NCCL_TUNER_PLUGIN", lambda f: "dynamiccl" not in f.env.get("NCCL_TUNER_PLUGIN", "dynamiccl"),
     "NCCL_TUNER_PLUGIN={NCCL_TUNER_PLUGIN}: NCCL loads one tuner only; ours takes its place and asks it first, so "
     "that the default stays what the job had", "nothing if that is wanted", NOTE),
    ("NCCL_PROFILER_PLUGIN", whose_profiler,
     "NCCL_PROFILER_PLUGIN={NCCL_PROFILER_PLUGIN} ({found}): NCCL loads one profiler only, and ours takes its place",
     "unset NCCL_PROFILER_PLUGIN, or go on without that profiler by --force", CHANGE),
    ("NCCL_NET_PLUGIN", lambda f: any(name in f.env.get("NCCL_NET_PLUGIN", "") for name in ("ofi", "aws")),
     "NCCL_NET_PLUGIN={NCCL_NET_PLUGIN} brings a tuner of its own: ours takes its place and asks it first",
     "nothing: its hand-made choices are the default to beat", NOTE),
    ("NCCL_ENV_PLUGIN", _env_plugin,
     "{found}: this plugin answers for NCCL's variables. If it answers for NCCL_TUNER_PLUGIN or NCCL_PROFILER_PLUGIN, "
     "NCCL loads nothing of ours (reason not-loaded)",
     "if a run ends by not-loaded, start the job with NCCL_ENV_PLUGIN=none, or let the plugin leave these two alone",
     NOTE),
    ("other Python", lambda f: not f.python.is_ours and f.python.lacks and f.python,
     "the command runs in {found.path}, which has {found.lacks}: no process that it runs loads the probe",
     "install dynamiccl beside PyTorch there, or start the command by the full path in the environment that has both; "
     "nothing if that program only starts another Python", NOTE),
    ("plugin path", lambda f: takes_no_path(f.nccl) and "/" in f.env.get("NCCL_TUNER_PLUGIN", ""),
     "NCCL 2.27.0 to 2.27.4 takes a plugin's name and not its path",
     "name it as `dynamiccl env` does, with its folder on LD_LIBRARY_PATH", CHANGE),
    ("sockets", lambda f: f.env.get("NCCL_NSOCKS_PERTHREAD") and "NCCL_SOCKET_NTHREADS" not in f.env,
     "NCCL_NSOCKS_PERTHREAD={NCCL_NSOCKS_PERTHREAD} alone changes nothing: NCCL multiplies it by its helper threads, "
     "0 unless NCCL_SOCKET_NTHREADS is set (network cards of AWS and Google: 2 and 4)",
     "set both, or none, and compare step times", NOTE),
    ("channels", lambda f: f.release((2, 31)) and not f.env.keys() & {"NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"},
     "NCCL {nccl} lets a tuner lower the channel count and not raise it",
     "dynamiccl tune --headroom N --untouched RUN, N the most channels worth trying (costs GPU memory)", NOTE),
    ("channel limit", _channel_limit,
     "the environment limits communicators to {found[0]} channels, {found[1]} are asked for",
     "raise NCCL_MAX_NCHANNELS and NCCL_MAX_CTAS", CHANGE),
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
     "NCCL_CTA_POLICY=EFFICIENCY prefers NVLS for registered buffers; NCCL drops that rule when a tuner is loaded, so "
     "with a tuner NCCL is never untouched", "unset NCCL_CTA_POLICY, so that default and tuned job are alike", CHANGE),
    ("ranks on a GPU", lambda f: 0 < (f.n_gpus or 0) < (f.ranks_per_node or 0) and f.release((0,), (2, 30, 3)),
     "{ranks_per_node} ranks share {n_gpus} GPUs: NCCL refuses",
     "use NCCL 2.30.4 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1, or one NCCL_HOSTID a rank and --force", CHANGE),
    ("ranks on a GPU", lambda f: 0 < (f.n_gpus or 0) < (f.ranks_per_node or 0) and not f.release((0,), (2, 30, 3))
     and f.env.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
     "{ranks_per_node} ranks share {n_gpus} GPUs: NCCL refuses", "set NCCL_MULTI_RANK_GPU_ENABLE=1", CHANGE),
    ("autoload", lambda f: f.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1",
     "TORCH_DEVICE_BACKEND_AUTOLOAD={TORCH_DEVICE_BACKEND_AUTOLOAD}: PyTorch does not load the probe",
     "unset it, or call dynamiccl_autoload.autoload() after import torch", CHANGE),
    ("number", lambda f: wrong_number(f.env), "{found}", "correct it, or unset it", CHANGE),
    ("compiler", lambda f: not f.has_compiler,
     "no C compiler: the plugin cannot be built", "install gcc or clang, or set CC", CHANGE),
    ("plugin", lambda f: f.plugin_fault,
     "the plugin cannot be loaded here: {found}",
     "build the wheel in the image of the jobs, or in one with an older C library; unset DYNAMICCL_PLUGIN if it is "
     "set; remove the file if it is in the cache", CHANGE),
    ("shared memory", little_room_for_rings,
     "shared memory has {found[0]} MiB free; {found[1]} ranks need {found[2]} for whole rings: smaller ones lose "
     "records when the tuner is late", f"give the container more ({MORE_MEMORY})", NOTE),
    ("switched off", lambda f: f.switched_off,
     "the tuner is switched off here ({found}): jobs run without it", "ask the operators of this cluster", NOTE),
    ("fixed table", lambda f: f.env.get("DYNAMICCL_TABLE") and f.env.get("DYNAMICCL_RUN"),
     "DYNAMICCL_TABLE is ignored while a daemon tunes (DYNAMICCL_RUN)", "unset one of them", CHANGE),
)
# fmt: on
#: Traps that also hold for a job on the emulated cluster, in which NCCL has no part.
WITHOUT_NCCL = (
    "other Python",
    "autoload",
    "number",
    "compiler",
    "plugin",
    "shared memory",
    "switched off",
    "fixed table",
)


def examine(facts: Facts) -> list[Finding]:
    """All traps that apply, those that must be cured first."""
    findings = []
    nccl = ".".join(map(str, facts.nccl or ()))
    known = {**facts.env, **vars(facts), "nccl": nccl, "newer": facts.newer}
    for name, condition, words, cure, must_change in TRAPS:
        if found := condition(facts):
            said, cured = (shown(text.format_map({**known, "found": found})) for text in (words, cure))
            findings.append(Finding(name, said, cured, must_change))
    for fault in FAULTS:
        if found := _meets(facts, fault):
            said, cured = (
                shown(text.format_map({**known, "found": found})) for text in (fault.what, fault.cure)
            )
            findings.append(Finding(fault.name, said, cured, fault.must_change))
    return sorted(findings, key=lambda finding: not finding.must_change)


def _meets(facts: Facts, fault: Fault) -> Any:
    """What the job is known to meet the fault by; False, None where it is not known to."""
    variable, value = fault.unless
    spared = bool(variable) and facts.env.get(variable) == value
    here = fault.machine in ("", facts.machine) and not facts.narrowing.removed.issuperset(fault.cells)
    if not here or spared:
        return False
    if fault.where is None:
        return facts.release(fault.first, fault.below)
    if facts.env.get("DYNAMICCL_CLUSTER") or (facts.nccl is None and not facts.n_gpus):  # no NCCL runs here
        return False
    return (facts.nccl is None or facts.release(fault.first, fault.below)) and fault.where(facts)


def checked(facts: Facts) -> dict[str, str]:
    """What was looked at, and what is there."""
    set_here = sorted(name for name in facts.env if name.startswith(("NCCL_", "DYNAMICCL_")))
    told = {"NCCL": _release_text(facts), "GPUs": str(facts.n_gpus or "none in sight")}
    told["Python"] = facts.python.text
    told["PyTorch"] = _of_pytorch(facts)
    built = "built at first use, a C compiler is here" if facts.has_compiler else "no C compiler"
    there = "built, but cannot be loaded" if facts.plugin_fault else "built, no compiler needed"
    told["plugin"] = built if needs_compiler() and not facts.plugin_fault else there
    told["variables"] = ", ".join(set_here) or "none of NCCL's or ours is set"
    told["shared memory"] = "none" if facts.shm_free is None else f"{facts.shm_free / 2**30:.1f} GiB free"
    return {
        **told,
        "traps": f"{len({name for name, *_ in TRAPS}) + len(FAULTS)} known, {len(examine(facts))} here",
    }


def _of_pytorch(facts: Facts) -> str:
    """Whether PyTorch of the command's Python loads the probe."""
    if facts.python.torch is None:
        return "not known"
    return f"{facts.python.lacks} among this Python's packages" if facts.python.lacks else "loads the probe"


def _release_text(facts: Facts) -> str:
    """NCCL's release, and all copies in sight if there are several or none is sure to be loaded."""
    release = ".".join(map(str, facts.nccl or ()))
    if len(facts.copies) > 1 or (facts.copies and facts.nccl is None):
        return f"{release or 'not known'}; in sight: {'; '.join(facts.copies)}"
    return release or "none among this Python's packages"


def gather(
    command: list[str] | None = None, table: Table | None = None, all_reduce: str | None = None
) -> Facts:
    """The facts of this machine and environment, and of ``command`` as far as its words tell. ``all_reduce``: the
    job's option, where the command has one; else a row of ``table`` tells, or the option's variable."""
    try:
        has_compiler = not needs_compiler() or bool(compiler())
    except PluginBuildError:
        has_compiler = False
    env = configured()
    told = re.search(r"(?:^| )-*nproc[-_]per[-_]node[= ](\d+)(?!\S)", " ".join(command or ()))
    ranks = told[1] if told else env.get("LOCAL_WORLD_SIZE", "")
    ranks_per_node = int(ranks) if ranks.isdigit() else None
    n_gpus, shm_free = len(gpus()) or None, free_bytes()
    python = of_command(command)
    if python.is_ours:
        sight = in_sight(env)
        nccl, copies = nccl_release(env), tuple(map(str, sight))
        wheel = next((copy.source for copy in sight if copy.source in WHEELS.values()), "")
    else:
        copies = tuple(f"{version} ({name})" for name, version in python.wheels.items())
        nccl = release_of(next(iter(python.wheels.values()))) if len(copies) == 1 else None
        wheel = next(iter(python.wheels), "")
    off, fault = switched_off(), load_fault()
    return Facts(
        env,
        nccl,
        n_gpus,
        ranks_per_node,
        shm_free,
        has_compiler,
        table,
        machine(),
        copies,
        off,
        python,
        fault,
        wheel,
        _way(env, table, all_reduce),
    )


def _way(env: Mapping[str, str], table: Table | None, all_reduce: str | None) -> str:
    """See :func:`gather`."""
    if all_reduce is not None:
        return all_reduce
    return env.get(ALL_REDUCE_VARIABLE, "") if table is None else table.all_reduce
