"""When an output counts as right: the error rule of the measuring protocol.

``max|out - ref| <= 2 max|low - ref| + eps`` and ``||out - ref|| <= 1.5 ||low - ref|| + eps sqrt(n)``, where ``ref`` is
the fp32 or fp64 truth, ``low`` the formula as written in the input dtype, and eps two units in the last place of the
output dtype at ``max|ref|``. For dQ and dK callers move ``low`` off the truth by what rounding that no kernel can avoid
is worth there: see ``tuning.bindings.AttentionBackward.truths``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_FACTOR = 2.0
NORM_FACTOR = 1.5
EPS_ULPS = 2.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on one output.

    Attributes:
        reason: why it is wrong; empty when it is right.
        max_error, max_allowed: largest absolute error, and the most the rule allows.
        norm_error, norm_allowed: Euclidean norm of the error, and the most the rule allows.
        elements: number of elements compared.
    """

    reason: str
    max_error: float = math.nan
    max_allowed: float = math.nan
    norm_error: float = math.nan
    norm_allowed: float = math.nan
    elements: int = 0

    @property
    def ok(self) -> bool:
        """Whether the output is right."""
        return not self.reason

    def __bool__(self) -> bool:
        return self.ok


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance between floats of a dtype at a magnitude."""
    info = torch.finfo(dtype)
    magnitude = max(abs(value), info.tiny)
    return float(2.0 ** math.floor(math.log2(magnitude)) * info.eps)


def check(out: torch.Tensor, ref: torch.Tensor, low: torch.Tensor) -> Comparison:
    """Hold an output against the truth.

    Minus infinity (the LSE of a row that sees no key) must stand exactly where the truth has it; the rule applies to
    the rest. Elements where ``low`` itself overflowed excuse nothing.

    Args:
        out: the output to judge, in its own dtype; any non-finite element beyond the above fails.
        ref: the truth, fp32 or fp64, of the same shape.
        low: the formula in the input dtype, of the same shape.

    Raises:
        ValueError: the shapes differ, or the truth itself is NaN or plus infinity.
    """
    if not out.shape == ref.shape == low.shape:
        raise ValueError(
            f"out, ref and low must have one shape, got {tuple(out.shape)}, {tuple(ref.shape)}, {tuple(low.shape)}"
        )
    if ref.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"ref must be float32 or float64, got {ref.dtype}")
    if out.numel() == 0:
        return Comparison(
            reason="", max_error=0.0, max_allowed=0.0, norm_error=0.0, norm_allowed=0.0
        )
    masked = ref == -math.inf
    if not bool((ref.isfinite() | masked).all()):
        raise ValueError("ref holds NaN or plus infinity: nothing can be judged by it")
    wide = out.to(ref.dtype)
    bad = ~torch.where(masked, wide == -math.inf, wide.isfinite())
    count = int(bad.sum())
    if count:
        first = tuple(int(index) for index in bad.nonzero()[0])
        return Comparison(
            reason=f"{count} of {out.numel()} elements are not finite, or finite where the truth is -inf; first at "
            f"{first}: {float(out[first])} for {float(ref[first])}",
            elements=out.numel(),
        )
    truth = ref.masked_fill(masked, 0.0)
    error = wide.masked_fill(masked, 0.0) - truth
    excuse = low.to(ref.dtype) - truth
    excuse = torch.where(excuse.isfinite() & ~masked, excuse, 0.0)
    eps = EPS_ULPS * unit_in_last_place(float(truth.abs().max()), out.dtype)
    max_error, max_allowed = float(error.abs().max()), MAX_FACTOR * float(excuse.abs().max()) + eps
    norm_error = _norm(error)
    norm_allowed = NORM_FACTOR * _norm(excuse) + eps * math.sqrt(out.numel())
    reasons = []
    if not max_error <= max_allowed:
        flat = int(error.abs().argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
        reasons.append(f"largest error {max_error:.3g} at {where}, allowed {max_allowed:.3g}")
    if not norm_error <= norm_allowed:
        reasons.append(f"norm of the error {norm_error:.3g}, allowed {norm_allowed:.3g}")
    return Comparison(
        reason="; ".join(reasons),
        max_error=max_error,
        max_allowed=max_allowed,
        norm_error=norm_error,
        norm_allowed=norm_allowed,
        elements=out.numel(),
    )


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
