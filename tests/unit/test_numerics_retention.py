"""The verifier of retention's GPU tests: it passes kernels that round like the GPU kernels, and finds errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.numerics import harness, retention_cases, retnet_cases
from tests.numerics.retention_calls import widened
from tests.numerics.retention_cases import RetentionCase
from tests.numerics.retention_emulation import (
    HOSTS,
    Host,
    HostRetention,
    HostRetentionBackward,
)
from tests.numerics.retnet_cases import RetnetCase

CPU = torch.device("cpu")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MAX_WORK = 2**14  # scores of the listed cases that are run here

Either = RetentionCase | RetnetCase


def small(case: Either) -> bool:
    p = case.problem
    scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
    return scores <= MAX_WORK and max(p.dim_qk, p.dim_v) <= 128 and not case.policy


RETENTION = [case for case in retention_cases.make_cases() if small(case)]
RETNET = [case for case in retnet_cases.every_case() if small(case)]
LISTED = RETENTION[0]
FULL = replace(
    LISTED,
    problem=replace(LISTED.problem, batch=2, heads_q=4, heads_kv=2, seqlen_q=21, seqlen_k=21),
    inputs="dense",
    gammas="mixed",
    scale=0.3,
    initial=True,
    final=True,
    dgamma=True,
)
MASKED = RetnetCase(
    problem=replace(
        FULL.problem, op="retnet", mask="explicit", seqlen_q=13, seqlen_k=24, form="auto"
    ),
    r_grad=True,
    r_clamp_max=40.0,
    scale=0.3,
)


def errors_of(case: Either, kernel: Host | None = None) -> list[str]:
    made = kernel or HOSTS[case.problem.op, case.problem.direction](DTYPES[case.problem.dtype])
    return harness.errors_of(made, case, seed=0, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", RETENTION, ids=lambda case: case.name)
def test_right_retention_kernels_pass(case: RetentionCase) -> None:
    assert errors_of(case.forward("chunkwise")) == []
    assert errors_of(case.backward()) == []


@pytest.mark.parametrize("case", RETNET, ids=lambda case: case.name)
def test_right_retnet_kernels_pass(case: RetnetCase) -> None:
    assert errors_of(case) == []


@pytest.mark.parametrize("gamma", [1.0, 1 - 2**-12])
def test_a_state_beyond_fp16_is_verified_as_strictly(gamma: float) -> None:
    problem = replace(
        retention_cases.HEAVY.problem, seqlen_q=2049, seqlen_k=2049, dim_qk=16, dim_v=16
    )
    case = replace(retention_cases.HEAVY, problem=problem, gammas=gamma)
    call = harness.CALLS["retention", "forward"]
    inputs = {name: buffer.view for name, buffer in call.inputs(case, seed=0, device=CPU).items()}
    references = {name: (ref, low) for name, ref, low in call.references(case, inputs)}
    ref, low = references["final_state"]
    assert float(ref.abs().max()) > 65504
    assert bool(low.isfinite().all())
    assert float((low - ref).abs().max()) < 0.01 * float(ref.abs().max())
    assert float(references["o"][0].abs().max()) < 65504
    assert errors_of(case.forward("chunkwise")) == []
    assert errors_of(case.backward()) == []


def with_change(base: type[Host], change: Callable[[Any], None]) -> Host:
    class Violation(base):  # type: ignore[misc, valid-type]  # a class of the caller's choice
        def compute(self, p: Any) -> None:
            change(p)
            super().compute(p)

    return Violation(DTYPES["fp16"])


def dropped(*names: str) -> Callable[[Any], None]:
    def change(params: Any) -> None:
        for name in names:
            setattr(params, name, None)

    return change


def unnormalised(params: Any) -> None:
    params.r, params.r_grad = None, 0


def assigned(name: str, value: float) -> Callable[[Any], None]:
    return lambda params: setattr(params, name, value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dropped("initial_state"), "o: largest error"),
        (dropped("final_state"), "final_state: 32768 of"),
        (assigned("scale", 0.125), "o: largest error"),
    ],
    ids=["no initial state", "final state not written", "scale hard-wired"],
)
def test_a_forward_kernel_that_ignores_an_argument_is_found(
    change: Callable[[Any], None], complaint: str
) -> None:
    errors = errors_of(FULL, with_change(HostRetention, change))
    assert any(complaint in error for error in errors), errors


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dropped("initial_state"), "dq: largest error"),
        (dropped("initial_state"), "dlog2_gamma: largest error"),
        (dropped("dfinal_state"), "dk: largest error"),
        (dropped("dfinal_state"), "dv: largest error"),
        (dropped("dfinal_state"), "dinitial_state: largest error"),
        (dropped("dlog2_gamma"), "dlog2_gamma: 8 of"),
        (assigned("scale", 0.125), "dk: largest error"),
    ],
)
def test_a_backward_kernel_that_ignores_an_argument_is_found(
    change: Callable[[Any], None], complaint: str
) -> None:
    errors = errors_of(FULL.backward(), with_change(HostRetentionBackward, change))
    assert any(complaint in error for error in errors), errors


@pytest.mark.parametrize(
    ("direction", "change", "complaint"),
    [
        ("forward", assigned("scale", 0.125), "o: largest error"),
        ("forward", assigned("normalize", 0), "o: largest error"),
        ("forward", assigned("r_clamp_max", float("inf")), "r: largest error"),
        ("forward", assigned("causal", 0), "o: largest error"),
        ("backward", assigned("causal", 0), "dk: largest error"),
        ("backward", assigned("r_grad", 0), "dq: largest error"),
        ("backward", assigned("scale", 0.125), "dk: largest error"),
        ("backward", lambda p: setattr(p.dmask, "data", None), "dmask: "),
        ("backward", unnormalised, "dv: largest error"),
    ],
)
def test_a_retnet_kernel_that_ignores_an_argument_is_found(
    direction: Any, change: Callable[[Any], None], complaint: str
) -> None:
    base = HOSTS["retnet", direction]
    problem = replace(MASKED.problem, direction=direction, causal=True, seqlen_q=20)
    case = replace(MASKED, problem=problem)
    assert errors_of(case) == []
    errors = errors_of(case, with_change(base, change))
    assert any(complaint in error for error in errors), errors


def test_an_eager_overflow_does_not_narrow_the_bound() -> None:
    ref, low = torch.tensor([8.0, 8.0, 8.0]), torch.tensor([9.0, 6.0, torch.inf])
    assert widened(ref, low, torch.tensor(2.0)).tolist() == [11.0, 4.0, 10.0]
