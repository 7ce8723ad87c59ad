"""The untouched table: what NCCL does by itself, on communicators that ``--headroom`` has given more channels.

*Ceilings*, rows of every such table, leave the pair to NCCL and give a message the channels that it has without the
option.

Source: NCCL 2.28.9 to 2.30.7: ``NCCL_MIN_NCHANNELS`` copies rings (src/graph/connect.cc), prices ignore it
(src/graph/tuning.cc), only the count changes (src/enqueue.cc). Grouped calls share all channels: no ceiling holds
there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...traces.outside import read_json
from ...traces.records import Decision, Rule, Table

#: Its file in the run folder.
UNTOUCHED = "untouched.json"
#: NCCL asks a tuner about these, and counts their channels in one way.
FUNCS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce")
MAX_BYTES = 2**63 - 1


@dataclass(frozen=True, order=True)
class ClassChannels:
    """Communicators of a class without the option: their channels, and the threads of a ring's block under Simple."""

    n_ranks: int
    n_nodes: int
    n_channels: int
    threads: int  # 256 or 512

    def ceiling(self, func: str, low: int, high: int) -> Rule:
        """The row that holds messages of ``low`` to ``high`` bytes to these channels."""
        return Rule(
            self.n_ranks, self.n_nodes, func, low, high, Decision(None, None, self.n_channels), self.threads
        )


@dataclass(frozen=True)
class Untouched:
    """What ``--headroom`` asks for, and the classes of communicators as they were without it."""

    headroom: int
    classes: tuple[ClassChannels, ...]

    def over(self, table: Table) -> Table:
        """``table`` with a ceiling for each message that no row of it decides."""
        rules = table.deciding
        ceilings = []
        for one in self.classes:
            for func in FUNCS:
                key = one.n_ranks, one.n_nodes, func
                mine = [rule for rule in rules if (rule.n_ranks, rule.n_nodes, rule.func) == key]
                ceilings += [one.ceiling(func, low, high) for low, high in _gaps(mine)]
        return replace(table, rules=(*rules, *ceilings))

    def write(self, run: Path) -> None:
        """Leave it in the run folder, before a tuner opens that. Raises OSError."""
        (run / UNTOUCHED).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, run: Path) -> Untouched | None:
        """Of a run folder; None for a run without ``--headroom``. Raises ValueError where the file is damaged."""
        try:
            found = read_json(run / UNTOUCHED)
            return cls(int(found["headroom"]), tuple(ClassChannels(**one) for one in found["classes"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{run / UNTOUCHED} is damaged ({error}): start the job again") from None


def _gaps(rules: list[Rule]) -> list[tuple[int, int]]:
    """The ranges of sizes that no row has, first and last byte each."""
    gaps = []
    low = 0
    for rule in sorted(rules, key=lambda rule: rule.min_bytes):
        if rule.min_bytes > low:
            gaps.append((low, rule.min_bytes - 1))
        low = rule.max_bytes + 1
    return [*gaps, (low, MAX_BYTES)] if low <= MAX_BYTES else gaps
