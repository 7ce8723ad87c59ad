"""The transformer that the job trains: GPT-2's, on bytes."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..formulas import Shape, interval
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
    #: blocks that are recomputed at a time; 0: as many as hold least, ``formulas.best_interval``
    recompute_every: int = 1
    #: attention holds its probabilities [batch, heads, seq, seq], as the formulas have it; else one fused operation
    materialised: bool = False

    def __post_init__(self) -> None:
        sizes = self.layers, self.width, self.heads, self.seq, self.vocab
        if min(sizes) < 1:
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
        if self.recompute == "block":
            groups = self.layers / self.every
            return math.ceil(groups)
        return 0

    @property
    def every(self) -> int:
        """Blocks that are recomputed at a time."""
        return self.recompute_every or interval(self.shape(1))

    def shape(self, batch: int) -> Shape:
        """Its figures in the formulas."""
        sizes = (self.layers, self.width, self.heads, self.seq, batch)
        return Shape(*sizes, vocab=self.vocab, materialised=self.materialised)


def _materialised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention step by step, [batch, heads, seq, head] each."""
    scale = 1 / math.sqrt(q.shape[-1])
    keys = k.transpose(-1, -2)
    scores = q @ keys * scale
    device = q.device
    pairs = scores.shape[-2:]
    every_pair = torch.ones(pairs, dtype=torch.bool, device=device)
    later = every_pair.triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width] to the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head = width // config.heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        fused = partial(F.scaled_dot_product_attention, is_causal=True)
        self.attend = _materialised if config.materialised else fused
        if config.recompute == "selective":
            self.attend = partial(recomputed, self.attend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        by_head = -1, 3, self.head  # head by head, so that ranks can hold some of them
        heads = self.qkv(x).unflatten(-1, by_head)
        parts = heads.unbind(-2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = self.attend(q, k, v)
        by_position = attended.transpose(1, 2)
        joined = by_position.flatten(2)
        return self.out(joined)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual.

    Args:
        config: of the model.
        keep: recompute each of the two by itself, and keep their inputs here.
    """

    def __init__(self, config: ModelConfig, keep: Checkpoints | None) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(config)
        up = nn.Linear(width, 4 * width)
        down = nn.Linear(4 * width, width)
        gelu = nn.GELU()
        parts = OrderedDict[str, nn.Module](up=up, gelu=gelu, down=down)
        self.mlp: nn.Module = nn.Sequential(parts)
        self.keep = keep

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        return self.attention(normed)

    def _think(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm2(x)
        return self.mlp(normed)

    def _output(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """What ``part`` makes of ``x``; recomputed in backward where there is a place for its input."""
        if self.keep is None:
            return part(x)
        return recomputed(part, x, keep=self.keep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, width] to the same."""
        for part in (self._attend, self._think):
            x = x + self._output(part, x)
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
        width = config.width
        self.embed = nn.Embedding(config.vocab, width)
        self.position: nn.Embedding | None = nn.Embedding(config.seq, width)
        blocks = [Block(config, inside) for _ in range(config.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm: nn.Module = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab, bias=False)
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
            length = tokens.shape[1]
            device = tokens.device
            places = torch.arange(length, device=device)
            x = x + self.position(places)
        if self.config.recompute == "block":
            every = self.config.every
            n_blocks = len(self.blocks)
            for first in range(0, n_blocks, every):
                stop = first + every
                together = self.blocks[first:stop]
                x = recomputed(together, x, keep=self.keep)
        else:
            x = self.blocks(x)
        x = self.norm(x)
        logits = self.head(x)
        scores = logits.float().flatten(0, 1)
        following = targets.flatten()
        return F.cross_entropy(scores, following)
