"""Candidates of retnet and retention from all over their search spaces, right on odd shapes and repeatable."""

from __future__ import annotations

import pytest
import torch

from tests.numerics import harness
from tests.numerics.retention_sampling import PLACES, Sampled, cases_of
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

REPEATS = 10  # on the shape with most CTAs, of kernels that claim equal bits


@pytest.mark.parametrize("sampled", PLACES, ids=lambda each: f"{each.kind}-{each.index}")
def test_candidate(workshop: Workshop, sampled: Sampled, device: torch.device) -> None:
    found = sampled.kernels_of(workshop.present)
    if not found:
        pytest.skip("fewer candidates show every value of every knob here")
    (one,) = found
    kernel = workshop.kernel(one)
    *shapes, largest = cases_of(one)
    runs = [(case, 2) for case in shapes]
    runs.append((largest, REPEATS if one.deterministic else 2))
    for seed, (case, repeats) in enumerate(runs):
        wrong = harness.judge(
            kernel,
            case,
            seed=seed,
            device=device,
            deterministic=one.deterministic,
            repeats=repeats,
        )
        assert wrong == [], f"{one.name} on {case.name}"
