"""Our kernel without the score modifications of a problem, whose cost its comparison shows."""

from __future__ import annotations

from typing import Any

import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.core.modifications import MODIFICATIONS
from attention_autotuner.core.problem import Problem

from ..calls import Function
from .base import Baseline


class Plain(Baseline):
    """Our function, called without modifications."""

    name = "plain"
    title = "ours without score modifications"
    called = True
    modifications = frozenset(MODIFICATIONS)

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> Any:
            return flash_attn_func(q, k, v, causal=problem.causal)

        return run

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return "" if problem.compiled_modifications else "the problem has no score modifications"
