"""Operations on torch tensors (and on whatever speaks DLPack), each a ``torch.library`` op behind a plain function."""

from __future__ import annotations

from .attention.function import flash_attn_func
from .attention.varlen import flash_attn_varlen_func
from .gemm.function import matmul
from .retention.function import retention_func
from .retnet.function import RetNetAttnFunc, retnet_attn_func
from .shared.gammas import Decay

__all__ = [
    "Decay",
    "RetNetAttnFunc",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "matmul",
    "retention_func",
    "retnet_attn_func",
]
