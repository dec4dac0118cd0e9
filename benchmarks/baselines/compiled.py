"""FlexAttention through ``torch.compile``, and retention with an explicit mask: as written down, and compiled."""

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


class Flex(Baseline):
    """FlexAttention."""

    name = "flex"
    title = "FlexAttention (torch.compile)"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; compiled for one shape."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if problem.causal:
            offset = problem.causal_offset

            def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
                return key <= row + offset

            mask = create_block_mask(
                visible, None, None, problem.seqlen_q, problem.seqlen_k, device="cuda"
            )
        torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
        compiled = torch.compile(flex_attention, dynamic=False)
        grouped = problem.heads_q != problem.heads_kv

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

        return run

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for every problem, into the cache that torch keeps on disk."""
        compiled = partial(compile_ahead, self, backward="step")
        in_processes(compiled, [(problem,) for problem in problems], processes, shares=True)
