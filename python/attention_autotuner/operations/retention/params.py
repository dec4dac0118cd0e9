"""The params that kernels of retention are launched with."""

from __future__ import annotations

from ...core.problem import Problem


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The scalars of both directions beside sizes and head dims.

    Args:
        problem: gives them.
        scale: the factor of Q K^T.
    """
    return {"seqlen": problem.seqlen_q, "scale": scale, "total": problem.packed_rows[0]}
