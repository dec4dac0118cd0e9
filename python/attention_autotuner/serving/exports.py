"""The content of a bundle: problems of the common classes, the user's own, and the kernels that serve them.

A bundle may be for a GPU that is not here. Records are then compared with that GPU's name and nothing else: the rest of
its environment is unknown until the bundle arrives there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from ..arch import Policy, detect
from ..codegen.bundle import BundledPick
from ..core.candidate import Candidate
from ..core.problem import DTYPES, Problem, of_shape
from ..errors import UnsupportedArchitectureError, UnsupportedProblemError
from ..tuning.bundled import listed_as
from ..tuning.environment import Environment, collect
from ..tuning.lookup import Hit
from ..tuning.record_schema import TuningRecord
from .picks import CacheHierarchy
from .untuned import refuse_untuned

COMMON_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))  # dim_qk, dim_v
# Batch, heads and seqlen that stand for the rest of a class: picks serve their neighbourhood, the default what remains.
SHAPES = ((4, 16, 4096), (32, 16, 512), (1, 16, 16384))


def common_problems(shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[Problem]:
    """Attention's problems of the common classes: every dtype, direction, and mask.

    Backward is wanted both as fast as can be and reproducible bit for bit.

    Args:
        shapes: batch, heads and seqlen of each class.
    """
    kinds: list[dict[str, Any]] = [{"direction": "forward"}, {"direction": "backward"}]
    kinds.append({"direction": "backward", "deterministic": True})
    return [
        of_shape((*shape, *dims), dtype=dtype, causal=causal, **kind)
        for dims, dtype, kind, causal, shape in product(
            COMMON_DIMS, DTYPES, kinds, (False, True), shapes
        )
    ]


def own_records(
    policy: Policy, hierarchy: CacheHierarchy, environment: Environment
) -> list[TuningRecord]:
    """The user's records for a policy on the GPU of an environment, save those that no bundle holds."""
    return [
        record
        for _, record in hierarchy.records.records()
        if record.arch == policy.name
        and record.environment.gpu_name == environment.gpu_name
        and not record.problem.compiled_modifications
    ]


def environment_of(
    policy: Policy, hierarchy: CacheHierarchy, gpu_name: str | None = None
) -> Environment:
    """The environment that records are compared with, of the GPU that a bundle is for.

    Args:
        policy: whose spec says which GPUs it is for.
        hierarchy: whose records may know such a GPU.
        gpu_name: the driver's name of the GPU; by default the one that is present, if it is of the policy's spec, else
            the one that records know.

    Raises:
        UnsupportedArchitectureError: records know several such GPUs.
    """
    if gpu_name is not None:
        return Environment(gpu_name=gpu_name)
    if _is_present(policy):
        return collect(0)
    known = hierarchy.gpus_of(policy)
    if len(known) > 1:
        raise UnsupportedArchitectureError(
            f"records know several GPUs of {policy.spec.name}: name one with --gpu-name: {', '.join(known)}"
        )
    return hierarchy.environment_of(policy, Environment())


def _is_present(policy: Policy) -> bool:
    try:
        return detect().spec.name == policy.spec.name
    except UnsupportedArchitectureError:
        return False


def choose_picks(
    problems: Iterable[Problem],
    policy: Policy,
    hierarchy: CacheHierarchy,
    environment: Environment,
    *,
    with_records: bool = True,
    lean: bool = False,
) -> list[BundledPick]:
    """The picks that serve these problems, and everything else of their kinds.

    Args:
        problems: as called.
        policy: for which GPU.
        hierarchy: asked as by a call.
        environment: of that GPU, see :func:`environment_of`.
        with_records: the user's own records count.
        lean: a pick serves the rest of its kind too, where else the policy's default does: fewer kernels.

    Raises:
        NoCandidateError: the policy has nothing legal for a problem.
        UnsupportedProblemError: a problem has score modifications, which the readers of bundles do not know.
        UntunedError: nobody measured a problem, and the settings want that.
    """
    chosen: dict[Problem, BundledPick] = {}
    defaults: dict[tuple[tuple[Any, ...], Candidate, Problem | None], BundledPick] = {}
    for problem in dict.fromkeys(problem.rounded() for problem in problems):
        names = problem.compiled_modifications
        if names:
            raise UnsupportedProblemError(f"bundles hold no score modifications yet, got {names}")
        pick, hit = hierarchy.choose(problem, policy, environment, with_records=with_records)
        if hit is None:
            refuse_untuned(problem, policy.name, hierarchy.settings)
        default = policy.untuned(problem)
        if hit is not None:
            recorded = listed_as(problem, hit.layer)
            chosen.setdefault(recorded, _bundled(recorded, hit))
            default = pick.candidate if lean else default
        # Defaults that go by tiles differ from length to length, so that the nearest one of another is a poor guess.
        place = problem if problem.goes_by_tiles else None
        defaults.setdefault(
            (kind_of(problem), default, place),
            BundledPick(problem=problem, candidate=default, layer="default"),
        )
    return [*chosen.values(), *defaults.values()]


def kind_of(problem: Problem) -> tuple[Any, ...]:
    """The fields that a problem shares with all that its default serves."""
    kernel = ("op", "direction", "dtype", "padded_dim_qk", "padded_dim_v", "causal")
    names = (*kernel, "alignment_bytes", "deterministic", "mask", "form", "key_bounds")
    return tuple(getattr(problem, name) for name in names)


def _bundled(problem: Problem, hit: Hit) -> BundledPick:
    """A pick with its proof, and with its time and its estimate where they are of this very problem."""
    return BundledPick(
        problem=problem,
        candidate=hit.candidate,
        layer=hit.layer,
        gpu_name=hit.gpu_name,
        median_us=hit.median_us if hit.exact else None,
        estimate_us=hit.estimate_us if hit.exact else None,
        proof=hit.proof,
    )
