"""Whom we are compared with: functions of q, k, v by name. A later operation adds its own list here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner.codegen.problem import Problem

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another implementation.

    Attributes:
        name: in results and on the command line.
        title: in tables.
        make: the function for a problem; what it compiles, it compiles on its first call.
        refusal: why it cannot compute a problem the way we do, or an empty string.
    """

    name: str
    title: str
    make: Callable[[Problem], Function]
    refusal: Callable[[Problem], str]


def _sdpa(backend: SDPBackend) -> Callable[[Problem], Function]:
    def make(problem: Problem) -> Function:
        grouped = problem.heads_q != problem.heads_kv

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=problem.causal, enable_gqa=grouped
                )

        return run

    return make


def _other_diagonal(problem: Problem) -> str:
    """SDPA's own causal mask starts at the top left."""
    if problem.causal and problem.causal_offset != 0:
        return "its causal mask is aligned top-left"
    return ""


def _make_flex(problem: Problem) -> Function:
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


ATTENTION_FORWARD: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="sdpa_flash",
            title="FlashAttention-2 (torch SDPA)",
            make=_sdpa(SDPBackend.FLASH_ATTENTION),
            refusal=_other_diagonal,
        ),
        Peer(
            name="sdpa_cudnn",
            title="cuDNN (torch SDPA)",
            make=_sdpa(SDPBackend.CUDNN_ATTENTION),
            refusal=_other_diagonal,
        ),
        Peer(
            name="flex",
            title="FlexAttention (torch.compile)",
            make=_make_flex,
            refusal=lambda problem: "",
        ),
    )
}
PEERS: dict[str, dict[str, Peer]] = {"attention_forward": ATTENTION_FORWARD}
"""Benchmark -> peer by name."""
