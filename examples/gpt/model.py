"""A small GPT of today's make: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from ..shared.data import VOCABULARY
from ..shared.training import initialise, turn
from .attentions import Attention

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        layers: blocks of attention and feed-forward.
        dim: width of the residual stream; ``dim / heads_q`` is the head dim, a multiple of 8.
        heads_q, heads_kv: query heads, and the key and value heads that they share in groups.
        hidden: width of the feed-forward.
        seqlen: the longest sequence.
        vocabulary: number of tokens.
    """

    layers: int = 6
    dim: int = 512
    heads_q: int = 8
    heads_kv: int = 2
    hidden: int = 1408
    seqlen: int = 1024
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.dim % (8 * self.heads_q):
            raise ValueError(f"dim must be a multiple of 8 heads_q, got {self.dim}, {self.heads_q}")
        if self.heads_q % self.heads_kv:
            sizes = f"{self.heads_q} and {self.heads_kv}"
            raise ValueError(f"heads_q must be a multiple of heads_kv, got {sizes}")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.dim // self.heads_q


class SelfAttention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.heads = (config.heads_q, config.heads_kv, config.heads_kv)
        self.head_dim, self.attention = config.head_dim, attention
        self.to_qkv = nn.Linear(config.dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """From ``[batch, seqlen, dim]`` to the same."""
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # [batch, seqlen, heads, head_dim]
        q, k, v = qkv.split(self.heads, dim=2)
        q, k = turn(q, rotation), turn(k, rotation)
        # Transposed views: attention reads them where they lie, and its output lies as q does.
        o = self.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a module's


class Block(nn.Module):
    """Attention, then SwiGLU, whose one half of the hidden units gates the other; both beside the residual stream."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = SelfAttention(config, attention)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.gate_and_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """From ``[batch, seqlen, dim]`` to the same."""
        x = x + self.attention(self.attention_norm(x), rotation)
        gate, up = self.gate_and_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.out(functional.silu(gate) * up)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The model; everything but the attention function follows from the config and torch's seed."""

    rotation: torch.Tensor

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.seqlen), frequencies)[:, None]  # a head, its pairs
        self.register_buffer(
            "rotation", torch.stack((angles.cos(), angles.sin())), persistent=False
        )
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        initialise(self, config.layers)

    def with_attention(self, attention: Attention) -> GPT:
        """A copy that is the same but for its attention function."""
        model = deepcopy(self)
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.attention = attention
        return model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next token, nats a token, fp32; both are int64 ``[batch, seqlen]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation[:, : tokens.shape[1]])
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
