"""Decays that kernels are checked with: the usual ones, and those at the edges of what float arithmetic can do."""

from __future__ import annotations

import torch

from ..retention.reference import default_log2_gamma

EDGES = (1.0, 1.0 - 2.0**-12, 0.97, 0.5, 1e-3)


def log2_gammas(heads: int, device: torch.device, edge: int | None = None) -> torch.Tensor:
    """The logarithm of every head's decay: fp32 ``[heads]``, as kernels read it.

    Args:
        heads: how many.
        device: where.
        edge: which of :data:`EDGES` the first head has, the others those after it, round and round; None for the usual
            ``1 - 2^(-5-h)``.
    """
    if edge is None:
        return default_log2_gamma(heads).float().to(device)
    values = [EDGES[(head + edge) % len(EDGES)] for head in range(heads)]
    return torch.tensor(values, dtype=torch.float64).log2().float().to(device)


def gammas_of(log2_gamma: torch.Tensor) -> torch.Tensor:
    """The decays in fp64, as the reference takes them."""
    return log2_gamma.double().exp2()
