"""FlexAttention through ``torch.compile``, and retention with an explicit mask: as written down, and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from attention_autotuner.core.problem import NO_WINDOW, Problem
from attention_autotuner.operations.attention.modified_inputs import SOFTCAP

from ..calls import Function, others_of, scale_of
from .base import Baseline
from .compile_ahead import compile_ahead, in_processes
from .flash_attn import FlashAttention4

BENDING = {"softcap", "alibi_slopes", "bias_table"}  # what changes scores; the others mask them


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
    mode = "default"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; compiled for one shape."""
        torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
        made = formula(scale_of(problem))
        function: Function = torch.compile(made, dynamic=False, mode=self.mode)
        return function

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for every problem, into the cache that torch keeps on disk."""
        keeps_graphs = self.mode == "default"  # those of others hold choices
        compiled = partial(compile_ahead, self, backward="backward", keeps_graphs=keeps_graphs)
        in_processes(compiled, [(problem,) for problem in problems], processes)


class CompiledAutotuned(Compiled):
    """The same with matrix products by Triton, chosen by timing, and what follows them fused into them."""

    name = "compiled_autotuned"
    title = "the formula through torch.compile, max-autotune"
    mode = "max-autotune-no-cudagraphs"


class Flex(Baseline):
    """FlexAttention, by Triton's kernels."""

    name = "flex"
    title = "FlexAttention (torch.compile)"
    modifications = frozenset(
        {"window", "softcap", "alibi_slopes", "bias_table", "prefix_lens", "document_ids"}
    )
    backend = "TRITON"

    def function(self, problem: Problem) -> Function:
        """See :meth:`Baseline.function`; compiled for one shape."""
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # or the shapes before this one count against the recompile limit
        grouped, bent = problem.heads_q != problem.heads_kv, {*problem.modifications} & BENDING
        options = {"BACKEND": self.backend}

        def run(q: Any, k: Any, v: Any, mask: Any, named: Mapping[str, torch.Tensor]) -> Any:
            bend = score_mod(problem, named) if bent else None
            return flex_attention(
                q, k, v, bend, mask, enable_gqa=grouped, kernel_options=cast("Any", options)
            )

        compiled = torch.compile(run, dynamic=False)
        masks: list[Any] = []

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> Any:
            named = dict(zip(others_of(problem), others, strict=True))
            if not masks:  # documents and prefixes are the same in all inputs of a race
                masks.append(block_mask(problem, named, q.device))
            scored = {name: x for name, x in named.items() if name in BENDING}
            return compiled(q, k, v, masks[0], scored)

        return call

    def get_ready(self, problems: Sequence[Problem], processes: int) -> None:
        """Compile for every problem, into the cache that torch keeps on disk."""
        compiled = partial(compile_ahead, self, backward="step")
        in_processes(compiled, [(problem,) for problem in problems], processes, shares=True)


class FlexFlash(Flex):
    """FlexAttention, by kernels of flash-attn 4, where torch takes these for the case."""

    name = "flex_flash"
    title = "FlexAttention (flash-attn 4)"
    backend = "FLASH"

    def limit(self, problem: Problem) -> str:
        """See :meth:`Baseline.limit`."""
        return FlashAttention4().absence()


def score_mod(problem: Problem, named: Mapping[str, torch.Tensor]) -> Function:
    """FlexAttention's function of a score, with the tensors of modifications by name."""
    modifications, end = problem.modifications, problem.seqlen_k - problem.seqlen_q

    def bend(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
        if "softcap" in modifications:
            score = SOFTCAP * torch.tanh(score / SOFTCAP)
        if "alibi_slopes" in modifications:
            slopes = named["alibi_slopes"]
            slope = slopes[batch, head] if slopes.dim() == 2 else slopes[head]
            score = score - slope * torch.abs(row + end - key)
        if "bias_table" in modifications:
            table = named["bias_table"]
            farthest = table.shape[1] // 2
            score = score + table[head, (key - row - end).clamp(-farthest, farthest) + farthest]
        return score

    return bend


def block_mask(problem: Problem, named: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """FlexAttention's mask of a problem, or None where every row sees every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    windowed = problem.window_size != NO_WINDOW
    prefixes, ids = named.get("prefix_lens"), named.get("document_ids")
    if not (problem.causal or windowed or ids is not None):
        return None
    offset, (left, right) = problem.causal_offset, problem.window

    def visible(batch: Any, head: Any, row: Any, key: Any) -> Any:
        seen = key <= row + offset + right
        if prefixes is not None:
            seen = seen | (key < prefixes[batch])
        if windowed:
            seen = seen & (key >= row + offset - left)
        if ids is not None:
            seen = seen & (ids[batch, row] == ids[batch, key])
        return seen

    batch = problem.batch if prefixes is not None or ids is not None else None
    return create_block_mask(visible, batch, None, problem.seqlen_q, problem.seqlen_k, device)
