"""A copy within the device memory: what it takes bounds what few queries on long keys take."""

from __future__ import annotations

import torch

from attention_autotuner.core.problem import Problem

from ..calls import Function
from .base import Baseline

KEYS_OF_A_QUERY = 64  # at least, for the time to be that of reading keys and values


def few_queries(problem: Problem) -> str:
    """The reason against problems that more bounds than the memory."""
    long = problem.seqlen_k >= KEYS_OF_A_QUERY * problem.seqlen_q
    return "" if long and problem.direction == "forward" else "memory is not all that bounds it"


class Copy(Baseline):
    """Half of the bytes of keys and values, read and written."""

    name = "copy"
    title = "copy of as many bytes"
    gradients = "-"
    same = False
    modifications = frozenset({"packed"})
    limits = (few_queries,)

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; it computes nothing."""

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_ends: torch.Tensor
        ) -> torch.Tensor:
            longer = max(k, v, key=torch.numel)
            return longer.view(-1)[: (k.numel() + v.numel()) // 2].clone()

        return run
