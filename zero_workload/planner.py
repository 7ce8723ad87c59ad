"""What a rank holds at each ZeRO stage, in closed form (Rajbhandari et al., SC20); ``dynamiccl plan`` builds on it."""

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
