"""The transformer that the job trains: GPT-2's, on bytes."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .parallel import Experts
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
    #: of each MLP; 0: no mixture.
    experts: int = 0
    #: what is recomputed in backward: whole blocks, attention and MLP by themselves, the attention core alone.
    checkpoint: str = "none"
    #: segment length of "block"; the other two apply in every so-manieth block. 0: sqrt(layers).
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.seq, self.vocab) < 1:
            raise ValueError("layers, width, heads, seq and vocab start at 1")
        if self.experts < 0:
            raise ValueError(f"experts start at 0, not {self.experts}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.checkpoint not in CHECKPOINTS:
            raise ValueError(f"checkpoint is one of {', '.join(CHECKPOINTS)}, not {self.checkpoint!r}")


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width] to the same."""

    def __init__(self, config: ModelConfig, recompute_core: bool) -> None:
        super().__init__()
        core = partial(F.scaled_dot_product_attention, is_causal=True)
        self.core = partial(remat, core) if recompute_core else core
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head))  # head by head, so that ranks can hold some of them
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        out: torch.Tensor = self.out(self.core(q, k, v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, recompute: str, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config, recompute == "attention")
        if config.experts:
            self.mlp: nn.Module = Experts(config.width, config.experts, group)
        else:
            up, down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)
            self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
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
        group: expert-parallel ranks, see ``parallel.Experts``.
    """

    def __init__(
        self, config: ModelConfig, partition: Partition | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.config, self.partition = config, partition
        self.every = config.checkpoint_every or best_interval(config.layers)
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position: nn.Embedding | None = nn.Embedding(config.seq, config.width)
        kinds = [config.checkpoint if i % self.every == 0 else "none" for i in range(config.layers)]
        self.blocks = nn.Sequential(*(Block(config, kind, group) for kind in kinds))
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
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for at in range(0, len(self.blocks), self.every):
            segment = self.blocks[at : at + self.every]
            x = remat(segment, x, partition=self.partition) if self.config.checkpoint == "block" else segment(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
