"""Passes of candidates by the mangled names of their kernels."""

from __future__ import annotations

import re

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.registry import kernel_of


def pass_named(candidate: Candidate, symbol: str) -> str | None:
    """The pass of a candidate that a kernel of its unit is; None for what runs around them."""
    passes = kernel_of(candidate).passes(candidate)
    named = (launch for launch in passes if launch.symbol and re.search(launch.symbol, symbol))
    return next((launch.needs.name for launch in named), None)
