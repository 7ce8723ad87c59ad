"""What each ZeRO stage holds on a rank and sends in a step, before anything is started; ``dynamiccl plan`` shows it.

Memory and traffic are the formulas of Rajbhandari et al. (SC20); the tests check them against what the engine holds and
sends.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .parallel import require_cut

#: Bytes a parameter: weight, gradient, and what Adam adds (master weight included in mixed precision).
STATE = {"mixed": (2, 2, 12), "fp32": (4, 4, 8)}
#: Bytes of a bucket of gradients, the engine's own default.
BUCKET = 25 * 2**20
#: Fields of ``Request`` that may be 0; the others start at 1.
_MAY_BE_0 = ("hidden", "runtime", "shard", "reduce_bytes")


def stage_bytes(params: float, ranks: int, stage: int, precision: str = "mixed") -> tuple[float, float, float]:
    """Bytes a rank holds at rest for weights, gradients and optimizer at ``stage`` (0 to 3)."""
    sizes = zip(STATE[precision], (3, 2, 1), strict=True)  # each is sharded from that stage on
    weights, gradients, states = (n * params / (ranks if stage >= least else 1) for n, least in sizes)
    return weights, gradients, states


def advice(params: int, ranks: int, stage: int, precision: str) -> str:
    """One line for a rank that ran out of memory: what this stage holds at rest, and what the next would."""
    now, then = (sum(stage_bytes(params, ranks, s, precision)) / 1e9 for s in (stage, 3))
    cure = f"stage 3 holds {then:.2f} GB" if stage < 3 else f"on {2 * ranks} ranks it is half of that"
    return f"stage {stage} holds {now:.2f} GB a rank before activations, {cure}; else lower --batch or --seq"


@dataclass(frozen=True)
class Request:
    """What to plan for. Raises ValueError: a number out of range, or ranks that the numbers do not divide.

    Args:
        params: parameters of a dense transformer of ``layers`` of width ``hidden`` (0: from the other two).
        ranks: all of them.
        seq: tokens in a sequence, ``batch`` sequences a rank and micro-batch.
        memory: bytes of one rank, of which ``runtime`` are gone when training begins: to CUDA's context, NCCL's
            buffers, libraries' workspace, 2 to 4 GB as a rule; nothing here was measured.
        accumulate: micro-batches a step. Above 1, stages 2 and 3 keep their gradient shards in fp32.
        shard: HSDP, at stages 2 and 3: ranks over which it shards, the rest are replicas; 0: all.
        reduce_bytes: of an element of gradients on their way (``reduce_dtype``), 0: as the weights'.
    """

    params: float
    ranks: int
    layers: int = 32
    hidden: int = 0
    seq: int = 2048
    batch: int = 1
    precision: str = "mixed"
    memory: float = 80e9
    runtime: float = 3e9
    accumulate: int = 1
    shard: int = 0
    reduce_bytes: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in _MAY_BE_0 else 1
            if not isinstance(value, str) and not least <= value < math.inf:
                raise ValueError(f"{name} must be a number from {least} on, not {value}")
        if self.precision not in STATE:
            raise ValueError(f"precision is one of {', '.join(STATE)}, not {self.precision}")
        require_cut(self.ranks, self.shard)

    @property
    def width(self) -> int:
        """``hidden``, or that of a model with 12 hidden^2 parameters a layer, in whole heads of 128."""
        return self.hidden or max(128, round(math.sqrt(self.params / (12 * self.layers)) / 128) * 128)

    def sharing(self, stage: int) -> int:
        """Ranks over which ``stage`` shards."""
        return (self.shard if stage >= 2 else 0) or self.ranks


def held_and_sent(request: Request, stage: int) -> dict[str, float]:
    """Bytes of a rank at ``stage``.

    Returns:
        ``weights_bytes``, ``gradients_bytes``, ``optimizer_bytes`` at rest; what it sends a step on rings in its shard
        and to the replicas: ``shard_sent_bytes``, ``replicas_sent_bytes``.
    """
    r, n, often = request, request.sharing(stage), request.accumulate
    params, replicas, weight = r.params, r.ranks // n, STATE[r.precision][0]
    wire = r.reduce_bytes or weight
    weights, gradients, states = stage_bytes(params, n, stage, r.precision)
    if stage >= 2:  # they are kept as they were reduced, sums over micro-batches in fp32
        gradients = (4 if often > 1 else wire) * params / n
    # All gradients are reduced so many times, all parameters gathered; an all-reduce moves twice as much.
    reduced, gathered = ((2, 0), (1, 1), (often, 1), (often, 2 * often))[stage]
    return {
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "optimizer_bytes": states,
        "shard_sent_bytes": (n - 1) / n * (reduced * wire + gathered * weight) * params,
        "replicas_sent_bytes": 2 * (replicas - 1) / replicas * gradients,
    }


def best_interval(layers: int) -> int:
    """Keeping every k-th of n layers' inputs and recomputing k layers at a time holds n/k + k activations: least at
    k = sqrt(n) (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
    """
    return max(1, round(math.sqrt(layers)))


def checkpointed_bytes(request: Request) -> float:
    """Bytes of activations on a rank that keeps the input of every k-th layer and recomputes k layers at a time,
    k = sqrt(layers). A layer keeps 14 B L d + B H L^2 elements, with attention materialised and heads of 128.
    """
    r, every = request, best_interval(request.layers)
    one_input = r.batch * r.seq * r.width
    attention = r.batch * max(1, r.width // 128) * r.seq**2
    elements = math.ceil(r.layers / every) * one_input + every * (14 * one_input + attention)
    return STATE[r.precision][0] * elements


def estimate(request: Request) -> dict[str, Any]:
    """Everything in bytes, ready for JSON.

    Returns:
        ``stages``: one entry a stage with ``stage``, what ``held_and_sent`` returns, ``total_bytes`` at rest on the
        device, ``traffic_bytes_per_step``, ``needed_bytes`` (with ``activations_bytes``, ``runtime_bytes``, buckets in
        flight and gathered layers) and whether it ``fits``; ``recommended_stage`` (``None``: nothing fits), ``reason``.
    """
    r, activations = request, checkpointed_bytes(request)
    layer = STATE[r.precision][0] * r.params / r.layers
    stages: list[dict[str, Any]] = []
    for stage in range(4):
        found = held_and_sent(r, stage)
        total = sum(found[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        # Stage 3 holds the layer in use and the one gathered ahead, and as many in gradients.
        overhead = (0.0, BUCKET / r.sharing(1), 2.0 * BUCKET, 4 * layer)[stage]
        needed = total + overhead + activations + r.runtime
        sent = sum(n_bytes for name, n_bytes in found.items() if name.endswith("_sent_bytes"))
        entry = {"stage": stage, **found, "total_bytes": total, "traffic_bytes_per_step": sent, "needed_bytes": needed}
        stages.append({**entry, "fits": needed <= r.memory and (stage >= 2 or not r.shard)})
    # Stage 1 sends what stage 0 does and holds less.
    best = next((s for s in stages if s["fits"] and (s["stage"] > 0 or r.ranks == 1)), None)
    needed = (best or stages[3])["needed_bytes"] / 1e9
    reason = "the lowest that fits" if best else "nothing fits, stage 3 neither"
    return {
        "request": {**asdict(r), "hidden": r.width},
        "stages": stages,
        "activations_bytes": activations,
        "runtime_bytes": r.runtime,
        "recommended_stage": best and best["stage"],
        "reason": f"{reason}: it needs {needed:.1f} GB of {r.memory / 1e9:g} GB a rank",
    }
