"""Heads and bands of rows: the parts of an output that the error rule is applied to one by one.

One tolerance for a whole tensor is set by its largest values: those of rows that see few keys, and of the head that
decays least. So every head is compared by itself, all batch entries together, and within a head every band of rows:
those of o, LSE, r, dQ and the mask's gradient by powers of two of the keys that a row sees, those of dK and dV by
powers of two of the queries that see the row. States and gradients of decays have heads only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.problem import Problem

Seen = Literal["keys", "queries"]

SEEN: dict[str, Seen | None] = {
    "o": "keys",
    "lse": "keys",
    "r": "keys",
    "dq": "keys",
    "dmask": "keys",
    "dk": "queries",
    "dv": "queries",
    "final_state": None,
    "dinitial_state": None,
    "dlog2_gamma": None,
    "dsinks": None,
    "dbias_table": None,
    "dattn_mask": None,
}
"""Output by its name in the C ABI -> what its rows are banded by; None where it has heads only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bands:
    """Heads of a tensor and bands of their rows.

    Attributes:
        heads: axis of the heads.
        rows: axis of the rows; None where a head is one part.
        counts: ``[rows]`` on the CPU, int64: keys that each row sees, or queries that see it.
        noun: of the counts.
    """

    heads: int
    rows: int | None = None
    counts: torch.Tensor | None = None
    noun: Seen = "keys"

    @classmethod
    def of(cls, problem: Problem, name: str, ndim: int) -> Bands:
        """The bands of an output of a problem.

        Args:
            problem: gives lengths and mask. An explicit mask beyond the causal one does not change the bands.
            name: of the output in the C ABI.
            ndim: its number of axes. ``[batch, heads, rows, ...]``, for dmask ``[heads, rows, keys]`` too, for
                dlog2_gamma and dsinks ``[..., heads]``, for dbias_table ``[heads, entries]``.

        Raises:
            KeyError: no kernel has an output of that name.
        """
        noun = SEEN[name]
        if name == "dbias_table":
            return cls(heads=0)
        # Packed sequences, documents and prefixes have lengths that a problem does not say.
        if noun is None or problem.packed or problem.spanned:
            return cls(heads=ndim - 1 if name in ("dlog2_gamma", "dsinks") else 1)
        heads = 0 if name == "dmask" and ndim == 3 else 1
        counts = keys_seen(problem) if noun == "keys" else queries_that_see(problem)
        return cls(heads=heads, rows=heads + 1, counts=counts, noun=noun)

    def band_of_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bands that occur, and which one each row is in.

        Returns:
            ``[bands]``: 0 for rows that see nothing, else 1 plus the binary logarithm of the least count of the band,
            ascending; and ``[rows]``, indices into it. One band without an index where there are no rows.
        """
        if self.counts is None:
            return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        exponents = torch.frexp(self.counts.double()).exponent.long()
        bands, index = torch.unique(exponents, return_inverse=True)
        return bands, index

    def describe(self, head: int, band: int) -> str:
        """One part for a message; the band as :meth:`band_of_rows` numbers it."""
        if self.rows is None:
            return f"head {head}"
        least = 2 ** (band - 1) if band else 0
        most = 2 * least - 1 if band else 0
        span = f"{least}" if least == most else f"{least}..{most}"
        verb = "see" if self.noun == "keys" else "are seen by"
        return f"head {head}, rows that {verb} {span} {self.noun}"


def keys_seen(problem: Problem) -> torch.Tensor:
    """Keys that every query row sees: ``[seqlen_q]``, int64."""
    return _seen(problem.seqlen_q, problem.seqlen_k, problem.causal_offset, *problem.window)


def queries_that_see(problem: Problem) -> torch.Tensor:
    """Query rows of one head that see every key: ``[seqlen_k]``, int64."""
    return _seen(
        problem.seqlen_k, problem.seqlen_q, -problem.causal_offset, *reversed(problem.window)
    )


def _seen(rows: int, others: int, offset: int, before: int, after: int) -> torch.Tensor:
    """Others that each row sees: those from so many before its diagonal to so many after it."""
    diagonal = torch.arange(rows) + offset
    begin, end = (diagonal - before).clamp(0, others), (diagonal + after + 1).clamp(0, others)
    return end - begin
