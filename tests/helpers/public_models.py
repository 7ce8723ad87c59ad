"""Public models for dry runs: their published shapes, and the layers of Llama's family, which the job has not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A public model; of Llama's family where ``hidden`` is given, else of GPT-2's with its tied head."""

    layers: int
    width: int
    heads: int
    seq: int
    vocab: int
    hidden: int = 0  # width inside the gated MLP
    kv_heads: int = 0  # heads of keys and values; 0: as many as ``heads``
    experts: int = 0  # of each MLP, two of which serve a token; 0: a plain MLP

    def build(self) -> Transformer:
        """The model; its forward takes tokens and targets [batch, seq] int64 and returns the loss."""
        model = Transformer(ModelConfig(self.layers, self.width, self.heads, self.seq, self.vocab))
        if not self.hidden:
            model.head.weight = model.embed.weight
            return model
        model.position, model.norm = None, nn.RMSNorm(self.width)
        for block in model.blocks:
            block.norm1, block.norm2 = nn.RMSNorm(self.width), nn.RMSNorm(self.width)
            block.attention = _Attention(self)
            block.mlp = _GatedMLP(self.width, self.hidden)
            if self.experts:
                block.mlp = _GatedExperts(self.width, self.experts, self.hidden)
        return model


PRESETS = {
    "gpt2": Shape(12, 768, 12, 1024, 50257),
    "gpt2-xl": Shape(48, 1600, 25, 1024, 50257),
    "llama-7b": Shape(32, 4096, 32, 2048, 32000, hidden=11008),
    "llama-13b": Shape(40, 5120, 40, 2048, 32000, hidden=13824),
    "llama-70b": Shape(80, 8192, 64, 4096, 32000, hidden=28672, kv_heads=8),
    "moe-8x7b": Shape(32, 4096, 32, 4096, 32000, hidden=14336, kv_heads=8, experts=8),
}


class _Attention(nn.Module):
    """Causal, [batch, seq, width] to the same; heads share keys and values. Rotary positions, which have no parameters
    and no matrices, are left out.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        shared = self.head * (shape.kv_heads or shape.heads)
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k, self.v = (nn.Linear(shape.width, shared, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


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


class _GatedExperts(nn.Module):
    """SiLU-gated MLPs in place of a block's one, [batch, seq, width] to the same; two of them serve a token.

    The router's best experts take a token unless they have 1.25 times their fair share of that sequence already; the
    rest pass by on the residual. No shape depends on the data.
    """

    def __init__(self, width: int, experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.gate = (nn.Parameter(torch.empty(experts, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        experts = len(self.up)
        room = math.ceil(1.25 * seq * 2 / experts)
        weight, chosen = (t.flatten(1) for t in self.router(x).softmax(-1).topk(2))
        picked = (chosen[..., None] == torch.arange(experts, device=x.device)).long()
        before = (picked.cumsum(1) * picked).sum(-1) - 1  # tokens of the sequence that chose the same
        place = torch.where(before < room, chosen * room + before, experts * room)[..., None].expand(
            -1, -1, width
        )
        slots = x.new_zeros(batch, experts * room + 1, width)
        slots = slots.scatter(1, place, x.repeat_interleave(2, 1))[:, :-1].view(batch, experts, room, width)
        slots = slots.transpose(0, 1).flatten(1, 2)  # [experts, batch * room, width]
        done = (F.silu(slots @ self.gate) * (slots @ self.up)) @ self.down
        done = done.view(experts, batch, room, width).transpose(0, 1).flatten(1, 2)
        out = F.pad(done, (0, 0, 0, 1)).gather(1, place) * weight[..., None]
        return out.unflatten(1, (seq, 2)).sum(2)
