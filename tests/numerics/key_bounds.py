"""Key bounds: problems to verify kernels on, tensors with NaN beyond the bounds, and the formula over a mask.

The formula hides keys by a mask of every pair; the package's own reference cuts K and V instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import CausalAlignment, Problem
from attention_autotuner.operations.bindings import TORCH_DTYPES

BASE = Problem(
    batch=3, heads_q=4, heads_kv=2, seqlen_q=129, seqlen_k=1021, dim_qk=64, dim_v=64,
    key_bounds=True,
)  # fmt: skip
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bf16", "dim_qk": 128, "dim_v": 128, "seqlen_q": 300},
    {"dim_qk": 128, "dim_v": 128, "seqlen_q": 1, "seqlen_k": 4099, "batch": 9},
    {"dim_qk": 256, "dim_v": 256, "seqlen_q": 77, "heads_q": 8, "heads_kv": 1},
    {"dim_qk": 72, "dim_v": 80, "seqlen_k": 129},
    {"dim_qk": 192, "dim_v": 128, "seqlen_q": 515, "seqlen_k": 515},
    {"alignment_bytes": 2, "seqlen_k": 63},
)  # fmt: skip
MASKS: tuple[tuple[bool, CausalAlignment], ...] = (
    (False, "bottom_right"), (True, "bottom_right"), (True, "top_left"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BoundedCase:
    """A problem whose default kernel is verified."""

    problem: Problem

    def candidate(self, present: Policy) -> Candidate:
        """See :class:`.kernel_pool.NeedsKernel`."""
        return present.default(replace(self.problem, causal=False, causal_alignment="bottom_right"))


def make_cases() -> list[BoundedCase]:
    """Every shape under every mask."""
    return [
        BoundedCase(problem=replace(BASE, causal=causal, causal_alignment=alignment, **shape))
        for shape in SHAPES
        for causal, alignment in MASKS
    ]


def make_bounds(
    seqlen_k: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """First keys and ends of nine batch entries: none, one, odd, all, beyond the tensor, exchanged."""
    starts = [0, 0, 5, 0, seqlen_k // 3, -7, seqlen_k - 1, seqlen_k, seqlen_k // 2]
    ends = [seqlen_k, 0, seqlen_k // 2 | 1, 1, seqlen_k - 2, seqlen_k + 9, seqlen_k, seqlen_k, 2]
    rows = torch.tensor([starts, ends], dtype=torch.int32, device=device)
    return rows[0].contiguous(), rows[1].contiguous()


def within(starts: torch.Tensor, ends: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """A mask of the keys that batch entries have: ``[batch, seqlen_k]``."""
    keys = torch.arange(seqlen_k, device=starts.device)
    return (keys >= starts[:, None]) & (keys < ends[:, None])


def make_tensors(
    problem: Problem, starts: torch.Tensor, ends: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, with NaN in k and v beyond the bounds."""
    p, generator = problem, torch.Generator(device=starts.device).manual_seed(seed)
    shapes = (
        (p.batch, p.heads_q, p.seqlen_q, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_qk),
        (p.batch, p.heads_kv, p.seqlen_k, p.dim_v),
    )
    q, k, v = (
        torch.randn(shape, generator=generator, device=starts.device, dtype=TORCH_DTYPES[p.dtype])
        for shape in shapes
    )
    absent = ~within(starts, ends, p.seqlen_k)[:, None, :, None]
    return q, k.masked_fill(absent, math.nan), v.masked_fill(absent, math.nan)


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    causal: bool = False,
    alignment: CausalAlignment = "bottom_right",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """O and LSE over a mask of every pair, each in fp32 and in the inputs' dtype."""
    present = within(starts, ends, k.shape[2])
    seen = present[:, None, :].expand(-1, q.shape[2], -1)
    if causal:
        offset = ends.clamp(0, k.shape[2]) - q.shape[2] if alignment == "bottom_right" else 0 * ends
        last = torch.arange(q.shape[2], device=q.device) + offset[:, None]
        seen = seen & (torch.arange(k.shape[2], device=q.device) <= last[..., None])
    seen, group = seen[:, None], q.shape[1] // k.shape[1]
    k, v = (
        x.masked_fill(~present[:, None, :, None], 0.0).repeat_interleave(group, dim=1)
        for x in (k, v)
    )
    both = []
    for dtype in (torch.float32, q.dtype):
        s = q.shape[-1] ** -0.5 * (q.to(dtype) @ k.to(dtype).mT)
        s = s.masked_fill(~seen, -math.inf)
        p = s.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        both.append((p @ v.to(dtype), s.float().logsumexp(-1)))
    (o, lse), (o_low, lse_low) = both
    yield o, o_low
    yield lse, lse_low
