"""Verification over a kernel that runs on the host, and over ways in which it may misbehave."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_autotuner.core.abi import AttentionForwardParams
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import ArtifactError, DeviceMemoryError
from attention_autotuner.operations.bindings import make_inputs, output_makers, ways_of
from attention_autotuner.operations.shared.launching import GUARD
from attention_autotuner.operations.shared.tensors import Outputs, bind
from attention_autotuner.serving import loader
from attention_autotuner.serving.loader import KernelDescription, LoadedKernel
from attention_autotuner.tuning.devices import Guarded, workspace_on
from attention_autotuner.tuning.measure import TorchDevice
from attention_autotuner.tuning.remote import hand_over
from attention_autotuner.tuning.rounds import classify
from attention_autotuner.tuning.verify import reduced, variants
from tests.launchers import verify

CPU = torch.device("cpu")
PROBLEM = Problem(
    batch=1, heads_q=2, heads_kv=1, seqlen_q=33, seqlen_k=45, dim_qk=16, dim_v=24, causal=True
)
FakeKernel = Callable[..., Path]


class Misbehaving:
    """A kernel that does its work and then something else to its outputs."""

    def __init__(
        self, kernel: LoadedKernel, mischief: Callable[[AttentionForwardParams, int], None]
    ) -> None:
        self._kernel = kernel
        self._mischief = mischief
        self._launches = 0
        self.info: KernelDescription = replace(kernel.info, block_m=16, block_n=16)

    def prepare(self, device: int) -> None:
        self._kernel.prepare(device)

    def workspace_bytes(self, params: AttentionForwardParams) -> int:
        return self._kernel.workspace_bytes(params)

    def launch(
        self, params: AttentionForwardParams, workspace: int, stream: int, device: int
    ) -> None:
        self._kernel.launch(params, workspace, stream, device)
        self._mischief(params, self._launches)
        self._launches += 1


def outcome_of(
    fake_kernel: FakeKernel,
    mischief: Callable[[AttentionForwardParams, int], None],
    problem: Problem = PROBLEM,
) -> tuple[str, str]:
    kernel = Misbehaving(loader.load(fake_kernel()), mischief)
    outcome = verify(problem, kernel, deterministic=True, seeds=(0,), device=CPU)
    return outcome.kind, outcome.reason


def halves(address: int) -> ctypes.Array[ctypes.c_uint16]:
    return (ctypes.c_uint16 * 64).from_address(address)


def behave(params: AttentionForwardParams, launch: int) -> None:
    pass


def test_a_right_kernel_passes(fake_kernel: FakeKernel) -> None:
    assert outcome_of(fake_kernel, behave) == ("ok", "")


def test_a_right_kernel_passes_on_unaligned_inputs(fake_kernel: FakeKernel) -> None:
    problem = replace(PROBLEM, alignment_bytes=2, causal_alignment="top_left")
    assert outcome_of(fake_kernel, behave, problem) == ("ok", "")
    assert make_inputs(problem, seed=0, device=CPU).q.data_ptr() % 16 == 2


def test_a_sum_that_is_not_rescaled_at_late_maxima_is_wrong(fake_kernel: FakeKernel) -> None:
    """Normal scores never jump so far."""
    kernel = loader.load(fake_kernel("-DFORGETS_JUMPS"))
    outcome = verify(PROBLEM, kernel, deterministic=True, device=CPU)
    assert outcome.kind == "wrong"
    assert "with scores that grow along the keys" in outcome.reason


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_maxima_of_growing_scores_come_late_from_either_end(heads_kv: int) -> None:
    problem = replace(PROBLEM, heads_kv=heads_kv, seqlen_k=1024, causal=False, alignment_bytes=2)
    late = set()
    for seed in (0, 1):
        inputs = ways_of(problem)[1].inputs(problem, seed=seed, device=CPU)
        assert inputs.k.data_ptr() % 16 == 2
        norms = inputs.k.float().norm(dim=-1).view(heads_kv, 16, 64).mean(-1)
        late |= {tuple(row.argsort().tolist()) for row in norms}
    assert late == {tuple(range(16)), tuple(range(15, -1, -1))}


def test_an_element_that_is_not_written_is_wrong(fake_kernel: FakeKernel) -> None:
    def forget(params: AttentionForwardParams, launch: int) -> None:
        halves(params.o.data)[3] = 0x7E00  # NaN, as it was before

    kind, reason = outcome_of(fake_kernel, forget)
    assert kind == "wrong"
    assert "o:" in reason
    assert "seed 0" in reason


def test_a_small_error_is_wrong(fake_kernel: FakeKernel) -> None:
    def nudge(params: AttentionForwardParams, launch: int) -> None:
        value = torch.tensor([0.1], dtype=torch.float16)
        here = torch.frombuffer(halves(params.o.data), dtype=torch.float16)
        here[5] += value[0]

    assert outcome_of(fake_kernel, nudge)[0] == "wrong"


def test_a_wrong_lse_is_wrong(fake_kernel: FakeKernel) -> None:
    def shift(params: AttentionForwardParams, launch: int) -> None:
        ctypes.c_float.from_address(params.lse).value += 0.05

    kind, reason = outcome_of(fake_kernel, shift)
    assert kind == "wrong"
    assert "lse:" in reason


@pytest.mark.parametrize("offset", [-1, 0])
def test_a_write_beside_an_output_is_a_leak(fake_kernel: FakeKernel, offset: int) -> None:
    def leak(params: AttentionForwardParams, launch: int) -> None:
        elements = params.batch * params.heads_q * params.seqlen_q * params.dim_v
        past = params.o.data + 2 * (elements if offset == 0 else offset)
        ctypes.c_uint16.from_address(past).value = 0

    kind, reason = outcome_of(fake_kernel, leak)
    assert kind == "leaked"
    assert "beside the outputs" in reason


def test_two_runs_that_differ_are_nondeterministic(fake_kernel: FakeKernel) -> None:
    def flip(params: AttentionForwardParams, launch: int) -> None:
        if launch % 2:
            halves(params.o.data)[0] ^= 1

    assert outcome_of(fake_kernel, flip)[0] == "nondeterministic"


def test_a_kernel_that_does_nothing_is_wrong(fake_kernel: FakeKernel) -> None:
    kernel = loader.load(fake_kernel("-DNO_WORK"))
    assert verify(PROBLEM, kernel, deterministic=True, seeds=(0,), device=CPU).kind == "wrong"


def test_refusals_are_typed(fake_kernel: FakeKernel) -> None:
    refused = loader.load(fake_kernel("-DLAUNCH_STATUS=2"))
    outcome = verify(PROBLEM, refused, deterministic=True, device=CPU)
    assert outcome.kind == "launch_failed"
    assert "a bad shape" in outcome.reason
    full = loader.load(fake_kernel("-DLAUNCH_STATUS=1002"))
    assert verify(PROBLEM, full, deterministic=True, device=CPU).kind == "out_of_memory"
    unprepared = loader.load(fake_kernel("-DPREPARE_STATUS=4"))
    assert verify(PROBLEM, unprepared, deterministic=True, device=CPU).kind == "launch_failed"


def test_exceptions_have_their_outcomes() -> None:
    assert classify(DeviceMemoryError("full")).kind == "out_of_memory"
    assert classify(torch.cuda.OutOfMemoryError("full")).kind == "out_of_memory"
    assert classify(ArtifactError("no image")).kind == "launch_failed"
    assert classify(RuntimeError("CUDA error: an illegal memory access")).kind == "crashed"


def test_outputs_start_as_nan_between_guards() -> None:
    way = ways_of(PROBLEM)[0]
    inputs = way.inputs(PROBLEM, seed=0, device=CPU)
    _, handed = hand_over(inputs, way.output_shapes(PROBLEM))
    guarded = Guarded(TorchDevice(CPU), handed["outputs"])
    o, lse = guarded.outputs.tensors["o"], guarded.outputs.tensors["lse"]
    assert o.shape == (1, 2, 33, 24)
    assert lse.shape == (1, 2, 33)
    assert bool(torch.from_numpy(guarded.read("o")).view(torch.float16).isnan().all())
    assert bool(torch.from_numpy(guarded.read("lse")).view(torch.float32).isnan().all())
    assert o.data_ptr() % 16 == 0
    end, guard = o.data_ptr() + 2 * 33 * 24 * 2, GUARD * 2
    for address in (o.data_ptr() - guard, end):
        assert bytes_at(address, guard) == b"\x5a" * guard
    assert guarded.changed() == []


def bytes_at(address: int, count: int) -> bytes:
    return bytes((ctypes.c_uint8 * count).from_address(address))


def test_a_poisoned_workspace_is_aligned_full_of_nan_and_guarded() -> None:
    workspace = Guarded(TorchDevice(CPU), {})
    first, second = workspace.take(1000), workspace.take(1000)
    assert first != second
    for address in (first, second):
        assert address % 256 == 0
        values = (ctypes.c_float * 250).from_address(address)
        assert all(value != value for value in values)
        assert bytes_at(address - 1, 1) == bytes_at(address + 1000, 1) == b"\x5a"
    assert workspace.changed() == []
    ctypes.c_uint8.from_address(second + 999).value = 0
    assert workspace.changed() == []
    ctypes.c_uint8.from_address(second + 1000).value = 0
    assert workspace.changed() == ["the workspace"]


def test_a_shared_workspace_is_one_piece_until_it_is_too_small() -> None:
    workspace = workspace_on(TorchDevice(CPU))
    first = workspace.take(1000)
    assert first % 256 == 0
    assert workspace.take(500) == first
    larger = workspace.take(10_000)
    assert larger != first
    assert workspace.take(1000) == larger
    bytes_at(first, 1000)  # launches bound to it still may write there


def test_a_bound_launch_passes_the_problem_on(fake_kernel: FakeKernel) -> None:
    seen: list[AttentionForwardParams] = []
    kernel = Misbehaving(loader.load(fake_kernel()), lambda params, launch: seen.append(params))
    inputs = make_inputs(PROBLEM, seed=0, device=CPU)
    made = {name: make() for name, make in output_makers(PROBLEM, CPU).items()}
    outputs = Outputs(tensors=made, workspace=workspace_on(TorchDevice(CPU)))
    bind(kernel, PROBLEM, inputs, outputs)()  # type: ignore[arg-type]
    assert (seen[0].causal, seen[0].causal_offset) == (1, 12)
    assert seen[0].softmax_scale == 0.25
    assert seen[0].k.stride_batch == 45 * 16


@pytest.mark.parametrize(
    "problem",
    [
        Problem(batch=512, heads_q=64, heads_kv=8, seqlen_q=128, seqlen_k=128),
        Problem(batch=2, heads_q=32, heads_kv=32, seqlen_q=16384, seqlen_k=16384),
        Problem(batch=1, heads_q=8, heads_kv=1, seqlen_q=1, seqlen_k=500_000),
        Problem(batch=1, heads_q=1, heads_kv=1, seqlen_q=1_000_003, seqlen_k=777_777, causal=True),
    ],
)
def test_reduction_bounds_the_scores_and_keeps_the_remainders(problem: Problem) -> None:
    small = reduced(problem)
    scores = small.batch * small.heads_q * small.seqlen_q * small.seqlen_k
    assert scores <= 1 << 28
    assert small.seqlen_q % 256 == problem.seqlen_q % 256
    assert small.seqlen_k % 256 == problem.seqlen_k % 256
    assert reduced(small) == small


def test_small_problems_are_not_reduced() -> None:
    assert reduced(PROBLEM) == PROBLEM


def test_variants_are_odd_masked_and_not_and_enough_for_persistent_loops() -> None:
    shapes = variants(PROBLEM, block_m=128, block_n=64, num_sms=132)
    assert {shape.causal for shape in shapes[1:]} == {False, True}
    for shape in shapes[1:]:
        assert shape.seqlen_q % 2 == shape.seqlen_k % 2 == 1
        assert shape.heads_q == 2 * shape.heads_kv
        assert shape.batch * shape.heads_q * 3 >= 5 * 132
        assert (shape.dim_qk, shape.dim_v) == (PROBLEM.dim_qk, PROBLEM.dim_v)
