"""The verifier of gradients: it passes a kernel that rounds like the GPU kernels, and finds every kind of error."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention_autotuner.core.abi import AttentionBackwardParams
from attention_autotuner.core.abi import Tensor as AbiTensor
from attention_autotuner.core.problem import Problem
from tests.numerics import cases, gradients, harness
from tests.numerics.cases import Case
from tests.numerics.emulation import HostBackward

CPU = torch.device("cpu")
MAX_SCORES = 1500  # of the listed cases that are run here
SMALL = Problem(
    direction="backward",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=13,
    seqlen_k=21,
    dim_qk=24,
    dim_v=16,
)
PADDED = Case(problem=SMALL, output="padded")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Mischief = Callable[[AttentionBackwardParams, int, int], None]


def scores(problem: Problem) -> int:
    return problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k


LISTED = [case for case in cases.make_cases("backward") if scores(case.problem) <= MAX_SCORES]
LAID_OUT = [
    Case(problem=SMALL, inputs="transposed", output="dense", gradient="broadcast", lse=False),
    Case(problem=SMALL, inputs="heads_broadcast", output="transposed", gradient="padded"),
    Case(problem=SMALL, inputs="unaligned", gradient="unaligned", scale=-0.3),
    Case(problem=replace(SMALL, seqlen_q=33, causal=True), inputs="padded", scale=6.0),
    Case(problem=replace(SMALL, causal=True, causal_alignment="top_left"), scale=0.0, lse=False),
]


@pytest.mark.parametrize("case", [*LISTED, *LAID_OUT], ids=lambda case: case.name)
def test_a_right_kernel_passes(case: Case) -> None:
    kernel = HostBackward(DTYPES[case.problem.dtype])
    assert harness.errors_of(kernel, case, seed=0, device=CPU) == []  # type: ignore[arg-type]


def test_rows_of_one_key_are_among_the_listed_cases() -> None:
    assert any(min(case.problem.seqlen_q, case.problem.seqlen_k) == 1 for case in LISTED)


class Misbehaving(HostBackward):
    """A kernel that computes the gradients and then corrupts memory."""

    def __init__(self, mischief: Mischief) -> None:
        super().__init__()
        self._mischief = mischief

    def launch(
        self, params: AttentionBackwardParams, workspace: int, stream: int, device: int
    ) -> None:
        super().launch(params, workspace, stream, device)
        self._mischief(params, workspace, self.launches - 1)


def bits_at(tensor: AbiTensor, element: int = 0) -> ctypes.c_uint16:
    return ctypes.c_uint16.from_address(tensor.data + 2 * element)


def skip_an_element(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    bits_at(params.dk).value = 0x7E00


def write_before(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    bits_at(params.dq, -1).value = 0


def write_into_the_gap(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    bits_at(params.dv, SMALL.dim_v).value = 0


def write_past_the_workspace(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    end = workspace + HostBackward().workspace_bytes(params)
    ctypes.c_uint8.from_address(end).value = 0


def change_dout(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    bits_at(params.dout).value = 0


def differ(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
    bits_at(params.dv).value ^= launch  # the last bit, the second time only


def be_off(name: str) -> Mischief:
    def mischief(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        bits_at(getattr(params, name)).value ^= 0x0400

    return mischief


@pytest.mark.parametrize(
    ("mischief", "complaint"),
    [
        (skip_an_element, "dk: 1 of"),
        (write_before, "wrote beside dq"),
        (write_into_the_gap, "wrote beside dv"),
        (write_past_the_workspace, "wrote beside the workspace"),
        (change_dout, "dout was changed"),
        (differ, "two runs differ in dv"),
        (be_off("dq"), "dq: largest error"),
        (be_off("dk"), "dk: largest error"),
        (be_off("dv"), "dv: largest error"),
    ],
)
def test_every_misbehaviour_is_found(mischief: Mischief, complaint: str) -> None:
    kernel = Misbehaving(mischief)
    errors = harness.errors_of(kernel, PADDED, seed=0, device=CPU)  # type: ignore[arg-type]
    assert any(complaint in error for error in errors)


def test_every_nondeterministic_run_is_compared_with_the_reference() -> None:
    def second_is_off(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        if launch == 1:
            be_off("dk")(params, workspace, launch)

    for mischief, complaints in ((differ, 0), (second_is_off, 1)):
        kernel = Misbehaving(mischief)
        errors = harness.errors_of(
            kernel,  # type: ignore[arg-type]
            PADDED,
            seed=0,
            device=CPU,
            deterministic=False,
        )
        assert len(errors) == complaints, errors


def test_each_repeat_is_compared_with_the_first() -> None:
    def tenth_differs(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        bits_at(params.dq).value ^= launch == 9

    kernel = Misbehaving(tenth_differs)
    errors = harness.errors_of(kernel, PADDED, seed=0, device=CPU, repeats=10)  # type: ignore[arg-type]
    assert errors == ["two runs differ in dq"]
    assert kernel.launches == 10


@pytest.mark.parametrize("missing", ["delta", "dlse", "scale", "mask"])
def test_a_formula_with_a_missing_term_is_found(missing: str) -> None:
    class Violation(HostBackward):
        def launch(
            self, params: AttentionBackwardParams, workspace: int, stream: int, device: int
        ) -> None:
            if missing == "dlse":
                params.dlse = None
            if missing == "scale":
                params.softmax_scale = abs(params.softmax_scale)
            if missing == "mask":
                params.causal_offset += 1
            if missing == "delta":
                params.o = params.dout
            super().launch(params, workspace, stream, device)

    case = Case(problem=replace(SMALL, causal=True), scale=-0.3)
    assert harness.errors_of(Violation(), case, seed=0, device=CPU) != []  # type: ignore[arg-type]


def test_the_bound_is_widened_only_where_differences_cancel() -> None:
    call = harness.CALLS["attention", "backward"]
    shares = {}
    for seqlen_k in (1, 200):
        case = Case(problem=replace(SMALL, seqlen_q=100, seqlen_k=seqlen_k), lse=False)
        inputs = {
            name: buffer.view for name, buffer in call.inputs(case, seed=0, device=CPU).items()
        }
        widths = gradients.rounding(case, inputs)
        shares[seqlen_k] = {
            name: float(widths[name].norm() / (low - ref).norm())
            for name, ref, low in call.references(case, inputs)
        }
    assert shares[1]["dq"] > 0.9
    assert max(shares[200].values()) < 0.35
