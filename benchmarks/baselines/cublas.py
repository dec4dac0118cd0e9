"""The product of two matrices by cuBLAS, as PyTorch calls it."""

from __future__ import annotations

import torch

from attention_autotuner.core.problem import Problem

from ..calls import Function, matrices
from .base import Baseline


class Cublas(Baseline):
    """``torch.mm``."""

    name = "cublas"
    title = "cuBLAS (torch.mm)"
    op = "gemm"
    gradients = "-"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(*matrices(problem, a, b))[None, None]

        return run
