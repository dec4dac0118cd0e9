"""The params that kernels of gemm are launched with."""

from __future__ import annotations

from ...core.problem import Problem


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The sizes of the matrices; there is no scale."""
    return {"m": problem.seqlen_q, "n": problem.dim_v, "k": problem.dim_qk}
