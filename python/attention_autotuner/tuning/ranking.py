"""The order in which a search tries candidates: the cost model's, corrected by what was learned, the default in doubt.

A learned residual is the user's own (``<cache_dir>/models/<arch>.json``, by ``attention-autotuner model fit``), or the
one that comes with the package.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..arch.policy import Policy
from ..core.candidate import Candidate
from ..core.identity import slug
from ..core.memo import remembered
from ..core.problem import Problem
from ..core.trust import parse_json, read_json
from ..errors import RecordError
from ..kernels.cost_model import Estimate, rank
from ..kernels.registry import KERNELS
from ..kernels.residual import Residual
from ..settings import current
from .shortlist import Ranked

LOGGER = logging.getLogger(__name__)

REACH = 4.0  # times the best estimate: no correction brings what is slower to the top
DOUBT = 0.2  # promised gains over the default that are no better than none, see docs/cost_model.md
LEARNED_DOUBT = 0.15  # the same of corrected times
FOLDER = "models"  # under the cache folder
SUFFIX = ".model.json"  # of those that come with the package


def user_path(arch: str) -> Path:
    """Where the user's own residual of an architecture lies, or would lie."""
    return current().cache_dir / FOLDER / f"{slug(arch)}.json"


def learned(policy: Policy) -> Residual | None:
    """The residual in force for a policy; None where there is none, or the user's own is damaged."""
    return _learned(policy.name, user_path(policy.name))


@remembered("models.learned", bound=16)
def _learned(arch: str, path: Path) -> Residual | None:
    try:
        if path.exists():
            return _of(arch, read_json(path))
    except (OSError, ValueError) as error:
        LOGGER.warning("%s is not used: %s", path, error)
        return None
    shipped = files("attention_autotuner.tuned").joinpath(slug(arch) + SUFFIX)
    return _of(arch, parse_json(shipped.read_text("utf-8"))) if shipped.is_file() else None


def _of(arch: str, document: Any) -> Residual:
    residual = Residual.from_json(document)
    if residual.arch != arch:
        raise RecordError(f"it was learned on {residual.arch}, wanted {arch}")
    return residual


def ranked(problem: Problem, policy: Policy) -> list[Ranked]:
    """All candidates that may serve, in the order of :func:`order` under the residual in force, with their estimates.

    The halves of a step and what was searched before ask again; the last answers are kept.
    """
    return list(_ranked(problem, policy, learned(policy), tuple(KERNELS)))


@lru_cache(maxsize=8)
def _ranked(
    problem: Problem, policy: Policy, residual: Residual | None, _kernels: tuple[str, ...]
) -> list[Ranked]:
    return order(problem, policy, rank(problem, policy.served(problem), policy.spec), residual)


def order(
    problem: Problem,
    policy: Policy,
    pairs: Iterable[tuple[Candidate, Estimate]],
    residual: Residual | None,
) -> list[Ranked]:
    """Candidates by their expected times; the default first where nothing is expected to be clearly faster.

    Args:
        problem: what they compute.
        policy: whose default.
        pairs: candidates with their estimates.
        residual: corrects the estimates, here alone.
    """
    pairs = list(pairs)
    reach_us = REACH * min((estimate.us for _, estimate in pairs), default=0.0)
    expected = {candidate: estimate.us for candidate, estimate in pairs}
    if residual is not None:
        for candidate, estimate in pairs:
            if estimate.us <= reach_us:
                expected[candidate] *= residual.correction(problem, candidate, estimate)
    in_order = sorted(pairs, key=lambda pair: (expected[pair[0]], pair[0].name))
    default = policy.untuned(problem)
    if default not in expected:
        return in_order
    best = in_order[0][0]
    known = residual is not None and residual.knows(problem, default, best)
    doubt = LEARNED_DOUBT if known else DOUBT
    if expected[default] <= (1 + doubt) * expected[best]:
        in_order.sort(key=lambda pair: pair[0] != default)
    return in_order
