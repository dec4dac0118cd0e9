"""Lengths of packed sequences, where their number, their sum and the greatest of them are known."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise


@lru_cache(maxsize=1024)
def typical_lengths(count: int, total: int, longest: int) -> tuple[int, ...]:
    """Lengths that stand for those of a batch, which lie on the GPU and are not read: a power law.

    The sequence of rank x, from 0 for the shortest to 1, has ``longest x^p`` rows, with the p that gives the sum.

    Args:
        count: sequences.
        total: rows of all together.
        longest: rows of the longest one.

    Returns:
        One length for each, the longest first; their sum is ``total``.
    """
    power = max(longest * count / total - 1.0, 0.0)
    shares = [((count - i - 0.5) / count) ** power for i in range(count)]
    scale = total / sum(shares)
    ends, reached = [0], 0.0
    for share in shares:
        reached += scale * share
        ends.append(round(reached))
    ends[-1] = total
    return tuple(end - begin for begin, end in pairwise(ends))
