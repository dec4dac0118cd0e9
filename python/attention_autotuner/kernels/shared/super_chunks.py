"""Super-chunks of retention: the cuts of a sequence, and the pieces in which their states are summed."""

from __future__ import annotations

from dataclasses import dataclass

# As SuperChunks in host/super_chunks.cuh has them: CTAs that are enough, and pieces of each where they are fewer.
ENOUGH_PIECES = 128
MAX_PIECES = 4
WHOLE_SEQUENCE = 2**30  # tokens of a super-chunk where no packed sequence is cut


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


@dataclass(frozen=True, kw_only=True)
class SuperChunks:
    """The cuts of a sequence; the twin of ``SuperChunks`` in ``host/super_chunks.cuh``.

    Attributes:
        chunks: of the sequence.
        super_chunk: tokens.
        supers: super-chunks of the sequence.
        slots: states of the sequence that are stored, one a piece.
    """

    chunks: int
    super_chunk: int
    supers: int
    slots: int

    @property
    def divided(self) -> bool:
        """True where sequences have more than one, as far as one knows."""
        return self.supers > 1 and self.super_chunk < WHOLE_SEQUENCE

    @classmethod
    def of(cls, seqlen: int, chunk: int, wanted: int, ctas: int) -> SuperChunks:
        """The cut of a sequence.

        Args:
            seqlen: its tokens.
            chunk: tokens of a step.
            wanted: tokens of a super-chunk; 0 for the whole sequence.
            ctas: that work on each super-chunk.
        """
        chunks = -(-seqlen // chunk)
        super_chunk = wanted if 0 < wanted < seqlen else chunks * chunk
        supers = -(-seqlen // super_chunk)
        pieces = 1 if supers == 1 else pieces_of(super_chunk, chunk=chunk, ctas=ctas * (supers - 1))
        return cls(
            chunks=chunks,
            super_chunk=super_chunk,
            supers=supers,
            slots=-(-seqlen // (super_chunk // pieces)),
        )
