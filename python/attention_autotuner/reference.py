"""The reference of each operation, in plain PyTorch, and the rule by which outputs are compared with it."""

from __future__ import annotations

from .operations.attention.reference import (
    attention,
    attention_backward,
    attention_bounded,
    attention_low,
    attention_naive,
)
from .operations.attention.second_order import attention_double_backward
from .operations.retention.reference import (
    decay_mask,
    default_log2_gamma,
    retention_chunkwise,
    retention_low,
    retention_parallel,
    retention_recurrent,
)
from .operations.retention.reference_backward import retention_backward
from .operations.retnet.reference import (
    retnet_attention,
    retnet_attention_backward,
    retnet_attention_low,
)
from .operations.shared.bands import Bands
from .operations.shared.compare import Comparison, check

__all__ = [
    "Bands",
    "Comparison",
    "attention",
    "attention_backward",
    "attention_bounded",
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
