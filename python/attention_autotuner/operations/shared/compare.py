"""When an output counts as right: the error rule of the measuring protocol.

``max|out - ref| <= 2 max|low - ref| + eps`` and ``||out - ref|| <= 1.5 ||low - ref|| + eps sqrt(n)``, where ``ref`` is
the reference in fp32 or fp64, ``low`` the formula as written in the input dtype, and eps two units in the last place of
the output dtype at ``max|ref|``. It holds for every head and band of rows by itself (:mod:`.bands`): eps and
``low - ref`` are those of the part, so that large values excuse nothing elsewhere.

Callers move ``low`` off the reference by what rounding that no kernel can avoid is worth there, since within a small
part the formula may be exact by luck or by construction: see the ``references`` of :mod:`..bindings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .bands import Bands

MAX_FACTOR = 2.0
NORM_FACTOR = 1.5
EPS_ULPS = 2.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result for one output.

    Attributes:
        reason: why it is wrong, with the worst head and band; empty when it is right.
        max_error, max_allowed: largest absolute error, and the most the rule allows, of the part that comes nearest to
            what is allowed or exceeds it most.
        norm_error, norm_allowed: Euclidean norm of the error, and the most the rule allows, of the part alike.
        elements: number of elements compared.
        parts: number of heads and bands compared.
    """

    reason: str
    max_error: float = math.nan
    max_allowed: float = math.nan
    norm_error: float = math.nan
    norm_allowed: float = math.nan
    elements: int = 0
    groups: int = 0

    @property
    def ratio(self) -> float:
        """The larger of the two errors over what is allowed; 0 of nothing."""
        pairs = ((self.max_error, self.max_allowed), (self.norm_error, self.norm_allowed))
        return max(error / allowed if allowed else 0.0 for error, allowed in pairs)

    @property
    def ok(self) -> bool:
        """True where the output is right."""
        return not self.reason

    def __bool__(self) -> bool:
        return self.ok


def units_in_last_place(magnitudes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distances between floats of a dtype at some magnitudes (fp64)."""
    info = torch.finfo(dtype)
    exponents = torch.frexp(magnitudes.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(magnitudes, info.eps), exponents)


def check(
    out: torch.Tensor, ref: torch.Tensor, low: torch.Tensor, bands: Bands | None = None
) -> Comparison:
    """Compare an output with the reference.

    Minus infinity (the LSE of a row that sees no key) must stand exactly where the reference has it; the rule applies
    to the rest. Elements where ``low`` itself overflowed excuse nothing.

    Args:
        out: the output to compare, in its own dtype; any non-finite element beyond the above fails.
        ref: the reference, fp32 or fp64, of the same shape.
        low: the formula in the input dtype, of the same shape.
        bands: heads and rows of the output; None for tensors that have neither, which are one part.

    Raises:
        ValueError: the shapes differ, or the reference itself is NaN or plus infinity.
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
        raise ValueError("ref holds NaN or plus infinity: nothing can be compared with it")
    converted = out.to(ref.dtype)
    bad = ~torch.where(masked, converted == -math.inf, converted.isfinite())
    count = int(bad.sum())
    if count:
        first = tuple(int(index) for index in bad.nonzero()[0])
        return Comparison(
            reason=f"{count} of {out.numel()} elements are not finite, or finite where the reference is -inf; first "
            f"at {first}: {float(out[first])} for {float(ref[first])}",
            elements=out.numel(),
        )
    exact = ref.masked_fill(masked, 0.0)
    error = converted.masked_fill(masked, 0.0) - exact
    excuse = low.to(ref.dtype) - exact
    excuse = torch.where(excuse.isfinite() & ~masked, excuse, 0.0)
    groups = _Groups(bands, ref)
    ref_max, max_error, max_excuse = groups.largest(exact, error, excuse)
    norm_error, norm_excuse = groups.norms(error, excuse)
    eps = EPS_ULPS * units_in_last_place(ref_max, out.dtype)
    of_max = _Side(max_error, MAX_FACTOR * max_excuse + eps)
    of_norm = _Side(norm_error, NORM_FACTOR * norm_excuse + eps * groups.elements.sqrt())
    reasons = []
    if of_max.wrong.any():
        at = groups.index_of_largest(error, of_max.worst)
        reasons.append(
            f"largest error {of_max.error:.3g} at {at}, allowed {of_max.allowed:.3g}"
            f"{groups.describe(of_max.worst)}"
        )
    if of_norm.wrong.any():
        reasons.append(
            f"norm of the error {of_norm.error:.3g}, allowed {of_norm.allowed:.3g}{groups.describe(of_norm.worst)}"
        )
    if reasons and of_max.wrong.numel() > 1:
        wrong = int((of_max.wrong | of_norm.wrong).sum())
        reasons.append(f"{wrong} of {of_max.wrong.numel()} heads and bands are wrong")
    return Comparison(
        reason="; ".join(reasons),
        max_error=of_max.error,
        max_allowed=of_max.allowed,
        norm_error=of_norm.error,
        norm_allowed=of_norm.allowed,
        elements=out.numel(),
        groups=of_max.wrong.numel(),
    )


class _Side:
    """One of the two inequalities for all parts.

    Args:
        error: ``[heads, bands]``, fp64.
        allowed: shaped alike, above zero.

    Attributes:
        wrong: shaped alike: parts that break it.
        worst: head and band of the largest quotient of the two.
        error, allowed: of that part.
    """

    def __init__(self, error: torch.Tensor, allowed: torch.Tensor) -> None:
        self.wrong = ~(error <= allowed)
        flat = int((error / allowed).argmax())
        self.worst = divmod(flat, error.shape[1])
        self.error, self.allowed = float(error[self.worst]), float(allowed[self.worst])


class _Groups:
    """Reductions of tensors of one shape over every head and band; results are ``[heads, bands]``, fp64 on the CPU.

    Args:
        bands: axes and counts; None for a single part.
        like: gives shape and device.
    """

    def __init__(self, bands: Bands | None, like: torch.Tensor) -> None:
        self._bands = bands
        kept = [] if bands is None else [bands.heads, *([] if bands.rows is None else [bands.rows])]
        self._reduced = [axis for axis in range(like.dim()) if axis not in kept]
        self._heads = 1 if bands is None else like.shape[bands.heads]
        rows = 1 if bands is None or bands.rows is None else like.shape[bands.rows]
        self._names, index = (Bands(heads=0) if bands is None else bands).band_of_rows()
        if index.numel() != rows:
            raise ValueError(f"bands are of {index.numel()} rows, the tensor has {rows}")
        self._index = index.to(like.device)
        by_row = like.numel() // (self._heads * rows)
        self.elements = (torch.bincount(index, minlength=len(self._names)) * by_row).double()

    def largest(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Largest magnitudes, ``[tensors, heads, bands]``."""
        rows = torch.stack([self._rows(tensor, math.inf, tensor.dtype) for tensor in tensors])
        target = rows.new_zeros(*rows.shape[:2], len(self._names))
        index = self._index.expand_as(rows)
        return target.scatter_reduce_(2, index, rows, "amax").double().cpu()

    def norms(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Euclidean norms, summed in fp64, ``[tensors, heads, bands]``."""
        rows = torch.stack([self._rows(tensor, 2.0, torch.float64) for tensor in tensors])
        target = rows.new_zeros(*rows.shape[:2], len(self._names))
        return target.index_add_(2, self._index, rows.square()).sqrt().cpu()

    def index_of_largest(self, error: torch.Tensor, part: tuple[int, int]) -> tuple[int, ...]:
        """Where the largest magnitude of one part stands."""
        magnitudes = error.abs()
        if self._bands is not None:
            head, band = part
            inside = torch.zeros(error.shape[self._bands.heads], dtype=torch.bool)
            inside[head] = True
            magnitudes = self._keep(magnitudes, inside, self._bands.heads)
            if self._bands.rows is not None:
                magnitudes = self._keep(magnitudes, self._index == band, self._bands.rows)
        flat = torch.tensor(int(magnitudes.argmax()))
        return tuple(int(i) for i in torch.unravel_index(flat, error.shape))

    def describe(self, part: tuple[int, int]) -> str:
        """The end of a clause about a part; empty where there is only one."""
        if self._bands is None:
            return ""
        return f" ({self._bands.describe(part[0], int(self._names[part[1]]))})"

    def _rows(self, values: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
        """The norm of some order of every row, ``[heads, rows]``; 1 for the extent of an axis that is not there."""
        if self._reduced:
            values = torch.linalg.vector_norm(values, order, dim=self._reduced, dtype=dtype)
        return values.to(dtype).abs().reshape(self._heads, -1)

    def _keep(self, values: torch.Tensor, inside: torch.Tensor, axis: int) -> torch.Tensor:
        shape = [-1 if i == axis else 1 for i in range(values.dim())]
        return values.masked_fill(~inside.to(values.device).view(shape), -1.0)
