"""Which candidates are worth building: the model's best, not all of one kind, and the policy's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.candidate import Candidate
from ..kernels.cost_model import Estimate
from ..kernels.registry import kernel_of

Ranked = tuple[Candidate, Estimate]


def shape_of(candidate: Candidate) -> tuple[object, ...]:
    """The traits of candidates that differ in pipelining, launch bounds or scheduling only."""
    return kernel_of(candidate).describe(candidate).tile


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """The traits that make two candidates of one shape both worth a try: how they feed the MMAs and order the tiles."""
    traits = kernel_of(candidate).describe(candidate)
    return (*traits.tile, *traits.feed)


def shortlist(ranked: Sequence[Ranked], default: Candidate, top_k: int) -> list[Ranked]:
    """The default and ``top_k`` more, best first after it.

    The first half of the ``top_k`` may hold two kinds of one shape, the second half takes one of each shape not chosen
    yet: near-duplicates mostly share their error, and a wrong guess about one shape should not cost the list.
    Where shapes run out, the best of the rest fill up.

    Args:
        ranked: all legal candidates, best first.
        default: the policy's own; taken whatever its rank.
        top_k: how many beside the default.

    Raises:
        ValueError: ``top_k`` is negative.
    """
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}")
    chosen = [pair for pair in ranked if pair[0] == default]
    others = [pair for pair in ranked if pair[0] != default]
    taken: list[Ranked] = []
    rest: list[Ranked] = []
    shapes: Counter[tuple[object, ...]] = Counter()
    kinds: set[tuple[object, ...]] = set()
    for pair in others:
        shape, kind = shape_of(pair[0]), kind_of(pair[0])
        allowed = 2 if len(taken) < (top_k + 1) // 2 else 1
        if len(taken) < top_k and shapes[shape] < allowed and kind not in kinds:
            taken.append(pair)
            shapes[shape] += 1
            kinds.add(kind)
        else:
            rest.append(pair)
    return chosen + taken + rest[: top_k - len(taken)]
