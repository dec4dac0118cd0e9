"""The cost of a score modification in a kernel over blocks of rows, in place of the softmax."""

from __future__ import annotations

from dataclasses import replace

from ...core.problem import Problem
from .coefficients import Coefficients
from .kernel_cost import KernelWork
from .tile_costs import ELEMENT_BYTES


def with_score_mod(work: KernelWork, problem: Problem, fit: Coefficients) -> KernelWork:
    """A kernel's work with the score modification of its problem: attention's softmax, a mask or a decay.

    CTAs of the batch that share a part of an explicit mask run together, so that it comes from device memory once.
    """
    if problem.score == "softmax":
        return work
    counts = work.counts
    if problem.score == "decayed":
        exponentials, alu_share = fit.score_decayed_exponentials, fit.score_decayed_alu_share
        return replace(work, counts=replace(counts, exponentials=exponentials, alu_share=alu_share))
    masked = replace(
        counts,
        exponentials=0.0,
        alu_share=fit.score_masked_alu_share,
        mask_bytes=counts.scores * ELEMENT_BYTES,
    )
    once_bytes = work.once_bytes + mask_bytes(problem)
    return replace(work, counts=masked, batches=problem.batch, once_bytes=once_bytes)


def mask_bytes(problem: Problem) -> int:
    """Bytes of an explicit mask that a kernel reads: that of every head, half of it when causal."""
    whole = ELEMENT_BYTES * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return whole // 2 if problem.causal else whole
