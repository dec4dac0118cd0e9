"""The params that kernels of gemm are launched with."""

from __future__ import annotations

import ctypes

from ...core.abi import GemmForwardParams
from ...core.problem import Direction, Problem

STRUCTS: dict[Direction, type[ctypes.Structure]] = {"forward": GemmForwardParams}
"""Direction -> the struct of the ABI."""


def scalars(problem: Problem, scale: float) -> dict[str, float]:
    """The sizes of the matrices; there is no scale."""
    return {"m": problem.seqlen_q, "n": problem.dim_v, "k": problem.dim_qk}
