"""The reference of each operation, in plain PyTorch, and the rule by which outputs are compared with it."""

from __future__ import annotations

from .attention import attention, attention_backward, attention_low, attention_naive
from .bands import Bands
from .compare import Comparison, check
from .retention import (
    decay_mask,
    default_log2_gamma,
    retention_chunkwise,
    retention_low,
    retention_parallel,
    retention_recurrent,
)
from .retention_backward import retention_backward
from .retnet import retnet_attention, retnet_attention_backward, retnet_attention_low
from .second_order import attention_double_backward

__all__ = [
    "Bands",
    "Comparison",
    "attention",
    "attention_backward",
    "attention_double_backward",
    "attention_low",
    "attention_naive",
    "check",
    "decay_mask",
    "default_log2_gamma",
    "retention_backward",
    "retention_chunkwise",
    "retention_low",
    "retention_parallel",
    "retention_recurrent",
    "retnet_attention",
    "retnet_attention_backward",
    "retnet_attention_low",
]
