"""The transformer that the job trains: GPT-2's, on bytes, its MLPs one or a mixture of experts."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


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
    #: blocks that backward recomputes at a time, of which only the first one's input is kept; 0: nothing is recomputed.
    recompute: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.seq, self.vocab) < 1:
            raise ValueError("layers, width, heads, seq and vocab start at 1")
        for name in ("experts", "recompute"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} starts at 0, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, width] to the same."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to this and earlier positions."""
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head))  # head by head, so that ranks can hold some of them
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        if config.experts:
            self.mlp: nn.Module = Experts(config.width, config.experts, group)
        else:
            up, down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)
            self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, width] to the same."""
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Tokens (bytes) in, mean cross-entropy of the next one out.

    Args:
        config: its shape.
        group: expert-parallel ranks, see ``Experts``.
    """

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position: nn.Embedding | None = nn.Embedding(config.seq, config.width)
        self.blocks = nn.Sequential(*(Block(config, group) for _ in range(config.layers)))
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
        size = self.config.recompute
        for at in range(0, len(self.blocks), size or len(self.blocks)):
            x = checkpoint(self.blocks[at : at + size], x, use_reentrant=False) if size else self.blocks(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dimension change places over ``group``; so do their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


class Experts(nn.Module):
    """``experts`` MLPs in place of a block's one, [batch, seq, width] to the same; ``top`` of them serve a token.

    As the Switch Transformer (Fedus et al., JMLR 2022), without its balancing loss: the router's best experts take a
    token unless they have ``capacity`` times their fair share of that sequence already; the rest pass by on the
    residual. So a sequence's output depends on that sequence alone, and no shape on the data.

    Args:
        width: of the model.
        experts: how many there are.
        group: expert-parallel ranks: each holds its part of the experts, tokens travel to them and back by all-to-all,
            two in forward and two in backward. Its ranks read different data. ``None``: all experts here.

    Raises:
        ValueError: the ranks do not divide the experts.
    """

    top, capacity = 1, 1.25
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, width: int, experts: int, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.experts, self.group = experts, group
        self.ranks, place = (group.size(), group.rank()) if group else (1, 0)
        if experts % self.ranks:
            raise ValueError(f"{experts} experts cannot be dealt to {self.ranks} ranks evenly")
        self.router = nn.Linear(width, experts, bias=False)
        for name, shape in {"up": (width, 4 * width), "down": (4 * width, width)}.items():
            weights = torch.empty(experts, *shape).normal_(std=0.02)  # all are drawn: the same whatever the group
            param = nn.Parameter(weights.chunk(self.ranks)[place].clone())
            if group:
                param.expert = place, self.ranks  # type: ignore[attr-defined]  # zero() shards it over ``expert_group``
            setattr(self, name, param)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """What is between the matrices of each expert here, for its tokens [experts here, tokens, width]."""
        return F.gelu(x @ self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route, send, compute, send back, weigh by the router's probability."""
        batch, seq, width = x.shape
        room = math.ceil(self.capacity * seq * self.top / self.experts)
        weight, slot = self._route(x, room)
        slot = slot[..., None].expand(-1, -1, width)
        slots = x.new_zeros(batch, self.experts * room + 1, width)
        slots = slots.scatter(1, slot, x.repeat_interleave(self.top, 1))[:, :-1]
        sent = slots.view(batch, self.experts, room, width).transpose(0, 1).contiguous()
        come = self._exchange(sent).view(self.ranks, -1, batch * room, width).transpose(0, 1).flatten(1, 2)
        back = (self.inner(come) @ self.down).unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()
        slots = self._exchange(back).view(self.experts, batch, -1, width).transpose(0, 1).flatten(1, 2)
        out = F.pad(slots, (0, 0, 0, 1)).gather(1, slot) * weight[..., None]
        return out.unflatten(1, (seq, self.top)).sum(2)

    def _route(self, x: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token and choice [batch, seq * top]: the router's probability, and the place among the ``experts *
        room`` of its sequence, the one behind these where the expert has no room.
        """
        weight, chosen = (t.flatten(1) for t in self.router(x).softmax(-1).topk(self.top))
        picked = (chosen[..., None] == torch.arange(self.experts, device=x.device)).long()
        before = (picked.cumsum(1) * picked).sum(-1) - 1  # tokens of the sequence that chose the same
        return weight, torch.where(before < room, chosen * room + before, self.experts * room)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _AllToAll.apply(x, self.group) if self.group else x
        return moved
