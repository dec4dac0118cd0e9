"""The names of what bends the scores of attention between scale and softmax, and of what says which there are."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import UnsupportedProblemError

WINDOW = "window"
PACKED = "packed"
PREFIX_LENS, DOCUMENT_IDS = SPANNED = ("prefix_lens", "document_ids")
"""Those that leave each row a span of keys: a kernel finds all spans first, and others are compiled for spans."""
SPANS = "spans"
VALUED = ("softcap", "alibi_slopes", "bias_table", "attn_mask", "sinks", *SPANNED)
"""Names that a problem says, in the order in which kernels apply them: those of arguments and of C++ classes."""
MODIFICATIONS = (*VALUED, WINDOW)
"""All that bend scores."""
COMPILED = (*(name for name in MODIFICATIONS if name not in SPANNED), PACKED, SPANS)
"""All that kernels are compiled with; a kernel that bends scores need not pack."""
MAX_BIAS_DISTANCE = 2**16
"""The greatest distance that has an entry of its own in a bias table; the twin of ``BiasTable::kMaxDistance``."""
TYPICAL_BIAS_DISTANCE = 128
"""That of T5, for what must be said before there is a table."""


def in_order(names: Iterable[str], known: tuple[str, ...] = COMPILED) -> tuple[str, ...]:
    """The names without repeats, in the order of those known.

    Raises:
        UnsupportedProblemError: there is no such modification.
    """
    if not (present := set(names)):
        return ()
    for name in sorted(present - set(known)):
        raise UnsupportedProblemError(f"modifications must be of {known}, got {name!r}")
    return tuple(name for name in known if name in present)
