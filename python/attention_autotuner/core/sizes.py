"""Bytes of an element, as tensors and workspaces hold it."""

from __future__ import annotations

ELEMENT_BYTES = 2  # fp16 and bf16
FP32_BYTES = 4  # of sums, states, LSE and delta
