"""Tensors that reach beyond 2**31 elements: whether a kernel's offsets do."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from attention_autotuner.operations.shared.tensors import PoisonedWorkspace
from attention_autotuner.reference import Bands, check
from attention_autotuner.serving.loader import LoadedKernel

from .harness import HasProblem, call_of
from .launching import launch

BYTES = 14 * 2**30  # of the two storages and what counts their elements
# Strides [batch, head, row] of a tensor of 64 columns whose last element lies more than 2**31 elements from its first.
STRIDES = {
    "batch": (2**31, 4096, 64),
    "head": (8192, 2**31, 64),
    "row": (8192, 64, 2**26),
}
PIECE = 2**16  # elements of a tensor but for its far axis, at most


def judge(kernel: LoadedKernel, case: HasProblem, axis: str, device: torch.device) -> list[str]:
    """What is wrong with a kernel on a small case whose tensors are spread out; skips where memory is short.

    Args:
        kernel: prepared.
        case: with head dims of 64; tensors in fp32, which all are contiguous, stay dense.
        axis: along which they are spread.
        device: where.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if free < BYTES:
        pytest.skip(f"needs {BYTES} bytes of device memory, {free} are free")
    call = call_of(case)
    near = {name: held.view for name, held in call.inputs(case, seed=0, device=device).items()}
    wanted = {name: held.view for name, held in call.outputs(case, device).items()}
    _, given = _spread(near, axis)
    storage, taken = _spread(wanted, axis)
    for name, far in given.items():
        far.copy_(near[name])
    outputs = wanted | taken
    tensors = near | given | outputs
    workspace = PoisonedWorkspace(device)
    launch(kernel, case.problem, tensors, call.scalars(case), workspace)
    wrong = []
    for name, ref, low in call.truths(case, near):
        verdict = check(
            outputs[name].contiguous(), ref, low, Bands.of(case.problem, name, ref.dim())
        )
        if not verdict.ok:
            wrong.append(f"{name}: {verdict.reason}")
    written = sum(far.numel() for far in taken.values())
    if int(storage.isfinite().sum()) != written:
        wrong.append("wrote beside the outputs")
    return wrong


def _spread(
    tensors: Mapping[str, torch.Tensor], axis: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Room for the tensors of 64 columns beside each other in one storage full of NaN."""
    wide = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.shape[-1] == 64 and tensor.element_size() == 2
    }
    strides = (*STRIDES[axis], 1)
    reach = [
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
        for tensor in wide.values()
    ]
    assert min(reach) > 2**31
    some = next(iter(wide.values()))
    storage = torch.full(
        (max(reach) + len(wide) * PIECE,), float("nan"), dtype=some.dtype, device=some.device
    )
    views = {
        name: storage.as_strided(tensor.shape, strides, place * PIECE)
        for place, (name, tensor) in enumerate(wide.items())
    }
    return storage, views
