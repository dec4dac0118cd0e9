"""Candidates of retnet and retention from all over their search spaces: correct on odd shapes, and deterministic."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import harness
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.retention_sampling import PLACES, Sampled, cases_of

pytestmark = pytest.mark.gpu

REPEATS = 10  # of deterministic kernels on the shape with most CTAs


@pytest.mark.parametrize("sampled", PLACES, ids=lambda place: f"{place.kind}-{place.index}")
def test_candidate(pool: KernelPool, sampled: Sampled, device: torch.device) -> None:
    candidates = sampled.kernels_of(pool.present)
    if not candidates:
        pytest.skip("the sample of this GPU is smaller")
    (candidate,) = candidates
    kernel = pool.kernel(candidate)
    *shapes, largest = cases_of(candidate)
    runs = [(case, 2) for case in shapes]
    runs.append((largest, REPEATS if candidate.deterministic else 2))
    for seed, (case, repeats) in enumerate(runs):
        errors = harness.errors_of(
            kernel,
            case,
            seed=seed,
            device=device,
            deterministic=candidate.deterministic,
            repeats=repeats,
        )
        assert errors == [], f"{candidate.name} on {case.name}"
