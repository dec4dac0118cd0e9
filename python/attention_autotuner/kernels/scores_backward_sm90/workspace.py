"""Device memory of a backward candidate of family ``sm90`` beside its tensors: the twin of its ``Workspace``."""

from __future__ import annotations

from ...arch.h100 import H100_SPEC
from ...core.candidate import Candidate
from ...core.problem import Problem
from ..shared.workspace import count_head_splits, lse_delta_bytes, shared_gradient_bytes
from .knobs import knobs_of

ENOUGH_CTAS = H100_SPEC.num_sms  # CTAs are persistent, one a SM


def workspace_bytes(problem: Problem, candidate: Candidate) -> int:
    """Bytes of LSE and delta, and of partial dK and dV."""
    splits = count_head_splits(problem, knobs_of(candidate).dk.block_rows, ENOUGH_CTAS)
    return lse_delta_bytes(problem) + shared_gradient_bytes(problem, splits)
