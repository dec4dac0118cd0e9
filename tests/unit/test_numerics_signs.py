"""A gradient through r where the order of a sum decides the sign of X: the GPU tests must accept both signs.

``dX = (dP - sign(X) delta) / r`` changes by ``2 delta / r`` with the sign, which shows in one row of dQ and dK where
few keys count. No kernel sums in the order of the reference, so the error bound includes this change.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.shared.tensors import Inputs
from attention_autotuner.reference import Bands, check
from tests.numerics import retnet_calls
from tests.numerics.guarded_buffers import GuardedBuffer
from tests.numerics.retnet_calls import RetnetBackwardCall, make_inputs
from tests.numerics.retnet_cases import RetnetCase
from tests.unit.test_tuning_retnet_truths import kernel

CASE = RetnetCase(
    problem=Problem(
        op="retnet",
        mask="decay",
        direction="backward",
        dtype="bf16",
        batch=2,
        heads_q=1,
        heads_kv=1,
        seqlen_q=2072,
        seqlen_k=319,
        dim_qk=96,
        dim_v=96,
        causal=True,
    ),
    gamma=0.5,
    scale=1.0,
    r_grad=True,
)
KEY = 59
ROW = KEY - CASE.problem.causal_offset  # the row with KEY as its last visible key
CALL = RetnetBackwardCall()


def inputs_with_a_doubtful_sign(
    case: RetnetCase, generator: torch.Generator
) -> Mapping[str, GuardedBuffer]:
    """The inputs of a case, changed so that one score is 0 up to the order of its sum."""
    made = make_inputs(case, generator)
    key = made["k"].view[0, 0, KEY].unflatten(0, (-1, 2))
    made["q"].view[0, 0, ROW] = torch.stack((key[:, 1], -key[:, 0]), -1).flatten()
    return made


def reasons(turn: float) -> dict[str, str]:
    """The errors of a kernel's outputs by name, when that score has the sign ``turn``."""
    buffers = CALL.inputs(CASE, seed=0, device=torch.device("cpu"))
    views = {name: buffer.view for name, buffer in buffers.items()}
    flat = views | {"r": views["r"][..., 0], "log2_gamma": views["log2_gamma"].flatten()}
    inputs = Inputs(tensors=flat, scalars={"scale": CASE.true_scale})
    here = torch.zeros(2, 1, CASE.problem.seqlen_q, CASE.problem.seqlen_k, dtype=torch.bool)
    here[0, 0, ROW, KEY] = True

    def sign(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.where(here, turn, x.sign())

    gradients = kernel(CASE.problem, inputs, sign=sign)
    return {
        name: check(gradients[name], ref, low, Bands.of(CASE.problem, name, ref.dim())).reason
        for name, ref, low in CALL.references(CASE, views)
    }


@pytest.mark.parametrize("turn", [-1.0, 0.0, 1.0])
def test_either_sign_is_right_where_a_sum_decides_it(
    turn: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retnet_calls, "make_inputs", inputs_with_a_doubtful_sign)
    assert not any(reasons(turn).values())


def test_the_formula_alone_does_not_accept_the_other_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retnet_calls, "make_inputs", inputs_with_a_doubtful_sign)
    monkeypatch.setattr(retnet_calls, "FP32_ROUNDING", 0.0)
    assert any(reasons(turn)["dk"] for turn in (-1.0, 1.0))


def test_a_certain_sign_must_be_right() -> None:
    assert reasons(0.0)["dk"]
