"""A small RetNet over bytes, which can go on from the state in which it left a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from attention_autotuner import retention_func

from ..gpt.data import VOCABULARY
from .retention import MultiScaleRetention, Retention

INITIAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class RetNetConfig:
    """Sizes of the model.

    Attributes:
        layers: blocks of retention and feed-forward.
        dim: width of the residual stream; ``dim / heads`` is dim_qk, and dim_v is twice that.
        heads: of each layer.
        hidden: width of the feed-forward.
        train_decay: whether each head's gamma is trained.
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
    """All that the model keeps of a text, however long it is.

    Attributes:
        position: tokens so far, an int64 tensor without dimensions, on the device so that CUDA graphs can count.
        layers: ``[batch, heads, dim_qk, dim_v]`` in fp32 of each layer.
    """

    position: torch.Tensor
    layers: list[torch.Tensor]

    def clone(self) -> TextState:
        """A copy that goes its own way."""
        return TextState(
            position=self.position.clone(), layers=[state.clone() for state in self.layers]
        )

    def copy_(self, other: TextState) -> None:
        """Go back, or on, to another state, in the memory of this one."""
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

    def forward(
        self,
        x: torch.Tensor,
        *,
        form: str,
        position: torch.Tensor,
        state: torch.Tensor | None,
        return_state: bool,
        inplace_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From ``[batch, seqlen, dim]`` to the same, with states as :class:`MultiScaleRetention`."""
        retained, state = self.retention(
            self.retention_norm(x),
            form=form,
            position=position,
            state=state,
            return_state=return_state,
            inplace_state=inplace_state,
        )
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
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the residual stream starts smaller, so that its variance does not grow with depth.
                shrink = math.sqrt(2 * config.layers) if name.endswith("out.weight") else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION / shrink)

    def use(self, retention: Retention) -> None:
        """Compute retention by another op from now on."""
        for module in self.modules():
            if isinstance(module, MultiScaleRetention):
                module.retention = retention

    def forward(self, tokens: torch.Tensor, *, form: str = "auto") -> torch.Tensor:
        """Logits of whole texts, as in training: fp32 ``[batch, seqlen, vocabulary]`` of int64 ``[batch, seqlen]``."""
        position = torch.zeros((), dtype=torch.int64, device=tokens.device)
        logits, _ = self._run(tokens, position, None, form, return_state=False, inplace_state=False)
        return logits

    def read(
        self, tokens: torch.Tensor, state: TextState | None = None, *, form: str = "auto"
    ) -> tuple[torch.Tensor, TextState]:
        """Read tokens, from the start or going on, and remember.

        Args:
            tokens: int64 ``[batch, seqlen]``.
            state: where an earlier call ended; it is left as it was.
            form: of retention.

        Returns:
            The logits, fp32 ``[batch, seqlen, vocabulary]``, and the state after the last token.
        """
        if state is None:
            position, layers = torch.zeros((), dtype=torch.int64, device=tokens.device), None
        else:
            position, layers = state.position, state.layers
        logits, states = self._run(
            tokens, position, layers, form, return_state=True, inplace_state=False
        )
        return logits, TextState(position=position + tokens.shape[1], layers=states)

    def step(self, tokens: torch.Tensor, state: TextState) -> torch.Tensor:
        """Read one token of each text by the recurrent form, changing the state in its own memory.

        Args:
            tokens: int64 ``[batch, 1]``.
            state: as :meth:`read` left it.

        Returns:
            The logits of the next token, fp32 ``[batch, 1, vocabulary]``.
        """
        logits, _ = self._run(
            tokens, state.position, state.layers, "recurrent", return_state=True, inplace_state=True
        )
        state.position.add_(tokens.shape[1])
        return logits

    def _run(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        states: list[torch.Tensor] | None,
        form: str,
        *,
        return_state: bool,
        inplace_state: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, left = self.embedding(tokens), []
        for number, block in enumerate(self.blocks):
            x, state = block(
                x,
                form=form,
                position=position,
                state=None if states is None else states[number],
                return_state=return_state,
                inplace_state=inplace_state,
            )
            left.append(state)
        return self.head(self.norm(x)).float(), left
