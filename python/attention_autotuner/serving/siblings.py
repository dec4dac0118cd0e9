"""Kernels of one class, of which another serves where a graph is captured and a problem's own is not ready."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..arch import Policy
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..kernels.legality import check
from .loader import LoadedKernel

_log = logging.getLogger(__name__)


def warm_sibling(
    problem: Problem,
    policy: Policy,
    ready: Mapping[tuple[Candidate, int], LoadedKernel],
    device: int,
) -> LoadedKernel | None:
    """A ready kernel that computes a problem as well, the latest first; None where there is none.

    Nothing may be built while a graph is captured. Defaults go by the number of tiles, so another length may have
    another kernel than those that are ready.

    Args:
        problem: as called.
        policy: whose candidates.
        ready: by candidate and device.
        device: CUDA device index.
    """
    for candidate, place in reversed(list(ready)):
        if place != device or (problem.deterministic and not candidate.deterministic):
            continue
        try:
            serves = Candidate.of(problem, candidate.knobs) == candidate
        except TypeError:  # of another operation or direction
            continue
        if serves and check(candidate, policy.spec) is None:
            _log.warning(
                "%s serves %s in a graph, as its own kernel is not ready; call it once before the capture",
                candidate.name,
                problem.describe(),
            )
            return ready[candidate, place]
    return None
