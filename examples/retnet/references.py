"""The PyTorch reference in the place of ``retention_func``: exact, and rounded as 16-bit kernels may."""

from __future__ import annotations

from typing import Any

import torch

from attention_autotuner.operations.retention.reference import retention_low, retention_parallel


def exact(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention in fp32, or fp64 where q is, whatever the form; takes and returns what ``retention_func`` does."""
    return _with_options(retention_parallel, tensors, options)


def rounded(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Retention by chunks with all but the states in q's dtype; takes and returns what ``retention_func`` does."""
    return _with_options(retention_low, tensors, options)


def _with_options(
    formula: Any, tensors: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, state = formula(*tensors, initial_state=options["initial_state"])
    if options["inplace_state"]:
        state = options["initial_state"].copy_(state)
    return o.to(tensors[0].dtype), state if options["output_final_state"] else None
