"""The transformer that the job trains: GPT-2's, on bytes."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..formulas import best_interval
from .recompute import MODES, Checkpoints, recomputed


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a transformer; the default has 1.9 M parameters. Raises ValueError where sizes do not fit together."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    seq: int = 128
    vocab: int = 256
    #: what backward recomputes, see ``recompute.MODES``
    recompute: str = "none"
    #: blocks that are recomputed at a time; 0: sqrt(layers)
    recompute_every: int = 1
    #: attention holds its probabilities [batch, heads, seq, seq], as the formulas have it; else one fused operation
    materialised: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.seq, self.vocab) < 1:
            raise ValueError("layers, width, heads, seq and vocab start at 1")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.recompute not in MODES:
            raise ValueError(f"recompute is one of {', '.join(MODES)}, not {self.recompute!r}")
        if self.recompute_every < 0:
            raise ValueError(f"recompute_every is a whole number from 0 up, not {self.recompute_every}")
        if self.recompute_every != 1 and self.recompute != "block":
            raise ValueError("recompute_every counts blocks: give it with recompute='block'")
        if self.recompute == "selective" and not self.materialised:
            raise ValueError(
                "recompute='selective' drops attention's probabilities, which fused attention does not keep: "
                "give it with materialised=True"
            )

    @property
    def checkpoints(self) -> int:
        """Inputs that are kept for backward."""
        if self.recompute == "sub-block":
            return 2 * self.layers
        return math.ceil(self.layers / self.every) if self.recompute == "block" else 0

    @property
    def every(self) -> int:
        """Blocks that are recomputed at a time."""
        return self.recompute_every or best_interval(self.layers)


def _materialised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention step by step, [batch, heads, seq, head] each."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width] to the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        fused = partial(F.scaled_dot_product_attention, is_causal=True)
        self.attend = _materialised if config.materialised else fused
        if config.recompute == "selective":
            self.attend = partial(recomputed, self.attend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        heads = self.qkv(x).unflatten(
            -1, (-1, 3, self.head)
        )  # head by head, so that ranks can hold some of them
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        attended = self.attend(q, k, v)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual.

    Args:
        config: of the model.
        keep: recompute each of the two by itself, and keep their inputs here.
    """

    def __init__(self, config: ModelConfig, keep: Checkpoints | None) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(config)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp: nn.Module = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
        self.keep = keep

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(self.norm1(x))
        return out

    def _think(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(self.norm2(x))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, width] to the same."""
        for part in (self._attend, self._think):
            x = x + (part(x) if self.keep is None else recomputed(part, x, keep=self.keep))
        return x


class Transformer(nn.Module):
    """Tokens (bytes) in, mean cross-entropy of the next one out.

    Args:
        config: its shape.
        keep: where the inputs of recomputed parts lie; made here if there is none.
    """

    def __init__(self, config: ModelConfig, keep: Checkpoints | None = None) -> None:
        super().__init__()
        self.config = config
        self.keep = keep or Checkpoints(config.checkpoints)
        inside = self.keep if config.recompute == "sub-block" else None
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position: nn.Embedding | None = nn.Embedding(config.seq, config.width)
        self.blocks = nn.Sequential(*(Block(config, inside) for _ in range(config.layers)))
        self.norm: nn.Module = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
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
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = x + self.position(places)
        if self.config.recompute == "block":
            every = self.config.every
            for at in range(0, len(self.blocks), every):
                x = recomputed(self.blocks[at : at + every], x, keep=self.keep)
        else:
            x = self.blocks(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
