"""Score modifications: problems that have them, and a formula over a mask of every pair, in fp64."""

from __future__ import annotations

import math
from typing import Any

import torch

from attention_autotuner.core.problem import Problem

BASE = Problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=70, seqlen_k=101, dim_qk=32, dim_v=32)
KINDS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (40, 17)},
    "softcap": {"modifications": ("softcap",)},
    "alibi": {"modifications": ("alibi_slopes",)},
    "bias": {"modifications": ("bias_table",)},
    "sinks": {"modifications": ("sinks",)},
    "mask": {"modifications": ("attn_mask",)},
    "bent": {"modifications": ("softcap", "alibi_slopes", "sinks"), "window_size": (31, -1)},
    "biased": {
        "modifications": ("softcap", "alibi_slopes", "bias_table", "sinks"),
        "window_size": (90, 20),
    },
    "all": {
        "modifications": ("softcap", "alibi_slopes", "bias_table", "attn_mask", "sinks"),
        "window_size": (31, -1),
    },
}
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "causal_alignment": "top_left", "seqlen_k": 40},
    {"causal": True, "seqlen_q": 101, "seqlen_k": 33},  # rows that see no key
)


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    causal_alignment: str = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE, computed in the dtype, differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    s = q.shape[-1] ** -0.5 * (q.to(dtype) @ k.mT)
    rows, keys = (torch.arange(n, device=q.device) for n in s.shape[2:])
    to_end = rows[:, None] + s.shape[3] - s.shape[2] - keys
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        s = s - slopes.to(dtype)[..., None, None] * to_end.abs()
    if bias is not None:
        most = bias.shape[1] // 2
        s = s + bias.to(dtype)[:, (-to_end).clamp(-most, most) + most]
    behind = to_end if causal_alignment == "bottom_right" else rows[:, None] - keys
    left, right = (math.inf if x < 0 else x for x in window_size)
    seen = (behind <= left) & (behind >= (0 if causal else -right))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.to(dtype)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is None:
        empty = ~seen.any(-1, keepdim=True)
        p = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        lse = s.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
        return p @ v, lse
    s = torch.cat((s, sinks.to(dtype)[:, None, None].expand(*s.shape[:3], 1)), dim=3)
    return s.softmax(-1)[..., :-1] @ v, s.logsumexp(-1)
