"""Masks of retention: decays to both sides as RetNet normalises them, or any values."""

from __future__ import annotations

import math

import torch

from ...core.problem import Problem
from ..shared.binding import COPY_ELEMENTS, TORCH_DTYPES
from ..shared.gammas import gammas_of, log2_gammas

MEAN_MAGNITUDE = math.sqrt(2 / math.pi)  # of a normal number
MEDIAN_SUM = 2.0  # of rows of |X|: above r's lower limit, below the upper one of the bindings
OCTAVES = 4.0  # that the sums of rows span around it
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples modulo 1 are spread evenly over any stretch of rows


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


def spread_sums(problem: Problem, mask: torch.Tensor) -> torch.Tensor:
    """A mask with its rows rescaled in place, so that row sums of ``|X|`` fall on both sides of either limit of r.

    Sums concentrate: without this all rows of a problem lie beyond the same limit. Scores are taken as normal with
    deviation 1. A quarter of the rows ends below 1 and a quarter above 4, evenly over the sequence.

    Args:
        problem: gives the causal mask.
        mask: ``[heads, seqlen_q, seqlen_k]``; hidden values are scaled with their row.
    """
    rows = torch.arange(problem.seqlen_q, device=mask.device)
    octave = OCTAVES * ((rows * GOLDEN) % 1.0 - 0.5)
    wanted = MEDIAN_SUM * octave.exp2()[:, None]
    keys = torch.arange(problem.seqlen_k, device=mask.device)
    hidden = keys > rows[:, None] + problem.causal_offset
    for of_head in mask:
        values = of_head.float()
        seen = values.masked_fill(hidden, 0.0) if problem.causal else values
        sums = MEAN_MAGNITUDE * seen.abs().sum(-1, keepdim=True)
        factor = torch.where(sums > 0, wanted / sums, 1.0)
        of_head.copy_(values * factor)
    return mask
