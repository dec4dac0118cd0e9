"""The product of two matrices in plain PyTorch."""

from __future__ import annotations

import torch

from ..shared.blocks import full_precision


def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``A B`` in fp32 of ``[..., m, k]`` and ``[..., k, n]``, without TF32."""
    with full_precision():
        return a.float() @ b.float()
