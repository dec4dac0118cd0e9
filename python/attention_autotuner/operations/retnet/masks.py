"""Masks of retention: decays to both sides as RetNet normalises them, or any values."""

from __future__ import annotations

import torch

from ...core.problem import Problem
from ..shared.binding import COPY_ELEMENTS, TORCH_DTYPES
from ..shared.gammas import gammas_of, log2_gammas


def stored_mask(problem: Problem, heads: int, device: torch.device) -> torch.Tensor:
    """Memory of a mask, full of NaN, ``[heads, seqlen_q, seqlen_k]``.

    Its rows begin as the problem's alignment says: at 16 bytes, with NaN between one row and the next, or off them.
    """
    if problem.alignment_bytes == 16:
        width, offset = -(-problem.seqlen_k // COPY_ELEMENTS) * COPY_ELEMENTS, 0
    else:
        width, offset = problem.seqlen_k | 1, 1
    flat = torch.full(
        (heads * problem.seqlen_q * width + offset,),
        float("nan"),
        dtype=TORCH_DTYPES[problem.dtype],
        device=device,
    )
    return flat[offset:].view(heads, problem.seqlen_q, width)[..., : problem.seqlen_k]


def decaying_mask(problem: Problem, device: torch.device) -> torch.Tensor:
    """A mask as RetNet has it: gamma to the distance, each row over the root of its sum; both ways unless causal."""
    mask = stored_mask(problem, problem.heads_q, device)
    gammas = gammas_of(log2_gammas(problem.heads_q, device)).float()
    rows = torch.arange(problem.seqlen_q, device=device)[:, None] + problem.causal_offset
    distance = (rows - torch.arange(problem.seqlen_k, device=device)).float()
    for head, gamma in enumerate(gammas):
        values = gamma ** distance.abs()
        if problem.causal:
            values = values.masked_fill(distance < 0, 0.0)
        mask[head] = values / values.sum(-1, keepdim=True).clamp(min=1.0).sqrt()
    return mask


def random_mask(problem: Problem, heads: int, seed: int, device: torch.device) -> torch.Tensor:
    """Normal values everywhere, also where the causal promise says that nobody looks."""
    mask = stored_mask(problem, heads, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return mask.copy_(torch.randn(mask.shape, device=device, generator=generator))
