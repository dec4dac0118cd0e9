"""Backward candidates from all over the search space: correct on odd shapes, and deterministic where declared so."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import harness, sampling
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.sampling import Sampled

pytestmark = pytest.mark.gpu

REPEATS = 20  # of deterministic kernels on the shape with most CTAs
PLACES = [Sampled(index=i, direction="backward") for i in range(sampling.SAMPLE)]


@pytest.mark.parametrize("sampled", PLACES, ids=lambda place: str(place.index))
def test_candidate(pool: KernelPool, sampled: Sampled, device: torch.device) -> None:
    candidate = sampled.candidate(pool.present)
    kernel = pool.kernel(candidate)
    *shapes, largest = sampling.cases_of(candidate)
    runs = [(case, seed, 2) for case in shapes for seed in harness.SEEDS]
    runs.append((largest, 0, REPEATS if candidate.deterministic else 2))
    for case, seed, repeats in runs:
        errors = harness.errors_of(
            kernel,
            case,
            seed=seed,
            device=device,
            deterministic=candidate.deterministic,
            repeats=repeats,
        )
        assert errors == [], f"{candidate.name} on {case.name}"
