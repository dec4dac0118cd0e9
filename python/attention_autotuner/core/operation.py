"""The semantics of an operation as far as plain numbers go: what a problem of it may say, its FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UnsupportedProblemError
from . import spans
from .modifications import DOCUMENT_IDS, PREFIX_LENS, SPANNED

MAX_DIM_QK = 256
MAX_DIM_V = 512

if TYPE_CHECKING:
    from .problem import CausalAlignment, Mask, Problem, Score


def require(condition: bool, message: str) -> None:
    """Raise :class:`~..errors.UnsupportedProblemError` with a message unless a condition holds."""
    if not condition:
        raise UnsupportedProblemError(message)


def require_spans(
    names: Container[str], seqlens: tuple[int, int], causal: bool, window: tuple[int, int]
) -> None:
    """Check that documents and prefixes, where they are among the names of modifications, suit lengths and mask.

    Raises:
        UnsupportedProblemError: queries are more or fewer than keys, a prefix has no causal mask to widen, or a window
            bounds it on the right.
    """
    require(
        DOCUMENT_IDS not in names or seqlens[0] == seqlens[1],
        f"document_ids need as many queries as keys, got {seqlens[0]} and {seqlens[1]}",
    )
    require(
        PREFIX_LENS not in names or causal,
        "prefix_lens is for causal attention, got causal=False",
    )
    require(
        PREFIX_LENS not in names or window[1] == -1,
        f"prefix_lens needs a window without a right bound, got window_size={window}",
    )


def visible_pairs(problem: Problem) -> int:
    """Pairs of a row and a key that it sees, by causal mask and window, of one head of one batch entry."""
    if problem.spanned:
        return spans.visible_pairs(problem)
    return sum(_visible_pairs(problem, rows, keys) for rows, keys in problem.lengths)


def _visible_pairs(problem: Problem, rows: int, keys: int) -> int:
    left, right = problem.window

    def seen_below(end: int) -> int:
        # The sum over the rows i of i + end, clamped to [0, keys].
        def below(x: int) -> int:
            inside = min(max(x, 0), keys)
            return inside * (inside - 1) // 2 + max(x - keys, 0) * keys

        return below(rows + end) - below(end)

    offset = problem.offset_of(rows, keys)
    return seen_below(offset + right + 1) - seen_below(offset - left)


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """The semantics of problems of one operation.

    Attributes:
        op: the operation's name.
        scores: the masks it takes, each with the score modification that it asks of a kernel.
        alignments: where a causal diagonal may begin.
        carries_state: whether a sequence may be cut anywhere, the state going from one call to the next.
        takes_key_bounds: whether forward kernels take a first key and an end of every batch entry.
        modifications: those of ``modifications.COMPILED`` that a problem may have.
        max_dims: the greatest head dims of q and k, and of v.
        compiles_dims: whether head dims are a matter of the kernel's code.
        batched: whether there are sequences and heads.
        takes_operands: whether factors may lie by rows or by columns.
        goes_by_tiles: whether defaults of its kernels go by the number of their tiles of rows.
        goes_by_token: whether a forward of one token has a default of its own.
        small_step: the mask of the small training step by which the main job covers the operation beside another one's;
            None where it covers no such step.
    """

    op: str
    scores: Mapping[Mask, Score]
    alignments: tuple[CausalAlignment, ...] = ("bottom_right",)
    carries_state: bool = False
    takes_key_bounds: bool = False
    modifications: tuple[str, ...] = ()
    max_dims: tuple[int, int] = (MAX_DIM_QK, MAX_DIM_V)
    compiles_dims: bool = True
    batched: bool = True
    takes_operands: bool = False
    goes_by_tiles: bool = False
    goes_by_token: bool = False
    small_step: Mask | None = None

    def check(self, problem: Problem) -> None:
        """Check what is this operation's own about a problem.

        Raises:
            UnsupportedProblemError: a field is outside its limits.
        """
        require(
            problem.mask in self.scores,
            "mask must be 'explicit' or 'decay' for retnet and 'none' for others, "
            f"got {problem.mask!r} for {self.op}",
        )
        require(
            problem.form == "auto" or self.has_forms(problem),
            f"form is for retention forward, got {problem.form!r} for {self.op} {problem.direction}",
        )
        require(
            problem.causal_alignment in self.alignments,
            f"causal_alignment must be 'bottom_right' for {self.op}, got {problem.causal_alignment!r}",
        )
        require(
            not problem.key_bounds or (self.takes_key_bounds and problem.direction == "forward"),
            f"key_bounds is for attention forward, got key_bounds=True for {self.op} {problem.direction}",
        )
        require(
            set(problem.compiled_modifications) <= set(self.modifications),
            f"score modifications are for attention, got {problem.compiled_modifications} for {self.op}",
        )
        require(
            problem.operands == "nn" or self.takes_operands,
            f"operands is for gemm, got {problem.operands!r} for {self.op}",
        )
        names = problem.modifications
        lengths = problem.seqlen_q, problem.seqlen_k
        require_spans(names, lengths, problem.causal, problem.window_size)
        require(
            not (problem.spanned and "bias_table" in names),
            f"document_ids and prefix_lens take no bias_table, got modifications={problem.modifications}",
        )
        require(
            problem.documents >= 0 and (problem.documents == 0 or DOCUMENT_IDS in names),
            f"documents is a number of documents of attention with document_ids, got {problem.documents}",
        )
        for other in ("attn_mask", "key_bounds", *SPANNED):
            require(
                not problem.packed
                or not (other in problem.modifications or getattr(problem, other, False)),
                f"packed sequences take no {other}, got packed_rows={problem.packed_rows}",
            )
        require(
            problem.causal or not self.is_causal(problem.mask),
            f"{self.op} with decay is causal, got causal=False",
        )

    @property
    def default_mask(self) -> Mask:
        """The mask of a problem that names none: the first of :attr:`scores`."""
        return next(iter(self.scores))

    @property
    def usual(self) -> dict[str, int]:
        """The sizes of a problem that names none, where they are others than :class:`.Problem`'s."""
        return {} if self.batched else {"batch": 1, "heads_q": 1, "heads_kv": 1}

    def is_causal(self, mask: Mask) -> bool:
        """True where every problem with a mask is causal: a decay; not a mask that the operation does not take."""
        return self.scores.get(mask) == "decayed"

    def has_forms(self, problem: Problem) -> bool:
        """True where a problem may name the form that it is computed in."""
        return False

    def decodes(self, problem: Problem) -> bool:
        """True where a call reads and writes states, as a step of decoding does."""
        return False

    def scale(self, problem: Problem) -> float:
        """The factor of Q K^T where a caller names none."""
        return float(problem.dim_qk**-0.5)

    def keys_scored(self, problem: Problem) -> int:
        """Keys whose scores the reference holds for a query at once."""
        return problem.seqlen_k

    def verified_with(
        self, problem: Problem, *, seqlen_q: int, seqlen_k: int, fewer_keys: int
    ) -> list[Problem]:
        """Problems of odd lengths that verify a kernel: with and without the causal mask where both are possible.

        Args:
            problem: gives everything but the sequence lengths.
            seqlen_q: an odd length of several tiles.
            seqlen_k: the same of keys.
            fewer_keys: an odd length of keys that leaves queries without any of their own.
        """
        if DOCUMENT_IDS in problem.modifications:
            seqlen_k = seqlen_q
        odd = replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        if problem.packed:
            rows_q, rows_k = (problem.batch * x // 3 + 1 for x in (seqlen_q, seqlen_k))
            odd = replace(odd, packed_rows=(rows_q, rows_k))
        if PREFIX_LENS in problem.modifications:
            return [odd, replace(odd, seqlen_q=seqlen_k, seqlen_k=seqlen_q)]
        if self.is_causal(problem.mask):
            return [odd, replace(odd, seqlen_k=fewer_keys)]
        return [replace(odd, causal=False), replace(odd, causal=True)]

    def flops(self, problem: Problem) -> int:
        """Floating-point operations by the field's convention, halved when causal with as many keys as queries.

        Forward: 2 b h sq sk (dqk + dv). Backward: 2 b h sq sk (3 dqk + 2 dv), whatever a plan computes twice. With a
        window, and causal with more or fewer keys, the pairs of a row and a key that it sees take the place of sq sk;
        of packed sequences, they are summed up.
        """
        of_pair = 2 * problem.extents[0] * problem.heads_q
        if problem.direction == "forward":
            of_pair *= problem.dim_qk + problem.dim_v
        else:
            of_pair *= 3 * problem.dim_qk + 2 * problem.dim_v
        if problem.window_size != (-1, -1) or problem.spanned:
            return of_pair * visible_pairs(problem)
        if not problem.causal:
            return of_pair * sum(rows * keys for rows, keys in problem.lengths)
        return sum(
            of_pair * rows * keys // 2
            if rows == keys
            else of_pair * _visible_pairs(problem, rows, keys)
            for rows, keys in problem.lengths
        )

    def bytes_moved(self, problem: Problem) -> int:
        """Fewest bytes through device memory, each tensor read or written once.

        Forward: q, k, v and o. Backward: q, k, v, o, the gradient of o and those of q, k, v, and the LSE in fp32. An
        explicit mask of every head is read.
        """
        batch, of_q, of_k = problem.extents
        rows_q, rows_k = batch * problem.heads_q * of_q, batch * problem.heads_kv * of_k
        scores = problem.heads_q * problem.seqlen_q * problem.seqlen_k
        more = 2 * scores if problem.mask == "explicit" else 0
        dims = problem.dim_qk + problem.dim_v
        if problem.direction == "forward":
            return 2 * (rows_q + rows_k) * dims + more
        # elements of a row of q and dq, o and do; of k and dk, v and dv
        return 2 * (rows_q + rows_k) * 2 * dims + 4 * rows_q + more

    def describe(self, problem: Problem) -> str:
        """The words of a problem's one-line description that are this operation's own, after the causal one."""
        return ""
