"""What ZeRO holds, sends and gains, as formulas: for a plan before anything is started, and beside what was measured.

Symbols as in the papers: P parameters, N data-parallel ranks, B sequences of a rank, L tokens in each, d width, H
heads, n layers. All sizes are in bytes unless a name says otherwise, all times in seconds. Nothing here needs PyTorch.

Sources: [Z] Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC20);
[K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (MLSys 2023); [C] Chen et al.,
Training Deep Nets with Sublinear Memory Cost (2016); [A] Xie et al., Adan (2022); [L] Chen et al., Symbolic Discovery
of Optimization Algorithms (2023), which has Lion; [T] Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009);
[S] Kaplan et al., Scaling Laws for Neural Language Models (2020); [D] the documents after which the project is made,
with the derivation where it is used.
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
#: Modes of recomputation, from the one that holds most.
MODES = ("none", "selective", "sub-block", "block", "sqrt")
#: Bytes that CUDA, NCCL and libraries take beside a model, as a rule: a context of 0.2 to 1 GB, NCCL's buffers of 4 MiB
#: a channel and protocol (0.5 to 1 GB on 8 GPUs), cuBLAS's workspace, the allocator's slack: 2 to 4 GB in all [D]. One
#: document says 64 MB a channel, which is not NCCL's figure.
RUNTIME = 3e9


def state_bytes(optimizer: str = "adam", precision: str = "mixed") -> tuple[int, int, int]:
    """Bytes a parameter of weight, gradient and optimizer: 2 + 2 + 12 with Adam in mixed precision, section 3.1 of [Z].

    With k tensors of state an optimizer takes 4 + 4 k: Lion 8 (12 in all), Adan 16 (20 in all). Adan's 20 are its three
    moments; it also needs the gradient of the step before: 22 where that is kept in 16 bits, 24 in float32.
    """
    weight, gradient, master = PRECISIONS[precision]
    return weight, gradient, master + 4 * MOMENTS[optimizer]


def model_states(
    params: float, ranks: int, stage: int, optimizer: str = "adam", precision: str = "mixed"
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer on one rank: 16 P, 4 P + 12 P / N, 2 P + 14 P / N, 16 P / N [Z]."""
    weight, gradient, states = state_bytes(optimizer, precision)
    share = 1 / ranks
    weights = weight * params * (share if stage >= 3 else 1.0)
    gradients = gradient * params * (share if stage >= 2 else 1.0)
    optimizer_states = states * params * (share if stage >= 1 else 1.0)
    return weights, gradients, optimizer_states


def ring(ranks: int) -> float:
    """The share of a reduce-scatter's or an all-gather's bytes that a rank sends: (N - 1) / N [T]."""
    return (ranks - 1) / ranks


def traffic(
    params: float, ranks: int, stage: int, classic: bool = False, weight: int = 2, gradient: int = 2
) -> float:
    """Bytes that a rank sends in a step on a ring: 4 P, 4 P, 4 P, 6 P, times (N - 1) / N, section 7 of [Z].

    An all-reduce is a reduce-scatter and an all-gather. ``classic``: stage 1 by all-reduce of the gradients, 6 P.
    """
    reductions = 2 if stage == 0 or classic else 1
    gathers = (0, 1, 1, 2)[stage]
    reduced = reductions * gradient
    gathered = gathers * weight
    return ring(ranks) * params * (reduced + gathered)


def scalar_traffic(n_tensors: int, ranks: int, replicas: int = 1) -> float:
    """Bytes of the engine's own all-reduce a step: an element for each parameter tensor, the norm, 16 bits, float32.

    Source: the message of ``engine/agreement.py``, all-reduced on a ring [T].
    """
    message = 4 * (n_tensors + 17)
    return 2 * message * (ring(ranks) + ring(replicas))


def hybrid(
    large: float, small: float, ranks: int, optimizer: str = "adam", precision: str = "mixed"
) -> tuple[float, float]:
    """Bytes held and sent with ``large`` parameters at stage 3 and ``small`` at stage 2; (N - 1) / N is left out.

    Source: [D], by the rows of [Z] for the two stages: with Adam in mixed precision 16 P_L / N + 2 P_S + 14 P_S / N,
    and 6 P_L + 4 P_S.
    """
    weight, gradient, _ = state_bytes(optimizer, precision)
    large_states = model_states(large, ranks, 3, optimizer, precision)
    small_states = model_states(small, ranks, 2, optimizer, precision)
    held = sum(large_states) + sum(small_states)
    sent = (2 * weight + gradient) * large + (weight + gradient) * small
    return held, sent


@dataclass(frozen=True)
class Shape:
    """A dense transformer of n ``layers`` of ``width`` d, on B = ``batch`` sequences of L = ``seq`` tokens a rank."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int
    itemsize: int = 2

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
        maps = self.batch * self.heads
        probabilities = maps * self.seq**2
        return self.itemsize * probabilities


def layer_activations(shape: Shape, norm_outputs: bool = False, tensor: int = 1) -> tuple[float, float]:
    """Bytes of one layer for backward: 14 BLd, and B H L^2 of attention probabilities.

    ``tensor``: ranks that share each matrix. Each has its heads, and its part of the MLP's inner width: 1 / N of all
    but the inputs and outputs of the norms, section 4.1 of [K].

    The 14: input of the norm 1, Q K V 3, output 1, input of the second norm 1, before and after GELU 4 + 4. The
    documents leave out what the norms give to the matrices behind them, which these keep: with ``norm_outputs`` it is
    16 BLd, as [K] has it without its masks of dropout, and as a step of our transformer measures.
    """
    whole = 4 if norm_outputs else 2
    linear = (whole + 12 / tensor) * shape.token_bytes
    return linear, shape.attention_bytes / tensor


def best_interval(layers: int) -> int:
    """Keeping every k-th of n layers' inputs and recomputing k at a time holds n / k + k: least at k = sqrt(n) [C]."""
    return max(1, round(math.sqrt(layers)))


def activations(shape: Shape, mode: str = "none", tensor: int = 1) -> float:
    """Bytes of activations at their peak, of all layers, by what is recomputed.

    ``block``: a layer keeps its input; ``sub-block``: those of attention and MLP; ``selective``: all but probabilities;
    ``sqrt``: every k-th layer keeps its input. Beside that stands what is recomputed at once. ``tensor``: ranks that
    share each matrix (see :func:`layer_activations`) and keep 1 / N of each checkpoint (P_a of [Z], section 6.1).
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
    every = best_interval(n)
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


def stage_that_fits(totals: dict[int, float], memory: float, ranks: int) -> int | None:
    """The lowest stage whose bytes fit; stage 1 sends what stage 0 does, so 0 is for one rank. ``None``: none fits.

    Source: [D].
    """
    stages = (0,) if ranks == 1 else (1, 2, 3)
    for stage in stages:
        if totals[stage] <= memory:
            return stage
    return None


def tensor_traffic(shape: Shape, tensor: int, checkpoints: int = 0) -> float:
    """Bytes that a rank sends in a step to those that share its matrices, section 6 of [Z].

    A block has two all-reduces in forward and two in backward. Recomputation repeats forward's, but for the last of
    each of the ``checkpoints``, whose result backward does not need. P_a gathers each checkpoint once.
    """
    again = 2 * shape.layers - checkpoints if checkpoints else 0
    all_reduces = 4 * shape.layers + again
    messages = 2 * all_reduces + checkpoints
    return ring(tensor) * shape.token_bytes * messages
