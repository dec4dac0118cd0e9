"""Launches on tensors that extend beyond 2**31 elements, for kernels whose offsets must be 64-bit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from attention_autotuner.reference import Bands, check
from attention_autotuner.serving.loader import LoadedKernel
from attention_autotuner.tuning.devices import Guarded
from attention_autotuner.tuning.measure import TorchDevice

from .harness import HasProblem, call_of
from .launching import launch

BYTES = 14 * 2**30  # of the two storages, and of the mask that counts their written elements
# Strides [batch, head, row] of a tensor of 64 columns whose last element lies more than 2**31 elements from its first.
STRIDES = {
    "batch": (2**31, 4096, 64),
    "head": (8192, 2**31, 64),
    "row": (8192, 64, 2**26),
}
PIECE = 2**16  # most elements of a tensor along its axes of small stride


def errors_of(kernel: LoadedKernel, case: HasProblem, axis: str, device: torch.device) -> list[str]:
    """The errors of a kernel on a small case whose tensors have huge strides; skips where memory is short.

    Args:
        kernel: the prepared kernel.
        case: a case with head dims of 64; its fp32 tensors are contiguous and stay dense.
        axis: the axis with the huge stride.
        device: the GPU.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if free < BYTES:
        pytest.skip(f"needs {BYTES} bytes of device memory, {free} are free")
    call = call_of(case)
    inputs = {
        name: buffer.view for name, buffer in call.inputs(case, seed=0, device=device).items()
    }
    outputs_near = {name: buffer.view for name, buffer in call.outputs(case, device).items()}
    _, spread_inputs = _spread(inputs, axis)
    storage, spread_outputs = _spread(outputs_near, axis)
    for name, spread in spread_inputs.items():
        spread.copy_(inputs[name])
    outputs = outputs_near | spread_outputs
    tensors = inputs | spread_inputs | outputs
    workspace = Guarded(TorchDevice(device), {})
    launch(kernel, case.problem, tensors, call.scalars(case), workspace)
    errors = []
    for name, ref, low in call.references(case, inputs):
        comparison = check(
            outputs[name].contiguous(), ref, low, Bands.of(case.problem, name, ref.dim())
        )
        if not comparison.ok:
            errors.append(f"{name}: {comparison.reason}")
    written = sum(spread.numel() for spread in spread_outputs.values())
    if int(storage.isfinite().sum()) != written:
        errors.append("wrote beside the outputs")
    return errors


def _spread(
    tensors: Mapping[str, torch.Tensor], axis: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One storage full of NaN, and a view with huge strides into it for every 16-bit tensor of 64 columns."""
    eligible = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.shape[-1] == 64 and tensor.element_size() == 2
    }
    strides = (*STRIDES[axis], 1)
    reach = [
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
        for tensor in eligible.values()
    ]
    assert min(reach) > 2**31
    some = next(iter(eligible.values()))
    storage = torch.full(
        (max(reach) + len(eligible) * PIECE,), float("nan"), dtype=some.dtype, device=some.device
    )
    views = {
        name: storage.as_strided(tensor.shape, strides, place * PIECE)
        for place, (name, tensor) in enumerate(eligible.items())
    }
    return storage, views
