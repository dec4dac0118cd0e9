"""Lengths of packed sequences, where their number, their sum and the greatest of them are known."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise


@lru_cache(maxsize=1024)
def typical_lengths(count: int, total: int, longest: int) -> tuple[int, ...]:
    """Lengths that stand for those of a batch, which lie on the GPU and are not read: a power law.

    The sequence of rank x, from 0 for the shortest to 1, has ``longest x^p`` rows, with the p that gives the sum. Where
    that leaves some empty, all have a row to begin with if there are enough: as tokens have that are decoded beside
    prompts.

    Args:
        count: sequences.
        total: rows of all together.
        longest: rows of the longest one.

    Returns:
        One length for each, the longest first; their sum is ``total``.
    """
    lengths = _power_law(count, total, longest)
    rest = total - count
    if lengths[-1] > 0 or rest < 0:
        return lengths
    return (
        tuple(1 + rows for rows in _power_law(count, rest, longest - 1)) if rest else (1,) * count
    )


def _power_law(count: int, total: int, longest: int) -> tuple[int, ...]:
    power = max(longest * count / total - 1.0, 0.0)
    shares = [((count - i - 0.5) / count) ** power for i in range(count)]
    scale = total / sum(shares)
    ends, reached = [0], 0.0
    for share in shares:
        reached += scale * share
        ends.append(round(reached))
    ends[-1] = total
    return tuple(end - begin for begin, end in pairwise(ends))
