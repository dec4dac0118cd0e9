"""Which toy candidates may exist: twins of the ``static_assert``s of the same names in the header."""

from __future__ import annotations

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.shared.passes import Pass
from attention_autotuner.kernels.shared.rules import Rule

from .knobs import NaiveKnobs, knobs_of
from .resources import needs

MAX_WARPS = 8
MAX_CLASS = 64


def _naive_warps_range(c: Candidate) -> str | None:
    warps = knobs_of(c).warps
    return None if 1 <= warps <= MAX_WARPS else f"warps must be in 1..{MAX_WARPS}, got {warps}"


def _naive_head_dims_small(c: Candidate) -> str | None:
    if max(c.padded_dim_qk, c.padded_dim_v) <= MAX_CLASS:
        return None
    return (
        f"padded head dims must be at most {MAX_CLASS}, got {c.padded_dim_qk} and {c.padded_dim_v}"
    )


NAIVE_PREDICATES: dict[str, Rule[Candidate]] = {
    "naive_warps_range": _naive_warps_range,
    "naive_head_dims_small": _naive_head_dims_small,
}


def passes_of(candidate: Candidate) -> tuple[Pass, ...]:
    """The one launch."""
    return (
        Pass(kernel=NaiveKnobs.kernel, subject=candidate, rules=NAIVE_PREDICATES, needs_of=needs),
    )
