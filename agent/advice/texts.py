"""What ``dynamiccl advise`` prints for people: advice, an inventory, a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill
from typing import Any

from rich import box

from ...traces.queries.stage import Stage
from ..report.terminal import grid, wide_terminal
from .advise import LEAST_STEPS, text
from .alignment import Misaligned

#: A slot of a smaller part of the step gets no row, unless something is advised for it.
LEAST_SHARE = 0.005
#: So many sizes to pad get a line: a job may have one for each length of a text.
MOST_PADDED = 10


def show_advice(a: dict[str, Any]) -> None:
    """Print what :meth:`.advise.Advice.as_dict` says."""
    kind = "emulated, not GPU times" if a["emulated"] else a["source"]
    print(a["verdict"])
    print(f"{a['recording']} ({kind}) on {a['cluster']}, NCCL {a['nccl']}")
    left_out = a["left_out"]
    beside = f", another {left_out:.1%} in NCCL kernels that are left out" if left_out >= 0.001 else ""
    print(
        f"step {a['step_ms']:.1f} ms, {a['communication']:.1%} of it in these collectives{beside}; {a['steps']} steps"
    )
    print(Stage(**a["stage"]))
    slots = [slot for slot in a["slots"] if slot["share"] >= LEAST_SHARE or slot["advice"] != "auto"]
    heads = ("recorded", "calls", "one call", "of the step", "exposed", "NCCL's choice", "try", "should save")
    untold = "as it is" if a["steps"] >= LEAST_STEPS else "?"
    _print_table(heads, [_advice_row(slot, untold) for slot in slots], ("NCCL's choice", "try", "recorded"))
    if a["gain"]:
        print(f"predicted: this table saves {text(a['gain'])} of the step ({a['level']:.0%} interval)")
        print(f"  it makes steps over 1 % longer with a probability of {a['risk']:.0%}")
    _print_lists(a)
    if a.get("table"):
        print(f"\ntable: {a['table']}; dynamiccl apply {a['table']} -- COMMAND")


def show_inventory(a: dict[str, Any]) -> None:
    """Print what :func:`.inventory.inventory` says."""
    print(a["verdict"])
    print(f"{a['recording']} ({a['source']}), NCCL {a['nccl'] or 'not known'}; calls of one rank:")
    heads = ("recorded", "ranks", "calls", "one call", "NCCL's choice")
    rows = []
    for slot in a["slots"]:
        row = [slot["slot"], slot["n_ranks"] or "?", f"{slot['calls']:.4g}"]
        rows.append([*row, _ms(slot["call_us"]), slot["own"] or "?"])
    _print_table(heads, rows, ("recorded", "NCCL's choice"))
    _print_lists(a)


def show_comparison(a: dict[str, Any]) -> None:
    """Print what :func:`.compare.compare` says."""
    print(a["verdict"])
    for name in ("before", "after"):
        of = a[name]
        step = "no steps" if of["step_ms"] is None else f"{of['n_steps']} steps of {of['step_ms']:.2f} ms"
        parts = {"calls_ms": "collectives", "exposed_ms": "of these exposed", "compute_ms": "compute"}
        times = [f"{said} {of[key]:.2f} ms" for key, said in parts.items() if of[key] is not None]
        print(f"{name}: {of['recording']}: {', '.join([step, *times])}")
    heads = ("recorded", "ranks", "calls", "then", "one call", "now", "change a step")
    rows = []
    for slot in a["slots"]:
        calls = [_short(slot["calls_before"]), _short(slot["calls_after"])]
        times = [_ms(slot["us_before"]), _ms(slot["us_after"])]
        row = [slot["slot"], slot["n_ranks"] or "?", *calls, *times]
        rows.append([*row, f"{slot['change_ms']:+.2f} ms"])
    _print_table(heads, rows, ("recorded",))
    _print_list("not known, or assumed", a["unknown"])


def _advice_row(slot: dict[str, Any], untold: str) -> list[Any]:
    """A slot's row; ``untold``: what to say where nothing is advised."""
    exposed = "?" if slot["exposed_share"] is None else f"{slot['exposed_share']:.1%}"
    figures = [f"{slot['calls']:.0f}", _ms(slot["call_us"]), f"{slot['share']:.1%}", exposed]
    advice = untold if slot["advice"] == "auto" else slot["advice"]
    saves = "" if slot["saves"] is None else text(slot["saves"])
    return [slot["slot"], *figures, slot["own"], advice, saves]


def _ms(us: float | None) -> str:
    return "?" if us is None else f"{us / 1e3:.2f} ms"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _print_table(heads: Sequence[str], rows: list[list[Any]], left: Iterable[str]) -> None:
    """A table whose columns stand to the right but for those in ``left``."""
    numbers = set(heads) - set(left)
    wide_terminal().print(grid(heads, rows, numbers, no_wrap=True, box=box.SIMPLE))


def _print_lists(a: dict[str, Any]) -> None:
    """What padding cures, what is not known, what no table reaches."""
    padded = [str(Misaligned(**row)) for row in a["misaligned"][:MOST_PADDED]]
    if more := len(a["misaligned"]) - len(padded):
        padded.append(f"{more} other sizes, of fewer bytes: --json lists them")
    _print_list("slow for want of padding", padded)
    _print_list("not known, or assumed", a["unknown"])
    _print_list("what no table reaches", a["launch"])


def _print_list(title: str, texts: list[str]) -> None:
    if texts:
        lines = [fill(f"  - {line}", 100, subsequent_indent="    ") for line in texts]
        print("\n".join([f"\n{title}:", *lines]))
