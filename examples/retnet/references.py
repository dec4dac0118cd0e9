"""Retention by the PyTorch reference, in the place of the op: the truth, and the rounding that is excused."""

from __future__ import annotations

from typing import Any

import torch

from attention_autotuner.operations.retention.reference import (
    retention_low,
    retention_parallel,
)


def exact(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In fp32, or fp64 where q is, whatever the form; takes and answers what ``retention_func`` does."""
    q, k, v, gamma = tensors
    o, state = retention_parallel(q, k, v, gamma, initial_state=options["initial_state"])
    return o.to(q.dtype), _left(state, options)


def rounded(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """By chunks, with everything but the states in q's dtype; takes and answers what ``retention_func`` does."""
    q, k, v, gamma = tensors
    o, state = retention_low(q, k, v, gamma, initial_state=options["initial_state"])
    return o, _left(state, options)


def _left(state: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    if options["inplace_state"]:
        given: torch.Tensor = options["initial_state"]
        return given.copy_(state)
    return state if options["output_final_state"] else None
