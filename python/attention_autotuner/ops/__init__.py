"""Operations on torch tensors (and on whatever speaks DLPack), each a ``torch.library`` op behind a plain function."""

from __future__ import annotations

from .attention import flash_attn_func
from .gammas import Decay
from .retention import retention_func
from .retnet import RetNetAttnFunc, retnet_attn_func

__all__ = ["Decay", "RetNetAttnFunc", "flash_attn_func", "retention_func", "retnet_attn_func"]
