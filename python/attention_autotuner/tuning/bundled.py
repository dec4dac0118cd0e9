"""Which kernel of a bundle serves a problem: the rule that the C++ client follows too."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..codegen.bundle import LAYERS, Bundle, BundledPick
from ..core.problem import Problem
from .lookup import MAX_DISTANCE, distance, serves_lengths


def listed_as(problem: Problem, layer: str) -> Problem:
    """The problem that a bundle lists a pick of a layer under: bucketed for the user's own, else of rounded lengths."""
    return problem.bucketed() if layer == "record" else problem.rounded()


def bundled_pick(
    bundle: Bundle, problem: Problem, *, layers: Sequence[str] = LAYERS, proven: bool = False
) -> BundledPick | None:
    """The pick that serves a problem, or None where none of its class does.

    Layers answer in their order. Within one, the very bucket serves, of picks that are not the user's own the very
    rounded lengths, else the nearest by :func:`~.lookup.distance`, ties in the order of the index. The default serves
    whatever the distance, shipped picks as :func:`~.lookup.serves_lengths` says.

    Args:
        bundle: where to look.
        problem: as called.
        layers: that may answer.
        proven: measured picks without a proof may not.
    """
    for layer in layers:
        wanted = listed_as(problem, layer)
        bound = inf if layer == "default" else MAX_DISTANCE
        serving = []
        for place, pick in enumerate(bundle.picks):
            if pick.layer != layer or (proven and layer != "default" and pick.proof is None):
                continue
            if layer == "shipped" and not serves_lengths(vars(pick.problem), problem):
                continue
            apart = distance(wanted, pick.problem, bound=bound)
            if apart is not None:
                serving.append((pick.problem != wanted, apart, place))
        if serving:
            return bundle.picks[min(serving)[2]]
    return None
