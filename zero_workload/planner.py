"""What each ZeRO stage holds, moves and takes, before anything is started; ``dynamiccl plan`` shows it.

Memory and traffic are the formulas of Rajbhandari et al. (SC20); the tests check them against what the engine holds and
sends. Times are a model: of a message of n bytes each of N ranks sends (N - 1) / N, which takes ``latency`` and that by
``bandwidth``; arithmetic runs at ``flops``.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

#: Bytes a parameter: weight, gradient, and what the optimizer adds (master weight included in mixed precision).
STATE = {
    ("mixed", "adam"): (2, 2, 12),
    ("mixed", "adan"): (2, 2, 18),
    ("mixed", "lion"): (2, 2, 8),
    ("fp32", "adam"): (4, 4, 8),
    ("fp32", "adan"): (4, 4, 16),
    ("fp32", "lion"): (4, 4, 4),
}


def stage_bytes(
    params: float, ranks: int, stage: int, precision: str = "mixed", optimizer: str = "adam"
) -> tuple[float, float, float]:
    """Bytes a rank holds at rest for weights, gradients and optimizer at ``stage`` (0 to 3)."""
    sizes = zip(STATE[precision, optimizer], (3, 2, 1), strict=True)  # each is sharded from that stage on
    weights, gradients, states = (n * params / (ranks if stage >= least else 1) for n, least in sizes)
    return weights, gradients, states


def advice(params: int, ranks: int, stage: int, precision: str) -> str:
    """One line for a rank that ran out of memory: what this stage holds at rest, and what the next would."""
    now, then = (sum(stage_bytes(params, ranks, s, precision)) / 1e9 for s in (stage, 3))
    cure = f"stage 3 holds {then:.2f} GB" if stage < 3 else f"on {2 * ranks} ranks it is half of that"
    return f"stage {stage} holds {now:.2f} GB a rank before activations, {cure}; else lower --batch or --seq"


#: Passes of the parameters over the wire in a step, by stage: reduce-scatter and all-gathers. At stage 3 the most:
#: the layers that forward ends with stay for backward unless ``keep_last=False``, see ``estimate``.
PASSES = (2, 2, 2, 3)
#: Bytes that a process takes on its GPU before it holds anything: CUDA context, NCCL's buffers, libraries' workspace.
#: Between 2 and 4 GB as a rule; nothing here was measured.
RUNTIME = 3e9
_NAMES = ("data parallel", "optimizer states sharded", "gradients too", "parameters too")


@dataclass(frozen=True)
class Request:
    """What to plan for. Zeros are filled in by ``completed``.

    ``batch`` sequences of ``seq`` tokens a rank and step; ``bandwidth`` bytes/s that a rank sends, ``latency``
    seconds a message, ``flops`` operations/s of one rank, ``memory`` bytes of one rank, of which ``runtime`` are gone
    when training begins.

    Raises:
        ValueError: a number out of range.
    """

    params: float
    ranks: int
    layers: int = 32
    hidden: int = 0
    heads: int = 0
    seq: int = 2048
    batch: int = 1
    optimizer: str = "adam"
    precision: str = "mixed"
    bandwidth: float = 100e9
    latency: float = 10e-6
    flops: float = 150e12
    memory: float = 80e9
    bucket_bytes: int = 25 * 2**20
    runtime: float = RUNTIME

    def __post_init__(self) -> None:
        for name in ("params", "ranks", "layers", "seq", "batch", "bandwidth", "flops", "memory", "bucket_bytes"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0, not {value}")
        if min(self.latency, self.hidden, self.heads, self.runtime) < 0:
            raise ValueError("latency, hidden, heads and runtime cannot be negative")

    def completed(self) -> Request:
        """With ``hidden`` and ``heads`` of a dense transformer: params = 12 layers hidden^2, heads of 128."""
        hidden = self.hidden or max(128, round(math.sqrt(self.params / (12 * self.layers)) / 128) * 128)
        return Request(**{**asdict(self), "hidden": hidden, "heads": self.heads or max(1, hidden // 128)})


def traffic_bytes(weight_bytes: float, ranks: int, stage: int) -> float:
    """Bytes a rank sends (and receives) a step on rings, when all weights are ``weight_bytes``."""
    return PASSES[stage] * weight_bytes * (ranks - 1) / ranks


def activation_elements(batch: int, seq: int, hidden: int, heads: int) -> float:
    """Elements that one layer keeps for backward when attention is materialised: 14 B L d + B H L^2."""
    return 14.0 * batch * seq * hidden + float(batch) * heads * seq**2


def layer_times(request: Request, batch: int, share: float = 1.0) -> tuple[float, float]:
    """Seconds to gather one layer, of which a rank sends ``share``, and to run its forward: 2 operations a parameter
    and token.
    """
    per_layer = request.params / request.layers
    gather = request.latency + (2 if request.precision == "mixed" else 4) * per_layer * share / request.bandwidth
    return gather, 2 * per_layer * batch * request.seq / request.flops


def estimate(request: Request, share: float = 0.05) -> dict[str, Any]:
    """Everything, in SI units, ready for JSON.

    Returns:
        ``stages``: one entry a stage with ``stage``, ``weights_bytes``, ``gradients_bytes``, ``optimizer_bytes``, their
        sum ``total_bytes``, ``overhead_bytes`` (buckets in flight, gathered units), ``traffic_bytes_per_step`` and
        ``passes`` of the parameters (at stage 3 with ``keep_last=False``; ``passes_kept`` with what the engine keeps by
        default), ``messages_per_step``, ``communication_s``, ``step_s`` [fully overlapped, not at all], ``fits``
        (activations checkpointed, and with ``runtime_bytes``);
        ``activations``: ``per_layer_bytes``, ``all_bytes``, ``checkpointed_bytes`` with ``every`` k = sqrt(layers);
        ``prefetch``: k* = ceil(T_gather / T_compute); two break-evens on many ranks, where (N - 1) / N is 1:
        ``break_even_batch``, from which on all that stage 3 sends takes at most ``share`` of the arithmetic (a layer's
        gather that share of its forward, which is the same), and ``break_even_extra_batch``, from which on what it
        sends more than stage 2 does; ``compute_s``; ``recommended_stage`` (``None``: nothing fits) and ``reason``.

    Raises:
        ValueError: there are no figures for that optimizer in that precision.
    """
    r = request.completed()
    kind = (r.precision, r.optimizer)
    if kind not in STATE:
        raise ValueError(f"no figures for {' '.join(kind)}: know {', '.join(map(' '.join, STATE))}")
    weight = STATE[kind][0]
    per_layer = weight * activation_elements(r.batch, r.seq, r.hidden, r.heads)
    every = max(1, round(math.sqrt(r.layers)))
    kept = math.ceil(r.layers / every) * weight * r.batch * r.seq * r.hidden + every * per_layer
    sent = (r.ranks - 1) / r.ranks
    gather, forward = layer_times(r, r.batch, sent)
    prefetch = max(1, math.ceil(gather / forward))
    one = layer_times(r, 1)
    compute = 6 * r.params * r.batch * r.seq / r.flops
    stages: list[dict[str, Any]] = []
    for stage in range(4):
        weights, grads, states = stage_bytes(r.params, r.ranks, stage, *kind)
        buckets = math.ceil(weight * r.params / r.bucket_bytes)
        layer = weight * r.params / r.layers
        overhead = (0.0, r.bucket_bytes / r.ranks, 2.0 * r.bucket_bytes, (prefetch + 1 + 2) * layer)[stage]
        messages = (buckets, 2 * buckets, 2 * buckets, 3 * r.layers)[stage]
        seconds = messages * r.latency + traffic_bytes(weight * r.params, r.ranks, stage) / r.bandwidth
        total = weights + grads + states
        twice = min(1.0, (1 + prefetch) / r.layers) if stage == 3 else 0.0  # of the layers are not gathered again
        stages.append({
            "stage": stage,
            "weights_bytes": weights,
            "gradients_bytes": grads,
            "optimizer_bytes": states,
            "total_bytes": total,
            "overhead_bytes": overhead,
            "traffic_bytes_per_step": traffic_bytes(weight * r.params, r.ranks, stage),
            "passes": PASSES[stage],
            "passes_kept": PASSES[stage] - twice,
            "messages_per_step": messages,
            "communication_s": seconds,
            "step_s": [max(compute, seconds), compute + seconds],
            "fits": total + overhead + kept + r.runtime <= r.memory,
        })  # fmt: skip
    fitting = [s["stage"] for s in stages if s["fits"]]
    if fitting:
        best = 1 if fitting[0] == 0 and r.ranks > 1 else fitting[0]
        spare = r.memory - stages[best]["total_bytes"] - stages[best]["overhead_bytes"] - kept - r.runtime
        why = "the lowest that fits" if best == fitting[0] else "stage 0 fits too, but saves no traffic"
        reason = f"{why}: {_NAMES[best]}, {spare / 1e9:.1f} GB to spare with checkpointed activations"
    else:
        left = r.memory - kept - stages[3]["overhead_bytes"] - r.runtime
        need = math.ceil(sum(STATE[kind]) * r.params / left) if left > 0 else None
        reason = f"nothing fits; stage 3 would on {need} ranks" if need else "one layer's activations do not fit alone"
    return {
        "request": asdict(r),
        "stages": stages,
        "activations": {
            "per_layer_bytes": per_layer,
            "all_bytes": r.layers * per_layer,
            "checkpointed_bytes": kept,
            "every": every,
        },
        "compute_s": compute,
        "prefetch": prefetch,
        "runtime_bytes": r.runtime,
        "break_even_batch": max(1, math.ceil(one[0] / (share * one[1]))),
        "break_even_extra_batch": max(1, math.ceil(one[0] / (share * 3 * one[1]))),  # one gather a forward and backward
        "recommended_stage": best if fitting else None,
        "reason": reason,
    }


def cut(
    request: Request,
    stage: int,
    *,
    shard: int = 0,
    tensor: int = 1,
    reduce_bytes: int = 0,
    offload: bool = False,
    partition: bool = False,
    experts: int = 1,
    expert_share: float = 0.0,
    slots: float = 1.25,
) -> dict[str, float]:
    """What a rank holds and sends at ``stage`` 2 or 3 of a job that is cut in more ways than one.

    Args:
        request: the job on all its ranks.
        stage: of ZeRO.
        shard: HSDP: ranks over which it shards, the rest are replicas; 0: all that ``tensor`` leaves.
        tensor: ranks that share each matrix, and take turns at none: two all-reduces a layer, forward and backward.
        reduce_bytes: of an element of gradients on their way (``reduce_dtype``), 0: as the weights'.
        offload: masters and optimizer states on the CPU.
        partition: each layer's input is kept in parts by the ranks that share matrices (ZeRO-R's P_a), and the layer
            recomputed: one all-gather and one all-reduce a layer more.
        experts: ranks that share the experts of each layer; others hold the same.
        expert_share: of the parameters, those that are experts'.
        slots: places for tokens in all experts of a layer, by tokens: experts a token times capacity.

    Returns:
        ``weights_bytes``, ``gradients_bytes``, ``optimizer_bytes``, ``offloaded_bytes`` at rest; ``inputs_bytes`` of
        all layers, which recomputing layer by layer keeps; what it sends a step on rings in its shard, to the
        replicas, to those it shares matrices with and to those it shares experts with: ``shard_sent_bytes``,
        ``replicas_sent_bytes``, ``tensor_sent_bytes``, ``experts_sent_bytes``.

    Raises:
        ValueError: another stage, ranks that the numbers do not divide, or a share that is none.
    """
    r, n = request.completed(), shard or request.ranks // tensor
    if stage not in (2, 3) or r.ranks % (n * tensor) or n % experts:
        raise ValueError(f"a job is cut at stages 2 and 3, into {tensor} x {n} ranks or a multiple, not {r.ranks}")
    if not 0 <= expert_share <= 1 or (experts > 1) > (expert_share > 0):
        raise ValueError(f"the experts' share of the parameters lies between 0 and 1, not {expert_share}")
    kind, params, replicas = (r.precision, r.optimizer), r.params / tensor, r.ranks // (n * tensor)
    weight, total = STATE[kind][0], dict.fromkeys(("weights", "gradients", "optimizer", "shard_sent"), 0.0)
    # What all ranks of a shard share, and what fewer do.
    for held, over in (((1 - expert_share) * params, n), (expert_share * params / experts, n // experts)):
        weights, _, states = stage_bytes(held, over, stage, *kind)
        grads = (reduce_bytes or weight) * held / over
        sent = (over - 1) * grads + (over - 1) / over * (stage - 1) * weight * held
        for name, n_bytes in zip(total, (weights, grads, states, sent), strict=True):
            total[name] += n_bytes
    states, layer = total.pop("optimizer"), weight * r.batch * r.seq * r.hidden
    around = r.layers * layer * (tensor - 1) / tensor  # of one pass: every layer's input or output
    total |= {"optimizer": 0.0, "offloaded": states} if offload else {"optimizer": states, "offloaded": 0.0}
    total["inputs"] = r.layers * layer / (tensor if partition else 1)
    total["replicas_sent"] = 2 * (replicas - 1) / replicas * total["gradients"]
    total["tensor_sent"] = (5 * 2 + 1 if partition else 4 * 2) * around
    total["experts_sent"] = 4 * slots * r.layers * layer * (experts - 1) / experts
    return {f"{name}_bytes": n_bytes for name, n_bytes in total.items()}
