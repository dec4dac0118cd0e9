"""The judges of retention's GPU tests: they pass kernels that round as real ones do, and see what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.numerics import harness, retention_cases, retnet_cases
from tests.numerics.retention_calls import excused
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
MAX_WORK = 2**14  # scores of the listed cases that are tried here

Either = RetentionCase | RetnetCase


def small(case: Either) -> bool:
    p = case.problem
    scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
    return scores <= MAX_WORK and max(p.dim_qk, p.dim_v) <= 128 and not case.policy


RETENTION = [case for case in retention_cases.make_cases() if small(case)]
RETNET = [case for case in retnet_cases.every_case() if small(case)]
ONE = RETENTION[0]
FULL = replace(
    ONE,
    problem=replace(ONE.problem, batch=2, heads_q=4, heads_kv=2, seqlen_q=21, seqlen_k=21),
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


def judge(case: Either, kernel: Host | None = None) -> list[str]:
    made = kernel or HOSTS[case.problem.op, case.problem.direction](DTYPES[case.problem.dtype])
    return harness.judge(made, case, seed=0, device=CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", RETENTION, ids=lambda case: case.name)
def test_right_retention_kernels_pass(case: RetentionCase) -> None:
    assert judge(case.forward("chunkwise")) == []
    assert judge(case.backward()) == []


@pytest.mark.parametrize("case", RETNET, ids=lambda case: case.name)
def test_right_retnet_kernels_pass(case: RetnetCase) -> None:
    assert judge(case) == []


@pytest.mark.parametrize("gamma", [1.0, 1 - 2**-12])
def test_a_state_beyond_fp16_is_judged_as_strictly(gamma: float) -> None:
    problem = replace(
        retention_cases.HEAVY.problem, seqlen_q=2049, seqlen_k=2049, dim_qk=16, dim_v=16
    )
    case = replace(retention_cases.HEAVY, problem=problem, gammas=gamma)
    call = harness.CALLS["retention", "forward"]
    given = {name: held.view for name, held in call.inputs(case, seed=0, device=CPU).items()}
    truths = {name: (ref, low) for name, ref, low in call.truths(case, given)}
    ref, low = truths["final_state"]
    assert float(ref.abs().max()) > 65504
    assert bool(low.isfinite().all())
    assert float((low - ref).abs().max()) < 0.01 * float(ref.abs().max())
    assert float(truths["o"][0].abs().max()) < 65504
    assert judge(case.forward("chunkwise")) == []
    assert judge(case.backward()) == []


def broken(base: type[Host], change: Callable[[Any], None]) -> Host:
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
def test_a_forward_kernel_that_forgets_something_is_seen(
    change: Callable[[Any], None], complaint: str
) -> None:
    wrong = judge(FULL, broken(HostRetention, change))
    assert any(complaint in each for each in wrong), wrong


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
def test_a_backward_kernel_that_forgets_something_is_seen(
    change: Callable[[Any], None], complaint: str
) -> None:
    wrong = judge(FULL.backward(), broken(HostRetentionBackward, change))
    assert any(complaint in each for each in wrong), wrong


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
def test_a_retnet_kernel_that_ignores_something_is_seen(
    direction: Any, change: Callable[[Any], None], complaint: str
) -> None:
    base = HOSTS["retnet", direction]
    problem = replace(MASKED.problem, direction=direction, causal=True, seqlen_q=20)
    case = replace(MASKED, problem=problem)
    assert judge(case) == []
    wrong = judge(case, broken(base, change))
    assert any(complaint in each for each in wrong), wrong


def test_an_eager_overflow_takes_no_excuse_away() -> None:
    ref, low = torch.tensor([8.0, 8.0, 8.0]), torch.tensor([9.0, 6.0, torch.inf])
    assert excused(ref, low, torch.tensor(2.0)).tolist() == [11.0, 4.0, 10.0]
