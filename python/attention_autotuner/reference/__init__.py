"""The truth beside each operation, in plain PyTorch, and the rule by which outputs are held against it."""

from __future__ import annotations

from .attention import attention, attention_backward, attention_low, attention_naive
from .compare import Comparison, check
from .second_order import attention_double_backward

__all__ = [
    "Comparison",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_low",
    "attention_naive",
    "check",
]
