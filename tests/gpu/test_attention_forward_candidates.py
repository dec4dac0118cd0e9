"""Candidates from all over the search space, right on odd shapes; and one that was built for an older GPU."""

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
from tests.numerics.sampling import Sampled
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

OLDEST = "80"


@pytest.mark.parametrize(
    "sampled", [Sampled(index=i) for i in range(sampling.SAMPLE)], ids=lambda each: str(each.index)
)
def test_candidate(workshop: Workshop, sampled: Sampled, device: torch.device) -> None:
    one = sampled.candidate(workshop.present)
    kernel = workshop.kernel(one)
    for case in sampling.cases_of(one):
        for seed in harness.SEEDS:
            wrong = harness.judge(kernel, case, seed=seed, device=device)
            assert wrong == [], f"{one.name} on {case.name}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_kernel_of_the_oldest_target_runs_through_its_ptx(
    workshop: Workshop, direction: Direction, device: torch.device
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
    one = workshop.present.default(problem)
    (artifact,) = workshop.build_for([one], BuildTarget(arch=OLDEST))
    assert isinstance(artifact, Artifact), artifact
    kernel = loader.load(artifact)
    kernel.prepare(0)
    wrong = harness.judge(
        kernel, Case(problem=problem), seed=0, device=device, deterministic=one.deterministic
    )
    assert wrong == []
