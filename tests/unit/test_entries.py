"""The entries of a measurement, over kernels that run on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.bindings import ways_of
from attention_autotuner.operations.shared.tensors import Inputs, Outputs
from attention_autotuner.tuning.devices import workspace_on
from attention_autotuner.tuning.entries import KernelEntry, StepEntry
from attention_autotuner.tuning.measure import TorchDevice
from tests.numerics.guarded_buffers import GuardedBuffer, make_output

CPU = torch.device("cpu")
BACKWARD = Problem(
    direction="backward",
    batch=1,
    heads_q=2,
    heads_kv=1,
    seqlen_q=9,
    seqlen_k=12,
    dim_qk=16,
    dim_v=24,
    causal=True,
    deterministic=True,
)
FakeKernel = Callable[..., Path]


def sets(count: int) -> tuple[list[Inputs], list[Outputs], list[GuardedBuffer]]:
    """Inputs, outputs full of NaN, and the buffers of these."""
    way, workspace = ways_of(BACKWARD)[0], workspace_on(TorchDevice(CPU))
    inputs = [way.inputs(BACKWARD, seed=seed, device=CPU) for seed in range(count)]
    shapes = way.output_shapes(BACKWARD).items()
    made = [
        {name: make_output(shape, "dense", dtype, CPU) for name, (shape, dtype) in shapes}
        for _ in range(count)
    ]
    outputs = [
        Outputs(tensors={name: buffers[name].view for name in buffers}, workspace=workspace)
        for buffers in made
    ]
    return inputs, outputs, [buffer for buffers in made for buffer in buffers.values()]


def launches(library: Path) -> int:
    count: int = ctypes.CDLL(str(library)).fake_launch_count()
    return count


def workspace_of(library: Path) -> int | None:
    last = ctypes.CDLL(str(library)).fake_last_workspace
    last.restype = ctypes.c_void_p
    address: int | None = last()
    return address


def test_the_backward_of_a_step_reads_the_outputs_of_its_forward(fake_kernel: FakeKernel) -> None:
    forward, backward = fake_kernel(), fake_kernel("-DBACKWARD")
    inputs, outputs, buffers = sets(2)
    expected = [tensors.tensors["o"].clone() for tensors in inputs]
    entry = StepEntry(name="step", forward=forward, backward=backward, problem=BACKWARD)
    entry.prepare(inputs, outputs)
    assert (launches(forward), launches(backward)) == (0, 0)
    for tensors in inputs:
        tensors.tensors["o"].zero_()
        tensors.tensors["lse"].zero_()
    entry.run(1)
    assert (launches(forward), launches(backward)) == (1, 1)
    assert bool((inputs[0].tensors["o"] == 0).all())
    torch.testing.assert_close(inputs[1].tensors["o"], expected[1], atol=2e-3, rtol=0)
    assert bool(outputs[0].tensors["dq"].isnan().all())
    refs = {name: ref for name, ref, _ in ways_of(BACKWARD)[0].references(BACKWARD, inputs[1])}
    for name, ref in refs.items():
        torch.testing.assert_close(outputs[1].tensors[name].float(), ref, atol=4e-3, rtol=4e-3)
    assert all(buffer.intact() for buffer in buffers)


def test_kernels_of_one_measurement_share_their_workspace(fake_kernel: FakeKernel) -> None:
    inputs, outputs, _ = sets(2)
    libraries = [fake_kernel("-DBACKWARD") for _ in range(2)]
    for library in libraries:
        entry = KernelEntry(name=library.parent.name, path=library, problem=BACKWARD)
        entry.prepare(inputs, outputs)
        entry.run(0)
    first, second = map(workspace_of, libraries)
    assert first is not None
    assert first == second
    assert first % 256 == 0
