"""Masks as RetNet has them, for problems with an explicit mask."""

from __future__ import annotations

import math

import torch

from attention_autotuner.codegen.problem import Problem
from attention_autotuner.tuning.measure import InProcessMeasurer
from attention_autotuner.tuning.tensors import Inputs


def decay_mask(
    heads: int, seqlen_q: int, seqlen_k: int, *, causal: bool, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Powers of each head's decay by the distance of key and query, rows over the square root of their sum.

    Args:
        heads: head h decays by ``1 - 2^(-5 - h)``.
        seqlen_q: rows; the last one stands at the last column.
        seqlen_k: columns.
        causal: later keys count nothing; otherwise as much as earlier ones.
        device: where.

    Returns:
        ``[heads, seqlen_q, seqlen_k]``, fp32.
    """
    rows = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=device)[:, None]
    ahead = torch.arange(seqlen_k, device=device) - rows
    distance = ahead.abs().float()
    mask = torch.empty(heads, seqlen_q, seqlen_k, device=device)
    for head in range(heads):
        log2_gamma = math.log1p(-(2.0 ** (-5 - head))) / math.log(2.0)
        torch.exp2(distance * log2_gamma, out=mask[head])
        if causal:
            mask[head].masked_fill_(ahead > 0, 0.0)
        mask[head] /= mask[head].sum(-1, keepdim=True).sqrt()
    return mask


def realistic(problem: Problem, inputs: Inputs) -> Inputs:
    """The inputs, with the values of a RetNet's mask written into theirs where they have one."""
    mask = inputs.tensors.get("mask")
    if mask is not None:
        heads, seqlen_q, seqlen_k = mask.shape
        mask.copy_(decay_mask(heads, seqlen_q, seqlen_k, causal=problem.causal, device=mask.device))
    return inputs


class RealisticMeasurer(InProcessMeasurer):
    """Measures on a RetNet's masks where a problem has a mask."""

    def _inputs(self, problem: Problem) -> list[Inputs]:
        return [realistic(problem, each) for each in super()._inputs(problem)]
