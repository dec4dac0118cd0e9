"""The params that kernels of retnet are launched with."""

from __future__ import annotations

from math import inf

from ...core.problem import Problem


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The scalars of both directions beside sizes and head dims: normalised, no upper limit, r a constant of gradients.

    Args:
        problem: gives them.
        scale: the factor of Q K^T.
    """
    return {
        "causal": int(problem.causal),
        "causal_offset": problem.causal_offset,
        "scale": scale,
        "normalize": 1,
        "r_clamp_max": inf,
        "r_grad": 0,
    }
