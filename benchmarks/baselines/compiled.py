"""FlexAttention through ``torch.compile``, and retention with an explicit mask: as written down, and compiled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attention_autotuner.core.problem import NO_WINDOW, Problem
from attention_autotuner.operations.attention.modified_inputs import SOFTCAP

from ..calls import Function, others_of, scale_of
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
    modifications = frozenset({"window", "softcap", "alibi_slopes", "bias_table"})

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; compiled for one shape."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        windowed = problem.window_size != NO_WINDOW
        offset, (left, right) = problem.causal_offset, problem.window
        if problem.causal or windowed:

            def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
                seen = key <= row + offset + right
                return seen & (key >= row + offset - left) if windowed else seen

            mask = create_block_mask(
                visible, None, None, problem.seqlen_q, problem.seqlen_k, device="cuda"
            )
        torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
        grouped, capped = problem.heads_q != problem.heads_kv, "softcap" in problem.modifications
        end, names = problem.seqlen_k - problem.seqlen_q, others_of(problem)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> Any:
            def bend(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
                if capped:
                    score = SOFTCAP * torch.tanh(score / SOFTCAP)
                for name, values in zip(names, others, strict=True):
                    if name == "bias_table":
                        most = values.shape[1] // 2
                        score = score + values[head, (key - row - end).clamp(-most, most) + most]
                    else:
                        slope = values[batch, head] if values.dim() == 2 else values[head]
                        score = score - slope * torch.abs(row + end - key)
                return score

            score_mod = bend if capped or others else None
            return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)

        function: Function = torch.compile(run, dynamic=False)
        return function

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for every problem, into the cache that torch keeps on disk."""
        compiled = partial(compile_ahead, self, backward="step")
        in_processes(compiled, [(problem,) for problem in problems], processes, shares=True)
