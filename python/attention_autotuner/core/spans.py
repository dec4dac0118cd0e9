"""Spans of keys and queries, where documents or a prefix say what a row sees: typical ones, of which costs are made.

Ids and prefixes lie on the GPU and are not read. A problem says how many documents a sequence has; their lengths are
typical ones, and a prefix takes a quarter of the keys.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from .modifications import DOCUMENT_IDS, PREFIX_LENS
from .packing import typical_lengths

if TYPE_CHECKING:
    from .problem import Problem

DOCUMENT_ROWS = 1024  # of a document, in the mean, where a problem does not say how many there are
PREFIX_SHARE = 4

Span = tuple[int, int]


def document_ends(problem: Problem) -> list[int]:
    """The ends of the documents of a sequence, from 0: one where there are no ids."""
    rows = problem.seqlen_q
    if DOCUMENT_IDS not in problem.modifications:
        return [0, rows]
    count = min(problem.documents or -(-rows // DOCUMENT_ROWS), rows)
    return [0, *accumulate(typical_lengths(count, rows, min(2 * rows // count, rows)))]


def prefix_of(problem: Problem) -> int:
    """The keys of a prefix; none where there is no such modification."""
    if PREFIX_LENS not in problem.modifications:
        return 0
    return -(-problem.seqlen_k // PREFIX_SHARE)


def span_of_query(problem: Problem, query: int, ends: list[int]) -> Span:
    """The keys that a query sees, with the ends of documents; its end may lie before its begin."""
    (left, right), diagonal = problem.window, query + problem.causal_offset
    end = max(min(diagonal + right + 1, problem.seqlen_k), prefix_of(problem))
    return _within_document(problem, query, ends, (max(diagonal - left, 0), end))


def span_of_key(problem: Problem, key: int, ends: list[int]) -> Span:
    """The queries that see a key, likewise."""
    (left, right), diagonal = problem.window, key - problem.causal_offset
    begin = 0 if key < prefix_of(problem) else max(diagonal - right, 0)
    return _within_document(problem, key, ends, (begin, min(diagonal + left + 1, problem.seqlen_q)))


def _within_document(problem: Problem, row: int, ends: list[int], span: Span) -> Span:
    if DOCUMENT_IDS not in problem.modifications:
        return span
    after = bisect_right(ends, row)
    return max(span[0], ends[after - 1]), min(span[1], ends[after])


@lru_cache(maxsize=256)
def visible_pairs(problem: Problem) -> int:
    """Pairs of a row and a key that it sees, of one head of one batch entry."""
    ends = document_ends(problem)
    spans = (span_of_query(problem, query, ends) for query in range(problem.seqlen_q))
    return sum(max(end - begin, 0) for begin, end in spans)
