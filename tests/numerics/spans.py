"""Documents and prefixes: problems that have them."""

from __future__ import annotations

from typing import Any

import torch

from attention_autotuner.core.problem import Problem

BASE = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=203, seqlen_k=203, dim_qk=64, dim_v=64)
KINDS: dict[str, dict[str, Any]] = {
    "documents": {"modifications": ("document_ids",), "documents": 3},
    "prefix": {"modifications": ("prefix_lens",), "causal": True},
    "both": {
        "modifications": ("softcap", "alibi_slopes", "sinks", "prefix_lens", "document_ids"),
        "causal": True,
        "window_size": (90, -1),
        "documents": 3,
    },
    "bounded": {
        "modifications": ("document_ids",),
        "causal": True,
        "key_bounds": True,
        "documents": 2,
    },
}


def dense_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    prefix_lens: torch.Tensor | None = None,
    document_ids: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The boolean mask of the same meaning, ``[batch, seqlen_q, seqlen_k]``."""
    present = [x for x in (prefix_lens, document_ids) if x is not None]
    keys = torch.arange(seqlen_k, device=present[0].device)
    rows = torch.arange(seqlen_q, device=keys.device)[:, None]
    past = keys - rows - (seqlen_k - seqlen_q if causal_alignment == "bottom_right" else 0)
    seen = (past <= 0 if causal else past < seqlen_k + seqlen_q).expand(len(present[0]), -1, -1)
    if prefix_lens is not None:
        seen = seen | (keys < prefix_lens[:, None, None])
    left, right = window_size
    seen = seen & (past >= -left if left >= 0 else True)
    seen = seen & (past <= right if right >= 0 else True)
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None])
    return seen
