"""Retention with decay that carries a state, as a problem."""

from __future__ import annotations

from dataclasses import replace

from ...core.modifications import PACKED
from ...core.operation import Semantics, require
from ...core.problem import Problem
from ...core.sizes import FP32_BYTES

MAX_SEQUENCES = 65535  # batch times heads: the second extent of a CUDA grid
# Tokens that the reference holds scores of, generously; a state stands for the rest.
SEEN_AT_ONCE = 1024
PACKED_FORMS = ("auto", "chunkwise")  # a state for each sequence passes from chunk to chunk
LONG_SEQLEN = 2 * 2048 + 37  # more than two super-chunks


class RetentionSemantics(Semantics):
    """The meaning of retention's problems."""

    def check(self, problem: Problem) -> None:
        """Check the limits of sequences.

        Raises:
            UnsupportedProblemError: a field is outside its limits.
        """
        super().check(problem)
        sequences = problem.batch * problem.heads_q
        require(
            sequences <= MAX_SEQUENCES,
            f"batch * heads_q must be at most {MAX_SEQUENCES} for retention, got {sequences}",
        )
        require(
            problem.seqlen_q == problem.seqlen_k,
            f"retention takes as many queries as keys, got {problem.seqlen_q} and {problem.seqlen_k}",
        )
        rows_q, rows_k = problem.packed_rows
        require(
            rows_q == rows_k, f"packed_rows of retention must be equal, got {rows_q} and {rows_k}"
        )
        require(
            not problem.packed or problem.form in PACKED_FORMS,
            f"form of packed sequences must be one of {PACKED_FORMS}, got {problem.form!r}",
        )

    def has_forms(self, problem: Problem) -> bool:
        """Forward has."""
        return problem.direction == "forward"

    def decodes(self, problem: Problem) -> bool:
        """Forward by its recurrent form, or of a single token."""
        short = problem.form == "recurrent" or problem.seqlen_q == 1
        return problem.direction == "forward" and short and not problem.packed

    def keys_scored(self, problem: Problem) -> int:
        """The keys of a few chunks: a state stands for the rest."""
        return min(problem.seqlen_k, SEEN_AT_ONCE)

    def verified_with(
        self, problem: Problem, *, seqlen_q: int, seqlen_k: int, fewer_keys: int
    ) -> list[Problem]:
        """An odd length, and a sequence of several super-chunks for a few heads; there is no other mask."""
        length = max(seqlen_q, seqlen_k)
        odd = replace(problem, seqlen_q=length, seqlen_k=length)
        few = replace(odd, batch=1, heads_q=4, heads_kv=2)
        long = replace(few, seqlen_q=LONG_SEQLEN, seqlen_k=LONG_SEQLEN)
        if problem.packed:
            rows = problem.batch * length // 3 + 1
            odd = replace(odd, packed_rows=(rows, rows))
            long = replace(long, batch=3, packed_rows=(2 * LONG_SEQLEN, 2 * LONG_SEQLEN))
        return [odd, long]

    def flops(self, problem: Problem) -> int:
        """The recurrence's: 2 b h s dqk dv for each product of a token with a state, two forward, five back."""
        products = 2 if problem.direction == "forward" else 5
        batch, seqlen, _ = problem.extents
        rows = 2 * batch * problem.heads_q * seqlen
        return rows * problem.dim_qk * problem.dim_v * products

    def bytes_moved(self, problem: Problem) -> int:
        """Each tensor once, and a state in and out (and its gradient); backward reads no o and no LSE."""
        batch, of_q, of_k = problem.extents
        rows_q, rows_k = batch * problem.heads_q * of_q, batch * problem.heads_kv * of_k
        state = problem.batch * problem.heads_q * problem.dim_qk * problem.dim_v
        states, dims = 2 * FP32_BYTES * state, problem.dim_qk + problem.dim_v
        if problem.direction == "forward":
            return 2 * (rows_q + rows_k) * dims + states
        return 2 * (2 * rows_k * dims + rows_q * (dims + problem.dim_qk)) + 2 * states


SEMANTICS = RetentionSemantics(
    op="retention",
    scores={"none": "decayed"},
    carries_state=True,
    goes_by_token=True,
    modifications=(PACKED,),
    small_step="none",
)
