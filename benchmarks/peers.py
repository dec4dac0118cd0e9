"""Whom we are compared with, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_autotuner.codegen.problem import Problem
from attention_autotuner.tuning.measure import CallableEntry, Entry

from .calls import StepCall
from .gradients import CUDNN, FLASH, FusedBackwardEntry, FusedOps
from .peer import Peer
from .retention_peers import RETENTION, RETNET
from .rivals import AUTOGRAD, STEP

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
AUTOGRAD_SEQLEN = 2048  # through autograd, one length of each row of a grid is timed


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


def _grouped_heads(problem: Problem) -> str:
    """The operators below SDPA repeat no heads."""
    if problem.heads_q != problem.heads_kv:
        return "called below SDPA, it takes as many heads of k and v as of q"
    return _other_diagonal(problem)


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


def _function(name: str, make: Callable[[Problem], Function]) -> Callable[[Problem], Entry]:
    return lambda problem: CallableEntry(name=name, function=make(problem))


def _fused(name: str, ops: FusedOps, *, step: bool) -> Callable[[Problem], Entry]:
    return lambda problem: FusedBackwardEntry(name=name, ops=ops, causal=problem.causal, step=step)


def _autograd(name: str, backend: SDPBackend) -> Callable[[Problem], Entry]:
    return lambda problem: StepCall(name=name, function=_sdpa(backend)(problem))


def _by_name(*peers: Peer) -> dict[str, Peer]:
    return {peer.name: peer for peer in peers}


FLASH_TITLE, CUDNN_TITLE = "FlashAttention-2 (torch SDPA)", "cuDNN (torch SDPA)"
ATTENTION_FORWARD = _by_name(
    Peer(
        name="sdpa_flash",
        title=FLASH_TITLE,
        entry=_function("sdpa_flash", _sdpa(SDPBackend.FLASH_ATTENTION)),
        refusal=_other_diagonal,
    ),
    Peer(
        name="sdpa_cudnn",
        title=CUDNN_TITLE,
        entry=_function("sdpa_cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION)),
        refusal=_other_diagonal,
    ),
    Peer(
        name="flex",
        title="FlexAttention (torch.compile)",
        entry=_function("flex", _make_flex),
        refusal=lambda problem: "",
    ),
)
ATTENTION_BACKWARD = _by_name(
    Peer(
        name="sdpa_flash",
        title=FLASH_TITLE,
        entry=_fused("sdpa_flash", FLASH, step=False),
        refusal=_grouped_heads,
    ),
    Peer(
        name="sdpa_cudnn",
        title=CUDNN_TITLE,
        entry=_fused("sdpa_cudnn", CUDNN, step=False),
        refusal=_grouped_heads,
    ),
    Peer(
        name="sdpa_flash_step",
        title=f"{FLASH_TITLE}, forward + backward",
        entry=_fused("sdpa_flash_step", FLASH, step=True),
        refusal=_grouped_heads,
        against=STEP,
    ),
    Peer(
        name="sdpa_cudnn_step",
        title=f"{CUDNN_TITLE}, forward + backward",
        entry=_fused("sdpa_cudnn_step", CUDNN, step=True),
        refusal=_grouped_heads,
        against=STEP,
    ),
    Peer(
        name="sdpa_flash_autograd",
        title=f"{FLASH_TITLE}, forward + backward through autograd",
        entry=_autograd("sdpa_flash_autograd", SDPBackend.FLASH_ATTENTION),
        refusal=_other_diagonal,
        against=AUTOGRAD,
        asked=lambda problem: problem.seqlen_q == AUTOGRAD_SEQLEN,
    ),
)
PEERS: dict[str, dict[str, Peer]] = {
    "attention_forward": ATTENTION_FORWARD,
    "attention_backward": ATTENTION_BACKWARD,
    "retnet": RETNET,
    "retention": RETENTION,
}
"""Benchmark -> peer by name."""
