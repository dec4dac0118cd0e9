"""A small GPT of today's make: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from .attentions import Attention
from .data import VOCABULARY

ROTARY_BASE = 10_000.0
INITIAL_DEVIATION = 0.02


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
        for name in ("layers", "dim", "heads_q", "heads_kv", "hidden", "seqlen", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (8 * self.heads_q):
            raise ValueError(f"dim must be a multiple of 8 heads_q, got {self.dim}, {self.heads_q}")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q must be a multiple of heads_kv, got {self.heads_q} and {self.heads_kv}"
            )

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.dim // self.heads_q


class Rotary(nn.Module):
    """Turns pairs of dimensions by an angle that grows with the position."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, seqlen: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(seqlen), frequencies)[:, None]  # [seqlen, 1 head, pairs]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Turn ``[batch, seqlen, heads, head_dim]``; computed in fp32, given back in its own dtype."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: GPTConfig, attention: Attention, rotary: Rotary) -> None:
        super().__init__()
        self.heads = (config.heads_q, config.heads_kv, config.heads_kv)
        self.head_dim = config.head_dim
        self.attention = attention
        self.rotary = rotary
        self.to_qkv = nn.Linear(config.dim, sum(self.heads) * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From ``[batch, seqlen, dim]`` to the same."""
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))  # [batch, seqlen, heads, head_dim]
        q, k, v = qkv.split(self.heads, dim=2)
        q, k = self.rotary(q), self.rotary(k)
        # Transposed views: attention reads them where they lie, and its output lies as q does.
        o = self.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # a module's


class FeedForward(nn.Module):
    """SwiGLU: one half of the hidden units gates the other."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From ``[batch, seqlen, dim]`` to the same."""
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.out(functional.silu(gate) * up)  # type: ignore[no-any-return]  # a module's


class Block(nn.Module):
    """Attention, then feed-forward, each beside the residual stream."""

    def __init__(self, config: GPTConfig, attention: Attention, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = SelfAttention(config, attention, rotary)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From ``[batch, seqlen, dim]`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The model; everything but the attention function follows from the config and torch's seed."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        rotary = Rotary(config.head_dim, config.seqlen)
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention, rotary) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the residual stream starts smaller, so that its variance does not grow with depth.
                shrink = math.sqrt(2 * layers) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION / shrink)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next token, nats a token, fp32; both are int64 ``[batch, seqlen]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
