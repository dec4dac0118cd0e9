"""Forward candidates from all over the search space on odd shapes, and a kernel built for an older GPU."""

from __future__ import annotations

import pytest
import torch

from attention_autotuner.arch import probe
from attention_autotuner.arch.resolution import native_arch
from attention_autotuner.codegen.artifact import Artifact, BuildTarget
from attention_autotuner.core.problem import DIRECTIONS, Direction, Problem
from attention_autotuner.serving import loader
from tests.numerics import harness, sampling
from tests.numerics.cases import Case
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.sampling import Sampled

pytestmark = pytest.mark.gpu

OLDEST = "80"


@pytest.mark.parametrize(
    "sampled",
    [Sampled(index=i) for i in range(sampling.SAMPLE)],
    ids=lambda place: str(place.index),
)
def test_candidate(pool: KernelPool, sampled: Sampled, device: torch.device) -> None:
    candidate = sampled.candidate(pool.present)
    kernel = pool.kernel(candidate)
    for case in sampling.cases_of(candidate):
        for seed in harness.SEEDS:
            errors = harness.errors_of(kernel, case, seed=seed, device=device)
            assert errors == [], f"{candidate.name} on {case.name}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_of_the_oldest_target_runs_through_its_ptx(
    pool: KernelPool, direction: Direction, device: torch.device
) -> None:
    if native_arch(probe(0).compute_capability) == OLDEST:
        pytest.skip("this GPU is the oldest target itself")
    problem = Problem(
        direction=direction,
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=257,
        seqlen_k=391,
        dim_qk=32,
        dim_v=32,
        causal=True,
    )
    candidate = pool.present.on((8, 0)).default(problem)
    (artifact,) = pool.build_for([candidate], BuildTarget(arch=OLDEST))
    assert isinstance(artifact, Artifact), artifact
    kernel = loader.load(artifact)
    kernel.prepare(0)
    errors = harness.errors_of(
        kernel, Case(problem=problem), seed=0, device=device, deterministic=candidate.deterministic
    )
    assert errors == []
