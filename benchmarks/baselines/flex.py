"""FlexAttention through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attention_autotuner.core.problem import Problem

from ..calls import Function
from .base import Baseline
from .compile_ahead import compile_ahead, in_shares


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
        in_shares(partial(compile_ahead, self, backward="step"), problems, processes)
