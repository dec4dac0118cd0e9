"""Text from a RetNet, one token a step: the cost of a step does not depend on how much came before."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .model import RetNet, TextState

WARM_UP_STEPS = 3


def with_rounded_weights(model: RetNet, dtype: torch.dtype) -> RetNet:
    """A copy whose linear layers hold 16-bit weights: autocast would round them at every step, this does it once."""
    rounded = copy.deepcopy(model).eval().requires_grad_(False)
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return rounded


class Decoder:
    """Greedy decoding of a batch of texts, eagerly or by replaying a CUDA graph.

    The tokens and the state stay where they are in memory, so a graph of one step serves every step; nothing is read
    back to the host until the end.
    """

    def __init__(
        self, model: RetNet, state: TextState, first: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Start after a prompt.

        Args:
            model: as :func:`with_rounded_weights` made it.
            state: after the prompt; copied.
            first: the token that follows the prompt, int64 ``[batch, 1]``; copied.
            dtype: fp16 or bf16, of matrix products and retention.
        """
        self._model, self._dtype = model, dtype
        self._state, self._tokens = state.clone(), first.clone()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the waiting tokens and choose the next.

        Returns:
            The tokens chosen, ``[batch, 1]``, and the logits they were chosen by, ``[batch, 1, vocabulary]``; a later
            step may overwrite both.
        """
        if self._graph is None:
            self._logits = self._advance()
        else:
            self._graph.replay()
        return self._tokens, self._logits

    def capture(self) -> None:
        """Record a step, so that :meth:`step` only replays it; the state stays as it was."""
        state, tokens = self._state.clone(), self._tokens.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):  # the first builds and loads what is missing
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._advance()
        self._graph = graph
        self._state.copy_(state)
        self._tokens.copy_(tokens)

    def run(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` steps: tokens ``[batch, count]`` and logits ``[batch, count, vocabulary]``."""
        steps = [[x.clone() for x in self.step()] for _ in range(count)]
        tokens, logits = (torch.cat(tensors, dim=1) for tensors in zip(*steps, strict=True))
        return tokens, logits

    @torch.no_grad()
    def _advance(self) -> torch.Tensor:
        # Casts that autocast keeps would outlive the capture.
        with torch.autocast(self._tokens.device.type, self._dtype, cache_enabled=False):
            logits = self._model.step(self._tokens, self._state)
        self._tokens.copy_(logits.argmax(-1))
        return logits
