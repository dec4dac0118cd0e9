"""Verification of backward kernels, over one that computes on the host and ways in which it may misbehave."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner.core.abi import ABI_VERSION, AttentionBackwardParams
from attention_autotuner.core.abi import Tensor as AbiTensor
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations import params
from attention_autotuner.operations.bindings import make_inputs, output_makers
from attention_autotuner.operations.shared.tensors import Outputs, bind
from attention_autotuner.reference import attention, attention_backward
from attention_autotuner.serving.loader import KernelDescription
from attention_autotuner.tuning.devices import workspace_on
from attention_autotuner.tuning.measure import TorchDevice
from tests.launchers import verify

CPU = torch.device("cpu")
PROBLEM = Problem(
    direction="backward",
    batch=1,
    heads_q=2,
    heads_kv=1,
    seqlen_q=45,
    seqlen_k=33,
    dim_qk=16,
    dim_v=24,
    causal=True,
)
INFO = KernelDescription(
    name="host",
    padded_dim_qk=16,
    padded_dim_v=32,
    block_m=16,
    block_n=16,
    num_threads=128,
    static_smem_bytes=0,
    dynamic_smem_bytes=0,
    copy_bytes=16,
)
WORKSPACE = 640  # bytes

Mischief = Callable[[AttentionBackwardParams, int, int], None]


def view(
    data: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over memory that someone else holds."""
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def tensor_of(
    params: AttentionBackwardParams, name: str, heads: int, rows: int, columns: int
) -> torch.Tensor:
    packed: AbiTensor = getattr(params, name)
    strides = (packed.stride_batch, packed.stride_head, packed.stride_row, 1)
    return view(packed.data, (params.batch, heads, rows, columns), strides, torch.float16)


class HostKernel:
    """Computes gradients in fp32 on the host from what the params point to, then does some mischief."""

    def __init__(self, mischief: Mischief = lambda params, workspace, launch: None) -> None:
        self.info = INFO
        self.launches: list[tuple[int, bool]] = []
        self._mischief = mischief

    def prepare(self, device: int) -> None:
        pass

    def workspace_bytes(self, params: AttentionBackwardParams) -> int:
        return WORKSPACE

    def launch(
        self, params: AttentionBackwardParams, workspace: int, stream: int, device: int
    ) -> None:
        p = params
        assert (p.struct_size, p.abi_version) == (ctypes.sizeof(p), ABI_VERSION)
        scratch = (ctypes.c_float * (WORKSPACE // 4)).from_address(workspace)
        assert workspace % 256 == 0
        assert all(value != value for value in scratch), "the workspace is not poisoned"
        ctypes.memset(workspace, 0, WORKSPACE)
        q = tensor_of(p, "q", p.heads_q, p.seqlen_q, p.dim_qk)
        k = tensor_of(p, "k", p.heads_kv, p.seqlen_k, p.dim_qk)
        v = tensor_of(p, "v", p.heads_kv, p.seqlen_k, p.dim_v)
        dout = tensor_of(p, "dout", p.heads_q, p.seqlen_q, p.dim_v)
        rows = (p.batch, p.heads_q, p.seqlen_q)
        strides = (p.heads_q * p.seqlen_q, p.seqlen_q, 1)
        dlse = view(p.dlse, rows, strides, torch.float32) if p.dlse else None
        # What the forward left must be what its truth says, or a real kernel could not be right.
        o = tensor_of(p, "o", p.heads_q, p.seqlen_q, p.dim_v)
        lse = view(p.lse, rows, strides, torch.float32)
        mask: dict[str, Any] = {
            "causal": bool(p.causal),
            "causal_alignment": "top_left" if p.causal_offset == 0 else "bottom_right",
        }
        o_true, lse_true = attention(q, k, v, **mask)
        torch.testing.assert_close(o.float(), o_true, atol=2e-3, rtol=0)
        torch.testing.assert_close(lse, lse_true)
        # As a kernel would: delta from the o that it is given, in another order of the sum.
        fp32 = [x.float() for x in (q, k, v)]
        shift = (dout.float() * o_true).sum(-1) - (dout.float() * o.float()).flip(-1).sum(-1)
        gradients = attention_backward(dout, shift if dlse is None else dlse + shift, *fp32, **mask)
        tensor_of(p, "dq", p.heads_q, p.seqlen_q, p.dim_qk).copy_(gradients[0])
        tensor_of(p, "dk", p.heads_kv, p.seqlen_k, p.dim_qk).copy_(gradients[1])
        tensor_of(p, "dv", p.heads_kv, p.seqlen_k, p.dim_v).copy_(gradients[2])
        self._mischief(p, workspace, len(self.launches))
        self.launches.append((workspace, dlse is not None))


def outcome_of(
    mischief: Mischief, *, deterministic: bool = True, problem: Problem = PROBLEM
) -> tuple[str, str]:
    kernel = HostKernel(mischief)
    outcome = verify(problem, kernel, deterministic=deterministic, seeds=(0,), device=CPU)
    return outcome.kind, outcome.reason


def nudge(tensor: AbiTensor, by: float, element: int = 7) -> None:
    view(tensor.data, (64,), (1,), torch.float16)[element] += by


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, causal=False, deterministic=True),
        replace(PROBLEM, alignment_bytes=2, causal_alignment="top_left"),
        replace(PROBLEM, heads_kv=2, seqlen_q=1, seqlen_k=3),
        replace(PROBLEM, seqlen_q=7, seqlen_k=1, causal=False),  # dq and dk are all cancellation
    ],
)
def test_a_right_kernel_passes(problem: Problem) -> None:
    kernel = HostKernel()
    outcome = verify(problem, kernel, deterministic=True, device=CPU)
    assert (outcome.kind, outcome.reason) == ("ok", "")
    # Three shapes, two seeds, two launches each; every shape with and without a gradient of LSE.
    assert len(kernel.launches) == 12
    for shape in range(3):
        assert {inputs for _, inputs in kernel.launches[4 * shape : 4 * shape + 4]} == {False, True}


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_each_gradient_is_held_against_the_truth(name: str) -> None:
    kind, reason = outcome_of(lambda params, workspace, launch: nudge(getattr(params, name), 0.25))
    assert kind == "wrong"
    assert reason.startswith(f"{name}: ")
    assert "seed 0" in reason


def test_an_element_that_is_not_written_is_wrong() -> None:
    def forget(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        view(params.dk.data, (64,), (1,), torch.float16)[3] = float("nan")

    kind, reason = outcome_of(forget)
    assert kind == "wrong"
    assert "dk: 1 of" in reason


def test_an_ignored_gradient_of_lse_is_wrong() -> None:
    def ignore(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        if params.dlse:
            dq = view(params.dq.data, (2, 45, 16), (45 * 16, 16, 1), torch.float16)
            dq.zero_()

    kind, reason = outcome_of(ignore)
    assert kind == "wrong"
    assert "with a gradient of LSE" in reason


def test_rounding_that_differs_is_nondeterministic_only_where_equal_bits_are_claimed() -> None:
    def wobble(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        if launch % 2:
            dq = view(params.dq.data, (64,), (1,), torch.int16)
            dq[40] ^= 1

    assert outcome_of(wobble)[0] == "nondeterministic"
    assert outcome_of(wobble, deterministic=False) == ("ok", "")


def test_without_the_claim_the_second_run_is_held_against_the_truth_too() -> None:
    def late(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        if launch % 2:
            nudge(params.dv, 0.25)

    kind, reason = outcome_of(late, deterministic=False)
    assert kind == "wrong"
    assert reason.startswith("dv: ")


@pytest.mark.parametrize(("offset", "where"), [(-1, "before"), (WORKSPACE, "after")])
def test_a_write_beside_the_workspace_is_a_leak(offset: int, where: str) -> None:
    def leak(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        ctypes.c_uint8.from_address(workspace + offset).value = 0

    kind, reason = outcome_of(leak)
    assert kind == "leaked", where
    assert "beside the workspace" in reason


def test_a_write_beside_a_gradient_is_a_leak() -> None:
    def leak(params: AttentionBackwardParams, workspace: int, launch: int) -> None:
        elements = params.batch * params.heads_kv * params.seqlen_k * params.dim_v
        ctypes.c_uint16.from_address(params.dv.data + 2 * elements).value = 0

    kind, reason = outcome_of(leak)
    assert kind == "leaked"
    assert "beside the outputs" in reason


def test_inputs_hold_what_the_forward_left_and_only_dlse_is_optional() -> None:
    problem = replace(PROBLEM, alignment_bytes=2)
    inputs = make_inputs(problem, seed=3, device=CPU)
    assert set(inputs.tensors) == {"q", "k", "v", "o", "lse", "dout"}
    forward = make_inputs(replace(problem, direction="forward"), seed=3, device=CPU)
    assert all(torch.equal(forward.tensors[name], inputs.tensors[name]) for name in ("q", "k", "v"))
    assert inputs.tensors["o"].data_ptr() % 16 == 0
    assert inputs.tensors["dout"].data_ptr() % 16 == 2
    assert bool((inputs.tensors["lse"][:, :, :12] == -torch.inf).all())  # rows that see no key


def test_a_bound_launch_points_at_every_tensor_and_null_for_what_is_not_given() -> None:
    seen: list[AttentionBackwardParams] = []

    class Looking(HostKernel):
        def launch(
            self, params: AttentionBackwardParams, workspace: int, stream: int, device: int
        ) -> None:
            seen.append(params)

    inputs = make_inputs(PROBLEM, seed=0, device=CPU)
    made = {name: make() for name, make in output_makers(PROBLEM, CPU).items()}
    outputs = Outputs(tensors=made, workspace=workspace_on(TorchDevice(CPU)))
    bind(Looking(), PROBLEM, inputs, outputs)()  # type: ignore[arg-type]
    for name, tensor in (*inputs.tensors.items(), *outputs.tensors.items()):
        packed = getattr(seen[0], name)
        assert (packed.data if isinstance(packed, AbiTensor) else packed) == tensor.data_ptr()
    assert seen[0].dlse is None
    assert (seen[0].causal, seen[0].causal_offset) == (1, -12)
    assert seen[0].dv.stride_batch == 33 * 24


def test_the_workspace_of_a_library_is_asked_for_without_a_gpu(
    fake_kernel: Callable[..., Path],
) -> None:
    assert params.workspace_bytes(PROBLEM, fake_kernel("-DWORKSPACE_BYTES=4096")) == 4096
    forward = replace(PROBLEM, direction="forward")
    assert params.workspace_bytes(forward, fake_kernel()) == 0
