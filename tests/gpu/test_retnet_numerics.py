"""Masked, normalised retention on hundreds of calls, by the error rule and beyond it: see ``tests/numerics``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.problem import Direction
from attention_autotuner.errors import ArtifactError
from attention_autotuner.tuning.verify import verify
from tests.numerics import far, harness, retnet_cases
from tests.numerics.retnet_cases import RetnetCase
from tests.numerics.workshop import Workshop

pytestmark = pytest.mark.gpu

CASES = list(retnet_cases.every_case())
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
# Of the rows that see a key, most see few, and a decay leaves them fewer.
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
FAR = {"forward": PLAIN, "backward": replace(PLAIN, problem=BACKWARD)}


def test_few_builds_serve_all_calls(workshop: Workshop) -> None:
    assert len(CASES) >= 200
    assert len(retnet_cases.builds(CASES, workshop.present)) <= MAX_BUILDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_call(workshop: Workshop, case: RetnetCase, device: torch.device) -> None:
    one = case.candidate(workshop.present)
    kernel = workshop.kernel(one)
    for seed in harness.SEEDS:
        wrong = harness.judge(
            kernel, case, seed=seed, device=device, deterministic=one.deterministic
        )
        assert wrong == [], one.name


@pytest.mark.parametrize("gamma", [None, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("case", [FEW_KEYS], ids=lambda case: case.name)
def test_a_gradient_through_r_of_rows_that_see_few_keys(
    workshop: Workshop, case: RetnetCase, gamma: float | None, device: torch.device
) -> None:
    one = case.candidate(workshop.present)
    kernel, case = workshop.kernel(one), replace(case, gamma=gamma)
    for seed in range(8):
        wrong = harness.judge(
            kernel, case, seed=seed, device=device, deterministic=one.deterministic
        )
        assert wrong == [], (one.name, seed)
    outcome = verify(case.problem, kernel, deterministic=one.deterministic, seeds=range(4))
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("axis", far.STRIDES)
@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_offsets_beyond_32_bits(
    workshop: Workshop, case: RetnetCase, axis: str, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    assert far.judge(kernel, case, axis, device) == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_are_not_overwritten_while_they_are_read(
    workshop: Workshop, direction: Direction, dim: int, device: torch.device
) -> None:
    problem = replace(LONG, direction=direction, dim_qk=dim, dim_v=dim)
    case = replace(PLAIN, problem=problem)
    kernel = workshop.kernel(case.candidate(workshop.present))
    for seed in harness.SEEDS:
        assert harness.judge(kernel, case, seed=seed, device=device, deterministic=True) == []


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_a_kernel_refuses_what_it_cannot_read(
    workshop: Workshop, case: RetnetCase, device: torch.device
) -> None:
    kernel = workshop.kernel(case.candidate(workshop.present))
    with pytest.raises(ArtifactError, match="copy width"):
        harness.judge(kernel, replace(case, inputs="unaligned"), seed=0, device=device)
    odd = replace(case, problem=replace(case.problem, seqlen_k=37))
    with pytest.raises(ArtifactError, match="copy width"):  # rows of the mask
        harness.judge(kernel, odd, seed=0, device=device)


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
def test_the_causal_promise_hides_what_stands_above_the_diagonal(
    workshop: Workshop, case: RetnetCase, device: torch.device
) -> None:
    """Not only in tiles that are skipped: in those that the diagonal crosses as well, bit for bit."""
    problem = replace(case.problem, causal=True, seqlen_q=72, seqlen_k=200)
    case = replace(case, problem=problem)
    one = case.candidate(workshop.present)
    call, kernel = harness.call_of(case), workshop.kernel(one)
    given = call.inputs(case, seed=0, device=device)
    truths = list(call.truths(case, {name: held.view for name, held in given.items()}))
    runs = []
    for garbage in (1.0, -3000.0):
        above = torch.ones_like(given["mask"].view, dtype=torch.bool).triu(1 + 200 - 72)
        given["mask"].view.masked_fill_(above, garbage)
        assert (
            harness.judge_on(
                kernel, case, given, truths, device=device, deterministic=one.deterministic
            )
            == []
        )
        runs.append(harness.Run(kernel, case, given, device))
    if one.deterministic:
        for name, held in runs[0].written.items():
            assert torch.equal(held.bits, runs[1].written[name].bits), name
