"""Masked, normalised retention on hundreds of calls: results by the error rule, determinism and memory bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Direction
from attention_autotuner.errors import ArtifactError
from attention_autotuner.kernels.scores_backward_sm90.resources import ScoreBands
from tests.launchers import verify
from tests.numerics import harness, large_offsets, retnet_cases
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.retnet_cases import RetnetCase

pytestmark = pytest.mark.gpu

CASES = list(retnet_cases.every_case())
# What family sm90 offers beside the default.
OTHERS = [
    replace(case, kernel="attention_backward_sm90")
    for case in CASES
    if case.problem.direction == "backward"
    and case.problem.alignment_bytes == 16
    and case.explicit
    and max(case.problem.dim_qk, case.problem.dim_v) <= 64
    and not case.policy
]
MAX_BUILDS = 4 * len(retnet_cases.GROUPS)
BASE = CASES[0]
PLAIN = RetnetCase(
    problem=replace(
        BASE.problem,
        batch=2,
        heads_q=2,
        heads_kv=2,
        seqlen_q=40,
        seqlen_k=40,
        dim_qk=64,
        dim_v=64,
        causal=False,
    )
)
BACKWARD = replace(PLAIN.problem, direction="backward")
# Every stage of shared memory is filled several times.
LONG = replace(
    PLAIN.problem,
    heads_q=4,
    seqlen_q=1000,
    seqlen_k=1096,
    dim_qk=128,
    dim_v=128,
)
# Most of the rows that see a key see few keys, and a decay leaves fewer that count.
FEW_KEYS = replace(
    PLAIN,
    problem=replace(
        BACKWARD,
        mask="decay",
        causal=True,
        dtype="bf16",
        heads_q=1,
        heads_kv=1,
        seqlen_q=2072,
        seqlen_k=319,
        dim_qk=96,
        dim_v=96,
    ),
    r_grad=True,
)
# Several bands of scores, whichever kernel stores them.
BANDED = replace(
    BACKWARD,
    batch=40,
    heads_q=12,
    heads_kv=6,
    seqlen_q=136,
    seqlen_k=200,
    dim_qk=120,
    dim_v=248,
)
FAR = {"forward": PLAIN, "backward": replace(PLAIN, problem=BACKWARD)}


def test_few_builds_serve_all_calls(pool: KernelPool) -> None:
    assert len(CASES) >= 200
    assert len(retnet_cases.builds(CASES, pool.present)) <= MAX_BUILDS


@pytest.mark.parametrize("case", CASES + OTHERS, ids=lambda case: case.name)
def test_call(pool: KernelPool, case: RetnetCase, device: torch.device) -> None:
    candidate = case.candidate(pool.present)
    kernel = pool.kernel(candidate)
    for seed in harness.SEEDS:
        errors = harness.errors_of(
            kernel, case, seed=seed, device=device, deterministic=candidate.deterministic
        )
        assert errors == [], candidate.name


@pytest.mark.parametrize("gamma", [None, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("case", [FEW_KEYS], ids=lambda case: case.name)
def test_a_gradient_through_r_of_rows_that_see_few_keys(
    pool: KernelPool, case: RetnetCase, gamma: float | None, device: torch.device
) -> None:
    candidate = case.candidate(pool.present)
    kernel, case = pool.kernel(candidate), replace(case, gamma=gamma)
    for seed in range(8):
        errors = harness.errors_of(
            kernel, case, seed=seed, device=device, deterministic=candidate.deterministic
        )
        assert errors == [], (candidate.name, seed)
    outcome = verify(
        case.problem,
        kernel,
        deterministic=candidate.deterministic,
        seeds=range(4),
        device=device,
    )
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("axis", large_offsets.STRIDES)
@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_offsets_beyond_32_bits(
    pool: KernelPool, case: RetnetCase, axis: str, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    assert large_offsets.errors_of(kernel, case, axis, device) == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_are_not_overwritten_while_they_are_read(
    pool: KernelPool, direction: Direction, dim: int, device: torch.device
) -> None:
    problem = replace(LONG, direction=direction, dim_qk=dim, dim_v=dim)
    case = replace(PLAIN, problem=problem)
    candidate = case.candidate(pool.present)
    kernel = pool.kernel(candidate)
    for seed in harness.SEEDS:
        errors = harness.errors_of(
            kernel, case, seed=seed, device=device, deterministic=candidate.deterministic
        )
        assert errors == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("r_grad", [False, True])
def test_scores_that_are_stored_by_bands(
    pool: KernelPool, causal: bool, r_grad: bool, device: torch.device
) -> None:
    many = replace(BANDED, heads_q=24, heads_kv=24, seqlen_q=1024, seqlen_k=1024)
    offered = (c for c in pool.present.legal(many) if getattr(c.knobs, "stored_dk", None))
    candidate = next(offered, None)
    if candidate is None:
        pytest.skip("no kernel of this GPU stores scores")
    kernel = pool.kernel(candidate)
    problem = replace(BANDED, causal=causal)
    assert ScoreBands.of(problem, candidate).count > 1
    case = RetnetCase(problem=problem, r_grad=r_grad)
    for seed in harness.SEEDS:
        assert harness.errors_of(kernel, case, seed=seed, device=device, deterministic=True) == []


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_a_kernel_refuses_unsupported_tensors(
    pool: KernelPool, case: RetnetCase, device: torch.device
) -> None:
    kernel = pool.kernel(case.candidate(pool.present))
    with pytest.raises(ArtifactError, match="copy width"):
        harness.errors_of(kernel, replace(case, inputs="unaligned"), seed=0, device=device)
    odd = replace(case, problem=replace(case.problem, seqlen_k=37))
    with pytest.raises(ArtifactError, match="copy width"):  # rows of the mask
        harness.errors_of(kernel, odd, seed=0, device=device)


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_a_causal_problem_ignores_mask_values_above_the_diagonal(
    pool: KernelPool, case: RetnetCase, device: torch.device
) -> None:
    """Bit for bit, both in skipped tiles and in tiles that the diagonal crosses."""
    problem = replace(case.problem, causal=True, seqlen_q=72, seqlen_k=200)
    case = replace(case, problem=problem)
    candidate = case.candidate(pool.present)
    call, kernel = harness.call_of(case), pool.kernel(candidate)
    inputs = call.inputs(case, seed=0, device=device)
    references = list(call.references(case, {name: buffer.view for name, buffer in inputs.items()}))
    runs = []
    for garbage in (1.0, -3000.0):
        above = torch.ones_like(inputs["mask"].view, dtype=torch.bool).triu(1 + 200 - 72)
        inputs["mask"].view.masked_fill_(above, garbage)
        assert (
            harness.errors_on(
                kernel,
                case,
                inputs,
                references,
                device=device,
                deterministic=candidate.deterministic,
            )
            == []
        )
        runs.append(harness.Run(kernel, case, inputs, device))
    if candidate.deterministic:
        for name, buffer in runs[0].written.items():
            assert torch.equal(buffer.bits, runs[1].written[name].bits), name
