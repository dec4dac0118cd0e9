"""Operations on torch tensors (and on whatever speaks DLPack), each a ``torch.library`` op behind a plain function."""

from __future__ import annotations

from .attention import flash_attn_func

__all__ = ["flash_attn_func"]
