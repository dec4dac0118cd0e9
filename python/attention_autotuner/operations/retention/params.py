"""The params that kernels of retention are launched with."""

from __future__ import annotations

import ctypes

from ...core.abi import RetentionBackwardParams, RetentionForwardParams
from ...core.problem import Direction, Problem

STRUCTS: dict[Direction, type[ctypes.Structure]] = {
    "forward": RetentionForwardParams,
    "backward": RetentionBackwardParams,
}
"""Direction -> the struct of the ABI."""


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The scalars of both directions beside sizes and head dims.

    Args:
        problem: gives them.
        scale: the factor of Q K^T.
    """
    return {"seqlen": problem.seqlen_q, "scale": scale}
