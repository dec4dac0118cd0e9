"""Headings and cells of the tables of candidates that the command line prints, as several kernels share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...core.candidate import Candidate

FORWARD_COLUMNS = ("family", "tile", "warps", "stages", "slices", "schedule", "more")
BACKWARD_COLUMNS = ("family", "plan", "passes", "schedule", "more")
RETENTION_COLUMNS = ("family", "form", "chunks", "kernels", "more")


def cells(
    columns: tuple[str, ...], candidate: Candidate, *words: str, more: tuple[str, ...] = ()
) -> Mapping[str, str]:
    """A row: the family, the words under the columns between, and what else is to say or a dash."""
    copies = "" if candidate.copy_bytes == 16 else f"{candidate.copy_bytes}-byte copies"
    last = ", ".join(word for word in (*more, copies) if word) or "-"
    return dict(zip(columns, (candidate.family, *words, last), strict=True))


def backward_cells(candidate: Candidate, plan: str, *more: str) -> Mapping[str, str]:
    """A row of a backward over scores: its passes, under the word for how results are shared out among them."""
    knobs = candidate.knobs
    sure = "deterministic" if knobs.deterministic else ""
    words = (plan, pass_words(knobs.passes), order_words(knobs.cta_order))
    return cells(BACKWARD_COLUMNS, candidate, *words, more=(*more, sure))


def pass_words(passes: Mapping[str, Any]) -> str:
    """Passes by name as words."""
    return " ".join(f"{name}:{knobs.label}" for name, knobs in passes.items())


def pass_stratum(passes: Mapping[str, Any], tile: Callable[[Any], tuple[int, ...]]) -> list[object]:
    """Rows, columns, warps and stages of passes, whose tiles begin with their rows and columns."""
    return [
        (*tile(knobs)[:2], knobs.num_threads // 32, knobs.num_stages) for knobs in passes.values()
    ]


def order_words(cta_order: str) -> str:
    """A raster order as words."""
    return cta_order.replace("_", " ")


def bound_words(ctas_per_sm: int) -> str:
    """A launch bound as words; empty for one CTA."""
    return f"{ctas_per_sm} CTAs/SM" if ctas_per_sm > 1 else ""


def chunk_words(chunk: int, super_chunk: int) -> str:
    """The tokens of a chunk and of a super-chunk as words."""
    return f"{chunk} of {super_chunk}" if super_chunk else str(chunk)
