"""What retention's weights cost a kernel over blocks of rows, in place of the softmax."""

from __future__ import annotations

from dataclasses import replace

from ...core.problem import Problem
from .kernel_cost import KernelWork
from .tile_costs import ELEMENT_BYTES

# fp32 instructions for a score, over those of a softmax: the weight, the sum of magnitudes, the conversion; a decay is
# a product of two powers beside that.
MASK_ALU_SHARE = 0.7
DECAY_ALU_SHARE = 0.9
DECAY_EXPONENTIALS = 0.1  # for a score: powers are taken for rows and columns, and for each score of small gammas only


def weighted(work: KernelWork, problem: Problem) -> KernelWork:
    """A kernel's work with the weights of its problem: attention's own, a mask's or a decay's.

    CTAs of the batch that share a part of an explicit mask run together, so that it comes from device memory once.
    """
    if problem.score == "softmax":
        return work
    counts = work.counts
    if problem.score == "masked":
        return replace(
            work,
            counts=replace(
                counts,
                exponentials=0.0,
                alu_share=MASK_ALU_SHARE,
                mask_bytes=counts.scores * ELEMENT_BYTES,
            ),
            batches=problem.batch,
            once_bytes=work.once_bytes + mask_bytes(problem),
        )
    counts = replace(counts, exponentials=DECAY_EXPONENTIALS, alu_share=DECAY_ALU_SHARE)
    return replace(work, counts=counts)


def mask_bytes(problem: Problem) -> int:
    """Bytes of an explicit mask that a kernel reads: that of every head, half of it when causal."""
    whole = ELEMENT_BYTES * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    return whole // 2 if problem.causal else whole
