"""Backward candidates from all over the search space, right on odd shapes and as repeatable as they claim to be."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import harness, sampling
from tests.numerics.sampling import Sampled
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

REPEATS = 20  # on the shape with most CTAs, of kernels that claim equal bits
PLACES = [Sampled(index=i, direction="backward") for i in range(sampling.SAMPLE)]


@pytest.mark.parametrize("sampled", PLACES, ids=lambda each: str(each.index))
def test_candidate(workshop: Workshop, sampled: Sampled, device: torch.device) -> None:
    one = sampled.candidate(workshop.present)
    kernel = workshop.kernel(one)
    *shapes, largest = sampling.cases_of(one)
    runs = [(case, seed, 2) for case in shapes for seed in harness.SEEDS]
    runs.append((largest, 0, REPEATS if one.deterministic else 2))
    for case, seed, repeats in runs:
        wrong = harness.judge(
            kernel,
            case,
            seed=seed,
            device=device,
            deterministic=one.deterministic,
            repeats=repeats,
        )
        assert wrong == [], f"{one.name} on {case.name}"
