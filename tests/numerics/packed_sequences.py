"""Packed sequences: problems of them, tensors, and each sequence by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch

from attention_autotuner.core.problem import Problem

# As in a step of training, of the suite packed_sequences as well.
LENGTHS = [1969, 1311, 268, 125, 411, 249, 1481, 154, 349]
LENGTHS += [576, 2658, 398, 139, 1298, 680, 120, 2678, 1520]
# Lengths from 0 to 160 or so: typical ones, and those of modified_inputs.RaggedForward.
BASE = Problem(
    batch=5,
    heads_q=4,
    heads_kv=2,
    seqlen_q=140,
    seqlen_k=160,
    dim_qk=32,
    dim_v=32,
    packed_rows=(301, 340),
)
# Several super-chunks, and lengths from 0 to 230 or so; those of inputs.RetentionForward with `ragged`.
RETENTION = Problem(
    op="retention",
    causal=True,
    batch=6,
    heads_q=4,
    heads_kv=2,
    seqlen_q=200,
    seqlen_k=200,
    dim_qk=32,
    dim_v=48,
    packed_rows=(401, 401),
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "causal_alignment": "top_left"},
    "all": {
        "causal": True,
        "modifications": ("softcap", "alibi_slopes", "bias_table", "sinks"),
        "window_size": (31, -1),
    },
}


def ends_of(lengths: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """``cu_seqlens`` of lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def each_sequence(ends_q: torch.Tensor, ends_k: torch.Tensor) -> Iterator[tuple[int, slice, slice]]:
    """The number of every sequence, and its rows of q and k."""
    pairs = zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True)
    for b, (rows, keys) in enumerate(pairs):
        yield b, slice(*rows), slice(*keys)
