"""The product of two matrices as a problem.

A row of A is what a row of q is elsewhere: ``seqlen_q`` rows (``seqlen_k`` is the same) of ``dim_qk`` elements go to
rows of ``dim_v`` elements. Records round the rows up, as those of sequences, and keep the other two.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.operation import Semantics, require
from ...core.problem import DIM_MULTIPLE, MAX_EXTENT, Problem, of_shape


def of_sizes(m: int, n: int, k: int, **fields: Any) -> Problem:
    """The problem of an ``[m, k]`` by a ``[k, n]`` matrix.

    Raises:
        UnsupportedProblemError: as :class:`Problem`.
    """
    return of_shape((1, 1, m, k, n), op="gemm", **fields)


class GemmSemantics(Semantics):
    """The meaning of gemm's problems."""

    def check(self, problem: Problem) -> None:
        """Check that there is one product of rows that are read 16 bytes at a time.

        Raises:
            UnsupportedProblemError: a field is outside its limits.
        """
        super().check(problem)
        p = problem
        require(p.direction == "forward", f"gemm is forward, got direction={p.direction!r}")
        sizes = (p.batch, p.heads_q, p.heads_kv)
        require(
            sizes == (1, 1, 1),
            f"batch, heads_q and heads_kv must be 1 for gemm, got {', '.join(map(str, sizes))}",
        )
        require(
            p.seqlen_q == p.seqlen_k,
            f"gemm has as many rows everywhere, got seqlen_q {p.seqlen_q} and seqlen_k {p.seqlen_k}",
        )
        require(not p.causal, "gemm is not causal, got causal=True")
        require(
            p.alignment_bytes == 16,
            f"alignment_bytes must be 16 for gemm, whose matrices come by TMA, got {p.alignment_bytes}",
        )
        require(
            p.operands[0] == "n" or p.seqlen_q % DIM_MULTIPLE == 0,
            f"rows of A that lies by columns must be a multiple of {DIM_MULTIPLE}, got {p.seqlen_q}",
        )

    def keys_scored(self, problem: Problem) -> int:
        """The columns of the result."""
        return problem.dim_v

    def verified_with(
        self, problem: Problem, *, seqlen_q: int, seqlen_k: int, fewer_keys: int
    ) -> list[Problem]:
        """A number of rows that no tile divides."""
        rows = seqlen_q if problem.operands[0] == "n" else seqlen_q // DIM_MULTIPLE * DIM_MULTIPLE
        return [replace(problem, seqlen_q=rows, seqlen_k=rows)]

    def flops(self, problem: Problem) -> int:
        """A multiplication and an addition for each of m n k."""
        return 2 * problem.seqlen_q * problem.dim_qk * problem.dim_v

    def bytes_moved(self, problem: Problem) -> int:
        """Each matrix once."""
        p = problem
        return 2 * (p.seqlen_q * (p.dim_qk + p.dim_v) + p.dim_qk * p.dim_v)

    def describe(self, problem: Problem) -> str:
        """The factors' order in memory, where it is not by rows."""
        return "" if problem.operands == "nn" else f" {problem.operands}"


SEMANTICS = GemmSemantics(
    op="gemm",
    scores={"none": "none"},
    max_dims=(MAX_EXTENT, MAX_EXTENT),
    compiles_dims=False,
    batched=False,
    takes_operands=True,
)
