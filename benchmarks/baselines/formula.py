"""Retention with an explicit mask as one would write it down: eagerly, and through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attention_autotuner.core.problem import Problem

from ..calls import Function, scale_of
from .base import Baseline
from .compile_ahead import compile_ahead, in_processes


def formula(scale: float) -> Function:
    """Retention with an explicit mask and its normaliser."""

    def retnet(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        x = (q @ k.transpose(-1, -2) * scale) * mask
        r = x.abs().sum(-1, keepdim=True).clamp(min=1).detach()
        return (x / r) @ v

    return retnet


class Eager(Baseline):
    """The formula as it stands."""

    name = "eager"
    title = "the formula in eager PyTorch"
    op = "retnet"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`."""
        return formula(scale_of(problem))

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        if problem.mask != "explicit":
            return "it takes its mask as a tensor"
        return "it repeats no heads" if problem.heads_q != problem.heads_kv else ""


class Compiled(Eager):
    """The formula through ``torch.compile``."""

    name = "compiled"
    title = "the formula through torch.compile"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; compiled for one shape."""
        torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
        function: Function = torch.compile(formula(scale_of(problem)), dynamic=False)
        return function

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for every problem, into the cache that torch keeps on disk."""
        compiled = partial(compile_ahead, self, backward="backward")
        in_processes(compiled, [(problem,) for problem in problems], processes)
