"""Backward candidates from all over the search space: correct on odd shapes, and deterministic where declared so."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from tests.numerics import harness, sampling
from tests.numerics.cases import Case
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.sampling import Sampled

pytestmark = pytest.mark.gpu

REPEATS = 20  # of deterministic kernels on the shape with most CTAs


@dataclass(frozen=True)
class ManyHeads:
    """A candidate by words of its name, on more heads than have sums of dQ at a time where those are recycled."""

    words: str
    dim: int
    causal: bool
    heads_kv: int = 64

    @property
    def problem(self) -> Problem:
        return Problem(
            direction="backward",
            batch=6,
            heads_q=64,
            heads_kv=self.heads_kv,
            seqlen_q=512,
            seqlen_k=512,
            dim_qk=self.dim,
            dim_v=self.dim,
            causal=self.causal,
        )

    def candidate(self, present: Policy) -> Candidate:
        """The kernel under the policy of the present GPU: its default where it has none by these words."""
        named = (c for c in present.legal(self.problem) if self.words in c.name)
        return next(named, present.default(self.problem))


ENDED = [
    ManyHeads(words="recycled", dim=64, causal=False),
    ManyHeads(words="recycled", dim=128, causal=True),
    ManyHeads(words="recycled", dim=128, causal=False, heads_kv=32),
    ManyHeads(words="last_adder", dim=96, causal=True),
]
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


@pytest.mark.parametrize("many", ENDED, ids=lambda many: f"{many.words}-{many.dim}-{many.causal}")
def test_dq_of_many_heads(pool: KernelPool, many: ManyHeads, device: torch.device) -> None:
    kernel = pool.kernel(many.candidate(pool.present))
    case = Case(problem=many.problem)
    for seed in harness.SEEDS:
        errors = harness.errors_of(kernel, case, seed=seed, device=device, deterministic=False)
        assert errors == [], case.name
