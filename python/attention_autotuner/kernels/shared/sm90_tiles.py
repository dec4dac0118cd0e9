"""Tiles in shared memory as all kernels of family ``sm90`` hold them."""

from __future__ import annotations

ELEMENT_BYTES = 2  # fp16 and bf16
SWIZZLE_COLUMNS = 64  # head dims are held in whole blocks of so many columns
ALIGNMENT_BYTES = 1024  # of a tile; the start of shared memory may lack it
BARRIER_BYTES = 256
MAX_COLUMNS = 256  # of one WGMMA
BLOCK_COLUMNS = (64, 128)  # of the scores of one step


def whole_columns(columns: int) -> int:
    """Columns of a head dim in whole blocks, as tiles hold them."""
    return -(-columns // SWIZZLE_COLUMNS) * SWIZZLE_COLUMNS
