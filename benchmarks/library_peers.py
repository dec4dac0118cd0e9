"""Attention of torch and of the flash-attn packages as functions of q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner.core.problem import Problem

from .ahead import blank_inputs, in_shares
from .calls import Call, ForwardCall, Function, StepCall

FA2, FA3 = "flash_attn", "flash_attn_interface"  # the modules that the packages install
FA3_CAPABILITY = (9, 0)


def make_sdpa(backend: SDPBackend, *, lower_right: bool = False) -> Callable[[Problem], Function]:
    """Torch's SDPA held to one backend.

    Args:
        backend: the only one that may serve.
        lower_right: it takes a causal mask that ends at the bottom right, where queries and keys differ in number.
    """

    def make(problem: Problem) -> Function:
        grouped = problem.heads_q != problem.heads_kv
        bias = None
        if lower_right and problem.causal and problem.causal_offset != 0:
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
        causal = problem.causal and bias is None

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped
                )

        return run

    return make


def make_flex(problem: Problem) -> Function:
    """FlexAttention through ``torch.compile``, for one shape."""
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


def compile_flex_ahead(problems: Sequence[Problem], processes: int) -> None:
    """Compile FlexAttention for every problem at once, into the cache that torch keeps on disk."""
    in_shares(_compile_flex, problems, processes)


def _compile_flex(problem: Problem) -> None:
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = 1  # there are as many of these processes as cores
    kind: type[Call] = ForwardCall if problem.direction == "forward" else StepCall
    call = kind(name="ahead", function=make_flex(problem))
    call.prepare([blank_inputs(problem, "cuda")], [])


def fa2_absence() -> str:
    """Why flash-attn 2 cannot be timed here, or an empty string."""
    return "" if find_spec(FA2) is not None else "flash-attn 2 is not installed"


def fa2_function(problem: Problem) -> Function:
    """flash-attn 2's function of ``[batch, seqlen, heads, dim]``."""
    function = import_module(FA2).flash_attn_func
    causal = problem.causal
    return lambda q, k, v: function(q, k, v, causal=causal)


def fa3_absence() -> str:
    """Why flash-attn 3 cannot be timed here, or an empty string."""
    if find_spec(FA3) is None:
        return "flash-attn 3 is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != FA3_CAPABILITY:
        return "flash-attn 3 is for compute capability 9.0"
    return ""


def fa3_function(problem: Problem) -> Function:
    """flash-attn 3's function of ``[batch, seqlen, heads, dim]``; older ones answer the LSE beside the output."""
    function = import_module(FA3).flash_attn_func
    causal = problem.causal

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        found = function(q, k, v, causal=causal)
        return found[0] if isinstance(found, tuple) else found

    return run
