"""Which kernel of a bundle serves a problem: the rule that the C++ client follows too."""

from __future__ import annotations

from collections.abc import Sequence

from ..codegen.bundle import LAYERS, Bundle, BundledPick
from ..core.problem import Problem
from .lookup import MAX_DISTANCE, distance


def bundled_pick(
    bundle: Bundle, problem: Problem, *, layers: Sequence[str] = LAYERS
) -> BundledPick | None:
    """The pick that serves a problem, or None where none of its class does.

    Layers answer in their order. Within one, the very bucket serves, else the nearest by
    :func:`~.lookup.distance`, ties in the order of the index; the default serves whatever the distance.

    Args:
        bundle: where to look.
        problem: as called.
        layers: that may answer.
    """
    wanted = problem.bucketed()
    for layer in layers:
        bound = float("inf") if layer == "default" else MAX_DISTANCE
        best: tuple[float, BundledPick] | None = None
        for pick in bundle.picks:
            if pick.layer != layer:
                continue
            if pick.problem == wanted:
                return pick
            apart = distance(wanted, pick.problem, bound=bound)
            if apart is not None and (best is None or apart < best[0]):
                best = apart, pick
        if best is not None:
            return best[1]
    return None
