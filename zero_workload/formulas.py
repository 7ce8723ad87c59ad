"""What ZeRO holds, sends and gains, as formulas: for a plan before anything is started, and beside what was measured.

P parameters, N data-parallel ranks, B sequences of a rank, L tokens in each, d width, H heads, n layers. Bytes and
seconds. Needs no PyTorch.

Sources: [Z] Rajbhandari et al., ZeRO (SC20); [K] Korthikanti et al., Activation Recomputation (MLSys 2023); [C] Chen
et al., Sublinear Memory Cost (2016); [A] Xie et al., Adan (2022); [L] Chen et al., Lion (2023); [T] Patarasuk and
Yuan (2009); [S] Kaplan et al. (2020); [F] Dao et al. (2022); [R] Radford et al., GPT-2 (2019); [B] Brown et al.,
GPT-3 (2020); [M] Touvron et al., LLaMA (2023); [G] Grattafiori et al., Llama 3 (2024); [D] the documents after which
the project is made, with the derivation where used.
"""

import math
from dataclasses import dataclass

#: Optimizer -> float32 tensors of state that it keeps of each parameter, the master weight apart [Z, A, L].
MOMENTS = {"sgd": 0, "lion": 1, "adam": 2, "adan": 3}
#: Optimizer -> float32 tensors that its implementation keeps beside them: pytorch_optimizer's Adan has the gradient of
#: the step before, so a run of it holds 24 bytes a parameter and not 20.
KEPT_BESIDE = {"adan": 1}
#: Precision -> bytes of a weight, of a gradient, and of the master weight.
PRECISIONS = {"mixed": (2, 2, 4), "fp32": (4, 4, 0)}
#: Layers with more parameters are sharded in the hybrid by layer size, the others stay at stage 2.
LARGE_LAYER = 100e6
#: Modes of recomputation. ``every``: every k-th layer keeps its input, k by :func:`best_interval`.
MODES = ("none", "selective", "sub-block", "block", "every")
#: Parameters -> layers, width, heads and vocabulary of a published dense transformer.
PUBLISHED = {
    0.124e9: (12, 768, 12, 50257),  # GPT-2 [R]
    0.355e9: (24, 1024, 16, 50257),
    0.774e9: (36, 1280, 20, 50257),
    1.56e9: (48, 1600, 25, 50257),
    2.65e9: (32, 2560, 32, 50257),  # GPT-3 2.7B [B]
    6.7e9: (32, 4096, 32, 32000),  # LLaMA [M]
    13.0e9: (40, 5120, 40, 32000),
    32.5e9: (60, 6656, 52, 32000),
    65.2e9: (80, 8192, 64, 32000),
    175e9: (96, 12288, 96, 50257),  # GPT-3 [B]
    405e9: (126, 16384, 128, 128256),  # Llama 3 [G]
}
#: Bytes of a bucket, in which stages 0 to 2 reduce and gather.
BUCKET = 25 * 2**20
#: Bytes that CUDA, NCCL and libraries take beside a model, as a rule: a context of 0.2 to 1 GB, NCCL's buffers of 4 MiB
#: a channel and protocol (0.5 to 1 GB on 8 GPUs), cuBLAS's workspace, the allocator's slack: 2 to 4 GB in all [D]. One
#: document says 64 MB a channel, which is not NCCL's figure.
RUNTIME = 3e9


def state_bytes(optimizer: str = "adam", precision: str = "mixed") -> tuple[int, int, int]:
    """Bytes a parameter of weight, gradient and optimizer: 2 + 2 + 12 with Adam in mixed precision, section 3.1 of [Z].

    An optimizer with k tensors of state takes 4 + 4 k: Lion 8 (12 in all), Adan 16 (20 in all). Adan also needs the
    last step's gradient: 22 if kept in 16 bits, 24 in float32.
    """
    weight, gradient, master = PRECISIONS[precision]
    return weight, gradient, master + 4 * MOMENTS[optimizer]


def held_gradient(stage: int, sent: int, precision: str = "mixed", accumulate: int = 1) -> int:
    """Bytes of a gradient that a rank holds where ``sent`` bytes of it are reduced.

    Stages 0 and 1 add up full gradients in the weights' dtype. Shards, at 2 and 3, are what was reduced; sums over
    micro-batches are float32. Source: ``Settings.sums`` of the engine; [Z] has the 2 bytes of one micro-batch.
    """
    if stage < 2:
        return PRECISIONS[precision][0]
    return sent if accumulate == 1 else 4


def model_states(
    params: float,
    ranks: int,
    stage: int,
    optimizer: str = "adam",
    precision: str = "mixed",
    gradient: int | None = None,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer on one rank: 16 P, 4 P + 12 P / N, 2 P + 14 P / N, 16 P / N [Z].

    ``gradient``: bytes of one that is held, default the precision's.
    """
    weight, usual, states = state_bytes(optimizer, precision)
    gradient = usual if gradient is None else gradient
    share = 1 / ranks
    weights = weight * params * (share if stage >= 3 else 1.0)
    gradients = gradient * params * (share if stage >= 2 else 1.0)
    optimizer_states = states * params * (share if stage >= 1 else 1.0)
    return weights, gradients, optimizer_states


def ring(ranks: int) -> float:
    """The share of a reduce-scatter's or an all-gather's bytes that a rank sends: (N - 1) / N [T]."""
    return (ranks - 1) / ranks


def traffic(
    params: float,
    ranks: int,
    stage: int,
    classic: bool = False,
    weight: int = 2,
    gradient: int = 2,
    accumulate: int = 1,
) -> float:
    """Bytes that a rank sends in a step on a ring: 4 P, 4 P, 4 P, 6 P, times (N - 1) / N, section 7 of [Z].

    An all-reduce is a reduce-scatter and an all-gather. ``classic``: stage 1 by all-reduce of the gradients, 6 P. Of
    ``accumulate`` micro-batches stages 2 and 3 reduce each, and stage 3 gathers for each.
    """
    reductions = 2 if stage == 0 or classic else 1
    reductions *= accumulate if stage >= 2 else 1
    gathers = (0, 1, 1, 2 * accumulate)[stage]
    reduced = reductions * gradient
    gathered = gathers * weight
    return ring(ranks) * params * (reduced + gathered)


def scalar_traffic(n_tensors: int, ranks: int, replicas: int = 1) -> float:
    """Bytes of the engine's own all-reduce a step: an element for each parameter tensor, the norm, 16 bits, float32.

    Source: the message of ``engine/agreement.py``, all-reduced on a ring [T].
    """
    message = 4 * (n_tensors + 17)
    return 2 * message * (ring(ranks) + ring(replicas))


def replica_traffic(params: float, ranks: int, replicas: int, gradient: int = 2) -> float:
    """Bytes that a rank sends in a step to ``replicas`` of its shard (HSDP): an all-reduce of P / N gradients [T]."""
    shard = gradient * params / ranks
    return 2 * ring(replicas) * shard


def hybrid(
    large: float,
    small: float,
    ranks: int,
    optimizer: str = "adam",
    precision: str = "mixed",
    gradient: int | None = None,
    accumulate: int = 1,
) -> tuple[float, float]:
    """Bytes held and sent with ``large`` parameters at stage 3 and ``small`` at stage 2.

    Source: [D], by the rows of [Z] for the two stages: with Adam in mixed precision 16 P_L / N + 2 P_S + 14 P_S / N,
    and 6 P_L + 4 P_S, times (N - 1) / N as all that is sent.
    """
    weight, usual, _ = state_bytes(optimizer, precision)
    gradient = usual if gradient is None else gradient
    kept = held_gradient(3, gradient, precision, accumulate)  # as at stage 2
    large_states = model_states(large, ranks, 3, optimizer, precision, kept)
    small_states = model_states(small, ranks, 2, optimizer, precision, kept)
    held = sum(large_states) + sum(small_states)
    sent = traffic(large, ranks, 3, weight=weight, gradient=gradient, accumulate=accumulate)
    sent += traffic(small, ranks, 2, weight=weight, gradient=gradient, accumulate=accumulate)
    return held, sent


def reduction(
    params: float,
    ranks: int,
    stage: int,
    optimizer: str = "adam",
    precision: str = "mixed",
    gradient: int | None = None,
    accumulate: int = 1,
) -> float:
    """How many times less than stage 0 a stage holds: with Adam in mixed precision 4N/(N + 3), 8N/(N + 7), N [D].

    ``gradient``: bytes of one that is sent, default the precision's.
    """
    gradient = state_bytes(optimizer, precision)[1] if gradient is None else gradient
    kept = [held_gradient(one, gradient, precision, accumulate) for one in (0, stage)]
    whole = model_states(params, ranks, 0, optimizer, precision, kept[0])
    part = model_states(params, ranks, stage, optimizer, precision, kept[1])
    return sum(whole) / sum(part)


@dataclass(frozen=True)
class Shape:
    """A dense transformer of n ``layers`` of ``width`` d, on B = ``batch`` sequences of L = ``seq`` tokens a rank.

    ``materialised``: attention holds its probabilities. FlashAttention does not: it computes them again, inside [F].
    """

    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    itemsize: int = 2
    vocab: int = 32000
    materialised: bool = True

    @property
    def tokens(self) -> int:
        """BL: tokens of a rank's batch."""
        return self.batch * self.seq

    @property
    def token_bytes(self) -> int:
        """BLd: one value for each token and unit of width."""
        values = self.tokens * self.width
        return self.itemsize * values

    @property
    def attention_bytes(self) -> int:
        """B H L^2: the probabilities of one layer, where attention is materialised."""
        if not self.materialised:
            return 0
        maps = self.batch * self.heads
        probabilities = maps * self.seq**2
        return self.itemsize * probabilities


def layer_activations(shape: Shape, norm_outputs: bool = False, tensor: int = 1) -> tuple[float, float]:
    """Bytes of one layer for backward: 14 BLd, and B H L^2 of attention probabilities.

    ``tensor``: ranks that share each matrix: 1 / N of all but inputs and outputs of the norms, section 4.1 of [K]. 14:
    norm 1, Q K V 3, output 1, norm 1, GELU 4 + 4. ``norm_outputs``: 16, as [K] without dropout's masks, and as
    measured.
    """
    whole = 4 if norm_outputs else 2
    linear = (whole + 12 / tensor) * shape.token_bytes
    return linear, shape.attention_bytes / tensor


def published(params: float) -> tuple[int, int, int, int]:
    """Layers, width, heads and vocabulary of the published model [R, B, M, G] that is nearest in size.

    Of one a quarter larger or smaller only layers and vocabulary: the width is that of P = 12 n d^2, in heads of 128.
    """
    size = min(PUBLISHED, key=lambda known: abs(math.log(known / params)))
    layers, width, heads, vocab = PUBLISHED[size]
    if 0.8 <= params / size <= 1.25:
        return layers, width, heads, vocab
    width = max(128, round((params / (12 * layers)) ** 0.5 / 128) * 128)
    return layers, width, width // 128, vocab


def best_interval(layers: int, activations: float = 1.0, checkpoint: float = 1.0) -> int:
    """The k with which keeping every k-th layer's input, and recomputing k layers at a time, holds least.

    That is n / k checkpoints and k layers' ``activations``: least at k = sqrt(n c / a). With c = a it is the sqrt(n) of
    [C]. A transformer's layer holds 14 times its checkpoint and more, so k is 1 or 2 for published models.
    """
    held = {k: math.ceil(layers / k) * checkpoint + k * activations for k in range(1, layers + 1)}
    return min(held, key=held.__getitem__)


def interval(shape: Shape, tensor: int = 1) -> int:
    """:func:`best_interval` of a shape [C]."""
    layer = sum(layer_activations(shape, tensor=tensor))
    return best_interval(shape.layers, layer, shape.token_bytes / tensor)


def activations(shape: Shape, mode: str = "none", tensor: int = 1) -> float:
    """Bytes of activations at their peak, of all layers, by what is recomputed.

    ``block``: a layer keeps its input; ``sub-block``: those of attention and MLP; ``selective``: all but probabilities;
    ``every``: every k-th layer its input (:func:`interval`). What is recomputed at once is added. ``tensor``: ranks
    that share each matrix; each keeps 1 / N of a checkpoint (P_a of [Z], section 6.1).
    """
    linear, attention = layer_activations(shape, tensor=tensor)
    one = shape.token_bytes / tensor
    n = shape.layers
    if mode == "none":
        return n * (linear + attention)
    if mode == "selective":
        return n * linear + attention
    if mode == "sub-block":
        attention_half = (1 + 4 / tensor) * shape.token_bytes + attention
        mlp_half = (1 + 8 / tensor) * shape.token_bytes
        return 2 * n * one + max(attention_half, mlp_half)
    if mode == "block":
        return n * one + linear + attention
    every = interval(shape, tensor)
    kept = math.ceil(n / every)
    layer = linear + attention
    return kept * one + every * layer


def recomputed_share(shape: Shape, mode: str) -> float:
    """FLOPs that are done again, by those of a step (forward and backward, three times the forward's).

    Source: [K], appendix A: a layer's forward is 24 BLd^2 + 4 BL^2 d FLOPs.
    """
    tokens = shape.tokens
    attention = 4 * tokens * shape.seq * shape.width
    matrices = 24 * tokens * shape.width**2
    forward = matrices + attention
    again = {"none": 0.0, "selective": attention}.get(mode, forward)
    return again / (3 * forward)


def logits(shape: Shape, tensor: int = 1) -> float:
    """Bytes of the loss's logits in float32, 4 BLV, section 4.3 of [K]."""
    return 4.0 * shape.tokens * shape.vocab / tensor


def modes(shape: Shape) -> tuple[str, ...]:
    """Those of :data:`MODES` that differ: FlashAttention has no probabilities to leave out [F]."""
    return tuple(mode for mode in MODES if shape.materialised or mode != "selective")


def recomputation_value(shape: Shape, tensor: int = 1) -> list[tuple[str, float, float]]:
    """What a layer may recompute: name, bytes that it saves, FLOPs that it costs; the best first.

    A multiply-add is two FLOPs. A norm, and a GELU, are taken at 8 an element. Of ranks that share each matrix
    (``tensor``) each does its part, and all norms. Source: [D], by the sizes of :func:`layer_activations`.
    """
    one = shape.token_bytes / tensor
    elements = shape.tokens * shape.width / tensor
    rows = [
        ("norm outputs", 2.0 * shape.token_bytes, 8.0 * 2 * shape.tokens * shape.width),
        ("GELU output", 4.0 * one, 8.0 * 4 * elements),
        ("attention probabilities", shape.attention_bytes / tensor, 2.0 * elements * shape.seq),
        ("Q K V", 3.0 * one, 6.0 * elements * shape.width),
    ]
    rows = [row for row in rows if row[1]]
    return sorted(rows, key=lambda row: -row[1] / row[2])


@dataclass(frozen=True)
class Machine:
    """A GPU and its network: bytes of memory, FLOP/s that a step reaches, bytes a second, seconds a collective."""

    memory: float = 80e9
    flops: float = 150e12
    bandwidth: float = 100e9
    latency: float = 10e-6


def stage_3_seconds(
    params: float, layers: int, machine: Machine, weight: int = 2, gradient: int = 2
) -> float:
    """Communication of a step at stage 3 with nothing hidden: three collectives a layer, 6 P bytes [D, Z].

    ``weight`` and ``gradient``: bytes of one, 2 in 16 bits.
    """
    latencies = 3 * layers * machine.latency
    transfers = (2 * weight + gradient) * params / machine.bandwidth
    return latencies + transfers


def compute_seconds(params: float, batch: float, seq: int, machine: Machine) -> float:
    """6 P FLOPs a token, forward and backward, section 2.1 of [S]."""
    operations = 6 * params * batch * seq
    return operations / machine.flops


def break_even_batch(
    params: float,
    layers: int,
    seq: int,
    machine: Machine,
    share: float = 0.05,
    weight: int = 2,
    gradient: int = 2,
) -> int:
    """Least sequences a rank at which stage 3's communication is below ``share`` of the compute.

    Source: [D]: (3 n latency + 6 P / bandwidth) <= share x 6 P B L / FLOPs a second. P cancels but for the latency.
    """
    communication = stage_3_seconds(params, layers, machine, weight, gradient)
    sequence = compute_seconds(params, 1, seq, machine)
    allowed = share * sequence
    return math.ceil(communication / allowed)


def prefetch_depth(layer_params: float, compute: float, bandwidth: float, weight: int = 2) -> int:
    """k* = ceil(T_gather / T_compute): layers to gather ahead so that no gather is waited for [D]."""
    gather = weight * layer_params / bandwidth
    layers = math.ceil(gather / compute)
    return max(1, layers)


def gathered(params: float, layers: int, weight: int = 2, ahead: int = 1) -> float:
    """Bytes of the layers that stage 3 has gathered at once: the one in use and those ``ahead`` [Z]."""
    return (1 + min(ahead, layers - 1)) * weight * params / layers


def exposed(job: "Job", stage: int, again: float, machine: Machine) -> float:
    """Seconds of a step in which a rank waits for transfers that nothing hides.

    Reductions run beside backward, gathers beside forward; stage 3's second gathers beside backward. Exposed: what
    exceeds that compute, the first gather and the last reduction (stage 3 a layer's, else a bucket's). Micro-batches:
    stages 0 and 1 reduce the last. Source: [D], bytes [T].
    """
    forward = job.compute / 3
    backward = job.compute * (2 / 3 + again)
    sent = ring(job.ranks) * job.params / machine.bandwidth
    gather, reduce = job.weight * sent, job.gradient * sent
    n_messages = job.layers
    if stage < 3:
        n_messages = max(1, math.ceil(job.weight * job.params / BUCKET))
    latency = n_messages * machine.latency
    first = gather / n_messages + machine.latency
    last = reduce / n_messages + machine.latency
    if job.ranks == 1:
        return 0.0
    if stage == 0:
        return last + max(0.0, 2 * reduce + latency - last - backward)
    ends = first + max(0.0, gather + latency - first - forward)
    if stage < 3:
        times = job.accumulate if stage == 2 else 1
        return ends + times * (last + max(0.0, reduce + latency - last - backward))
    behind = last + max(0.0, gather + reduce + 2 * latency - last - backward)
    return job.accumulate * (ends + behind)


@dataclass(frozen=True)
class Job:
    """What of a job decides its step time: P of a rank, N, n, seconds of compute of a micro-batch, bytes of a weight
    and of a gradient that is sent, micro-batches.
    """

    params: float
    ranks: int
    layers: int
    compute: float
    weight: int = 2
    gradient: int = 2
    accumulate: int = 1


def step_seconds(job: Job, stage: int, again: float, machine: Machine) -> float:
    """Compute, what of it is done ``again`` (a share), and the transfers that nothing hides [D]."""
    compute = job.accumulate * job.compute * (1 + again)
    return compute + exposed(job, stage, again, machine)


def tensor_traffic(shape: Shape, tensor: int, checkpoints: int = 0) -> float:
    """Bytes that a rank sends in a step to those that share its matrices, section 6 of [Z].

    A block has two all-reduces in forward and two in backward. Recomputation repeats forward's, but for the last of
    each of the ``checkpoints``, whose result backward does not need. P_a gathers each checkpoint once.
    """
    again = 2 * shape.layers - checkpoints if checkpoints else 0
    all_reduces = 4 * shape.layers + again
    messages = 2 * all_reduces + checkpoints
    return ring(tensor) * shape.token_bytes * messages
