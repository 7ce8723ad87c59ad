"""Public models for dry runs: their published shapes, and the layers of Llama's family, which the job has not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .model import Experts, ModelConfig, Transformer
from .remat import Partition


@dataclass(frozen=True)
class Shape:
    """A public model; of Llama's family where ``hidden`` is given, else of GPT-2's with its tied head."""

    layers: int
    width: int
    heads: int
    seq: int
    vocab: int
    #: width inside the gated MLP.
    hidden: int = 0
    #: heads of keys and values; 0: as many as ``heads``.
    kv_heads: int = 0
    #: experts of each MLP, of which two serve a token; 0: a plain MLP.
    experts: int = 0

    def build(self, group: dist.ProcessGroup | None = None, partition: Partition | None = None) -> Transformer:
        """The model; its forward takes tokens and targets [batch, seq] int64 and returns the loss. ``group``: ranks
        that share the experts; ``partition``: each block is recomputed, and its input kept there.
        """
        recompute = "block" if partition else "none"
        config = ModelConfig(self.layers, self.width, self.heads, self.seq, self.vocab, checkpoint=recompute)
        model = Transformer(config, partition)
        if not self.hidden:
            model.head.weight = model.embed.weight
            return model
        model.position, model.norm = None, _norm(self.width)
        for block in model.blocks:
            block.norm1, block.norm2 = _norm(self.width), _norm(self.width)
            block.attention = _Attention(self)
            block.mlp = (
                Experts(self.width, self.experts, group, hidden=self.hidden, gated=True, top=min(2, self.experts))
                if self.experts
                else _GatedMLP(self.width, self.hidden)
            )
        return model


PRESETS = {
    "gpt2": Shape(12, 768, 12, 1024, 50257),
    "gpt2-xl": Shape(48, 1600, 25, 1024, 50257),
    "llama-7b": Shape(32, 4096, 32, 2048, 32000, hidden=11008),
    "llama-13b": Shape(40, 5120, 40, 2048, 32000, hidden=13824),
    "llama-70b": Shape(80, 8192, 64, 4096, 32000, hidden=28672, kv_heads=8),
    "moe-8x7b": Shape(32, 4096, 32, 4096, 32000, hidden=14336, kv_heads=8, experts=8),
}


def _norm(width: int) -> nn.Module:
    return nn.RMSNorm(width, eps=1e-5)


class _Attention(nn.Module):
    """Causal self-attention with rotary positions, [batch, seq, width] to the same; heads share keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k, self.v = (
            nn.Linear(shape.width, self.head * (shape.kv_heads or shape.heads), bias=False) for _ in range(2)
        )
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, heads, seq, head]: halves are paired (Su et al., RoFormer, 2021)."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class _GatedMLP(nn.Module):
    """Position-wise network, [..., width] to the same, SiLU-gated."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out
