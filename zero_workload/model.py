"""Transformers of GPT-2's and Llama's families; the default is the byte-level one that the job trains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .remat import Partition, best_interval, remat

CHECKPOINTS = ("none", "block", "sublayer", "attention")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a transformer; the default has 1.9 M parameters. Raises ValueError where sizes do not fit together."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    seq: int = 128
    vocab: int = 256
    #: 0: 4 x width.
    hidden: int = 0
    #: heads of keys and values; 0: as many as ``heads``.
    kv_heads: int = 0
    #: Llama's family: RMS norm, gated MLP, rotary positions, no biases; else GPT-2's.
    llama: bool = False
    #: the head shares the embedding's weight.
    tied: bool = False
    #: experts of each MLP, of which two serve a token; 0: a plain MLP.
    experts: int = 0
    #: what is recomputed in backward: whole blocks, attention and MLP by themselves, the attention core alone.
    checkpoint: str = "none"
    #: segment length of "block"; the other two apply in every so-manieth block. 0: sqrt(layers).
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.seq, self.vocab) < 1:
            raise ValueError("layers, width, heads, seq and vocab start at 1")
        if self.width % self.heads or self.heads % (self.kv_heads or self.heads):
            sizes = f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}"
            raise ValueError(f"{sizes}: each divides the one before")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(f"checkpoint is one of {', '.join(CHECKPOINTS)}, not {self.checkpoint!r}")


def _norm(config: ModelConfig) -> nn.Module:
    return nn.RMSNorm(config.width, eps=1e-5) if config.llama else nn.LayerNorm(config.width)


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width] to the same."""

    def __init__(self, config: ModelConfig, recompute_core: bool) -> None:
        super().__init__()
        core = partial(F.scaled_dot_product_attention, is_causal=True)
        self.core = partial(remat, core) if recompute_core else core
        self.llama, self.head = config.llama, config.width // config.heads
        self.split = [config.width, *[self.head * (config.kv_heads or config.heads)] * 2]
        self.qkv = nn.Linear(config.width, sum(self.split), bias=not config.llama)
        self.out = nn.Linear(config.width, config.width, bias=not config.llama)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        parts = self.qkv(x).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        if self.llama:
            q, k = rotate(q), rotate(k)
        if q.shape[1] != k.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out: torch.Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return out


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, heads, seq, head]: halves are paired (Su et al., RoFormer, 2021)."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class MLP(nn.Module):
    """Position-wise network, [..., width] to the same: GELU, or SiLU-gated in Llama's family."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden or 4 * config.width, not config.llama
        self.gate = nn.Linear(config.width, hidden, bias=False) if config.llama else None
        self.up = nn.Linear(config.width, hidden, bias=bias)
        self.down = nn.Linear(hidden, config.width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Each position by itself."""
        out: torch.Tensor = self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Two of several MLPs per token. Every expert sees every token, those not chosen with weight 0: no shape depends
    on the data, at the price of idle arithmetic; parameters and their collectives are those of a real mixture.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, config.experts, bias=False)
        for number in range(config.experts):
            self.add_module(f"expert{number}", MLP(config))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        scores = self.router(x)
        top, chosen = scores.topk(min(2, scores.shape[-1]), dim=-1)
        weight = torch.zeros_like(scores).scatter(-1, chosen, top.softmax(dim=-1))
        experts = [m for m in self.children() if isinstance(m, MLP)]
        return torch.stack([weight[..., i, None] * expert(x) for i, expert in enumerate(experts)]).sum(0)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, recompute: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.attention = Attention(config, recompute == "attention")
        self.mlp = Experts(config) if config.experts else MLP(config)
        self.by_sublayer = recompute == "sublayer"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, width] to the same."""
        for norm, layer in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            x = x + (remat(lambda y, n=norm, f=layer: f(n(y)), x) if self.by_sublayer else layer(norm(x)))
        return x


class Transformer(nn.Module):
    """Tokens (bytes) in, mean cross-entropy of the next one out.

    Args:
        config: its shape.
        partition: where checkpoints of whole blocks are kept in parts, see ``remat.Partition``.
    """

    def __init__(self, config: ModelConfig, partition: Partition | None = None) -> None:
        super().__init__()
        self.config, self.partition = config, partition
        self.every = config.checkpoint_every or best_interval(config.layers)
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = None if config.llama else nn.Embedding(config.seq, config.width)
        kinds = [config.checkpoint if i % self.every == 0 else "none" for i in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, kind) for kind in kinds)
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """``tokens``, ``targets`` [batch, seq] int64; returns a float32 scalar."""
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for at in range(0, len(self.blocks), self.every):
            segment = partial(_chain, self.blocks[at : at + self.every])
            recomputed = self.config.checkpoint == "block"
            x = remat(segment, x, partition=self.partition) if recomputed else segment(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _chain(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x
