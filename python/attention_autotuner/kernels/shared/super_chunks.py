"""Super-chunks of retention: how the pass that sums their states divides them."""

from __future__ import annotations

STATE_BYTES = 4  # of an element, fp32

# As SuperChunks in host/super_chunks.cuh has them: CTAs that are enough, and pieces of each where they are fewer.
ENOUGH_PIECES = 128
MAX_PIECES = 4


def pieces_of(super_chunk: int, *, chunk: int, ctas: int) -> int:
    """Pieces of a super-chunk, each summed by a CTA of its own.

    Args:
        super_chunk: tokens of one.
        chunk: tokens of a step.
        ctas: CTAs of the pass where it does not divide its super-chunks.
    """
    pieces = 1
    while (
        pieces < MAX_PIECES
        and super_chunk % (2 * pieces * chunk) == 0
        and 2 * pieces * ctas <= ENOUGH_PIECES
    ):
        pieces *= 2
    return pieces
