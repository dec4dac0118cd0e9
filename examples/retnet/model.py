"""A small RetNet over bytes, which can go on from the state in which it left a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from attention_autotuner import retention_func

from ..shared.data import VOCABULARY
from ..shared.training import initialise
from .retention import MultiScaleRetention, Retention


@dataclass(frozen=True, kw_only=True)
class RetNetConfig:
    """Sizes of the model.

    Attributes:
        layers: blocks of retention and feed-forward.
        dim: width of the residual stream; ``dim / heads`` is dim_qk, and dim_v is twice that.
        heads: of each layer.
        hidden: width of the feed-forward.
        train_decay: True to train each head's gamma.
        vocabulary: number of tokens.
    """

    layers: int = 4
    dim: int = 256
    heads: int = 4
    hidden: int = 512
    train_decay: bool = False
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (8 * self.heads):
            raise ValueError(f"dim must be a multiple of 8 heads, got {self.dim}, {self.heads}")


@dataclass(frozen=True, kw_only=True)
class TextState:
    """The model's memory of a text, of one size however long the text is.

    Attributes:
        position: tokens so far, an int64 tensor without dimensions, on the device so that CUDA graphs can count.
        layers: ``[batch, heads, dim_qk, dim_v]`` in fp32 of each layer.
    """

    position: torch.Tensor
    layers: list[torch.Tensor]

    def clone(self) -> TextState:
        """An independent copy."""
        return TextState(position=self.position.clone(), layers=[x.clone() for x in self.layers])

    def copy_(self, other: TextState) -> None:
        """Take another state's values, in the memory of this one."""
        self.position.copy_(other.position)
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.copy_(its)


class Block(nn.Module):
    """Retention, then feed-forward, each beside the residual stream."""

    def __init__(self, config: RetNetConfig, retention: Retention) -> None:
        super().__init__()
        self.retention_norm = nn.RMSNorm(config.dim)
        self.retention = MultiScaleRetention(
            config.dim, config.heads, train_decay=config.train_decay, retention=retention
        )
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From ``[batch, seqlen, dim]`` to the same, with options and states as :class:`MultiScaleRetention`."""
        retained, state = self.retention(self.retention_norm(x), **options)
        x = x + retained
        return x + self.out(functional.gelu(self.up(self.feed_forward_norm(x)))), state


class RetNet(nn.Module):
    """The model; everything but the retention op follows from the config and torch's seed."""

    def __init__(self, config: RetNetConfig, retention: Retention = retention_func) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, retention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        initialise(self, config.layers)

    def use(self, retention: Retention) -> None:
        """Compute retention by another op from now on."""
        for module in self.modules():
            if isinstance(module, MultiScaleRetention):
                module.retention = retention

    def forward(self, tokens: torch.Tensor, *, form: str = "auto") -> torch.Tensor:
        """Logits of whole texts, as in training: fp32 ``[batch, seqlen, vocabulary]`` of int64 ``[batch, seqlen]``."""
        return self._run(tokens, self._start(tokens), form=form)[0]

    def read(
        self, tokens: torch.Tensor, state: TextState | None = None, *, form: str = "auto"
    ) -> tuple[torch.Tensor, TextState]:
        """Read tokens, int64 ``[batch, seqlen]``, from the start or going on from a state, which stays as it was.

        Returns:
            The logits, fp32 ``[batch, seqlen, vocabulary]``, and the state after the last token.
        """
        before = state or self._start(tokens)
        logits, states = self._run(tokens, before, form=form, return_state=True)
        return logits, TextState(position=before.position + tokens.shape[1], layers=states)

    def step(self, tokens: torch.Tensor, state: TextState) -> torch.Tensor:
        """Read one token of each text, int64 ``[batch, 1]``, by the recurrent form, changing the state in its memory.

        Returns:
            The logits of the next token, fp32 ``[batch, 1, vocabulary]``.
        """
        options = {"form": "recurrent", "return_state": True, "inplace_state": True}
        logits, _ = self._run(tokens, state, **options)
        state.position.add_(tokens.shape[1])
        return logits

    def _start(self, tokens: torch.Tensor) -> TextState:
        """The state before a text; None stands for zeros."""
        position = torch.zeros((), dtype=torch.int64, device=tokens.device)
        return TextState(position=position, layers=[None] * len(self.blocks))  # type: ignore[list-item]

    def _run(
        self, tokens: torch.Tensor, before: TextState, **options: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, states = self.embedding(tokens), []
        for block, state in zip(self.blocks, before.layers, strict=True):
            x, after = block(x, position=before.position, state=state, **options)
            states.append(after)
        return self.head(self.norm(x)).float(), states
