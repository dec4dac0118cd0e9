"""The params that kernels of attention are launched with."""

from __future__ import annotations

from ...core.problem import Problem


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The scalars of both directions beside sizes and head dims.

    Args:
        problem: gives them.
        scale: the factor of Q K^T.
    """
    return {
        "causal": int(problem.causal),
        "causal_offset": problem.causal_offset,
        "softmax_scale": scale,
        "window_left": problem.window_size[0],
        "window_right": problem.window_size[1],
        "causal_from_end": int(
            (problem.key_bounds or problem.packed) and problem.causal_alignment == "bottom_right"
        ),
        "total_q": problem.packed_rows[0],
        "total_k": problem.packed_rows[1],
    }
