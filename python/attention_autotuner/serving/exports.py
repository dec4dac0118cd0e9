"""What goes into a bundle: problems of the common classes, the user's own, and what serves them.

A bundle may be for a GPU that is not here. Records are then compared with that GPU's name and nothing else: the rest of
its environment is unknown until the bundle arrives there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..arch import Policy, detect
from ..codegen.bundle import BundledPick
from ..core.candidate import Candidate
from ..core.problem import DTYPES, Problem, of_shape
from ..errors import UnsupportedArchitectureError, UnsupportedProblemError
from ..tuning.environment import Environment, collect
from ..tuning.lookup import Hit
from ..tuning.record_schema import TuningRecord
from ..tuning.shipped import shipped_gpus
from .picks import Found, Layers

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


def read_problems(path: Path) -> list[Problem]:
    """Problems from a JSON file: a list of objects with fields of :class:`~..core.problem.Problem`, all optional.

    Raises:
        UnsupportedProblemError: the file holds something else, or a problem that no kernel here solves.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = [Problem(**each) for each in data]
    except (TypeError, ValueError) as error:
        raise UnsupportedProblemError(
            f"{path} must hold a JSON list of problems: {error}"
        ) from error
    if not found:
        raise UnsupportedProblemError(f"{path} must hold a JSON list of problems: it is empty")
    return found


def own_records(policy: Policy, layers: Layers, environment: Environment) -> list[TuningRecord]:
    """The user's records for a policy on the GPU of an environment."""
    return [
        record
        for _, record in layers.records.records()
        if record.arch == policy.name and record.environment.gpu_name == environment.gpu_name
    ]


def environment_of(policy: Policy, layers: Layers, gpu_name: str | None = None) -> Environment:
    """The environment that records are compared with.

    Args:
        policy: whose spec says which GPUs it is for.
        layers: whose records may know such a GPU.
        gpu_name: the driver's name of the GPU; by default the one that is present, if it is of the policy's spec, else
            the one that records know.

    Raises:
        UnsupportedArchitectureError: records know several such GPUs.
    """
    if gpu_name is not None:
        return Environment(gpu_name=gpu_name)
    if _is_present(policy):
        return collect(0)
    measured = {record.environment.gpu_name for _, record in layers.records.records()}
    known = sorted(
        name
        for name in {*measured, *shipped_gpus()}
        if name is not None and any(part in name for part in policy.spec.device_names)
    )
    if len(known) > 1:
        raise UnsupportedArchitectureError(
            f"records know several GPUs of {policy.spec.name}: name one with --gpu-name: {', '.join(known)}"
        )
    return Environment(gpu_name=known[0] if known else policy.spec.name)


def _is_present(policy: Policy) -> bool:
    try:
        return detect().spec.name == policy.spec.name
    except UnsupportedArchitectureError:
        return False


def choose_picks(
    problems: Iterable[Problem],
    policy: Policy,
    layers: Layers,
    environment: Environment,
    *,
    own: bool = True,
    lean: bool = False,
) -> list[BundledPick]:
    """What serves these problems, and everything else of their kinds.

    Args:
        problems: as called.
        policy: for which GPU.
        layers: that are asked, in the order of a call.
        environment: of that GPU, see :func:`environment_of`.
        own: whether the user's records count.
        lean: a pick serves the rest of its kind too, where else the policy's default does: fewer kernels.

    Raises:
        NoCandidateError: the policy has nothing legal for a problem.
    """
    chosen: list[BundledPick] = []
    defaults: dict[tuple[Any, ...], dict[Candidate, BundledPick]] = {}
    for problem in dict.fromkeys(each.bucketed() for each in problems):
        pick, found = layers.choose(problem, policy, environment, own=own)
        default = policy.default(problem)
        if found is not None:
            chosen.append(_bundled(problem, pick.candidate, found))
            default = pick.candidate if lean else default
        of_kind = defaults.setdefault(kind_of(problem), {})
        of_kind.setdefault(
            default, BundledPick(problem=problem, candidate=default, layer="default")
        )
    return chosen + [pick for of_kind in defaults.values() for pick in of_kind.values()]


def kind_of(problem: Problem) -> tuple[Any, ...]:
    """What a problem has in common with all that its default serves."""
    names = (
        "op",
        "direction",
        "dtype",
        "padded_dim_qk",
        "padded_dim_v",
        "causal",
        "alignment_bytes",
    )
    return tuple(getattr(problem, name) for name in (*names, "deterministic", "mask", "form"))


def _bundled(problem: Problem, candidate: Candidate, found: Found) -> BundledPick:
    """A pick with what was measured or estimated of this very problem."""
    median = gpu_name = None
    if isinstance(found, Hit):
        entry = found.record.picked
        gpu_name = found.record.environment.gpu_name
        estimate = entry.estimate_us
        if found.exact and entry.measurement is not None:
            median = entry.measurement.median_us
    else:
        estimate = found.pick.estimate_us
    return BundledPick(
        problem=problem,
        candidate=candidate,
        layer=found.layer,
        gpu_name=gpu_name,
        median_us=median,
        estimate_us=estimate if found.exact else None,
    )
