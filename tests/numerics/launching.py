"""Launches through the C ABI alone: tensors and scalars go into the params by their names in the header.

The package's own binding takes no part, so that an error in it shows as a disagreement.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from attention_autotuner.core import abi
from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.params import struct_of
from attention_autotuner.operations.shared.tensors import Workspace
from attention_autotuner.serving.loader import LoadedKernel

SIZES = (
    "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "dim_qk", "dim_v", "causal_offset",
)  # fmt: skip  # fields that a problem determines


def make_params(
    problem: Problem, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
) -> Any:
    """The params of a launch.

    Args:
        problem: determines every size.
        tensors: tensors by field; those that the struct has strides for have four axes, and batch or head axes of
            extent 1 get stride 0. The others are contiguous.
        scalars: numbers by field.

    Raises:
        AttributeError: the struct has no such field.
    """
    struct = struct_of(problem)
    kinds = {field[0]: field[1] for field in struct._fields_}
    params = struct(struct_size=ctypes.sizeof(struct), abi_version=abi.ABI_VERSION)
    sizes = {name: getattr(problem, name) for name in SIZES}
    sizes |= {"seqlen": problem.seqlen_q, "causal": int(problem.causal)}
    values: dict[str, Any] = {name: size for name, size in sizes.items() if name in kinds}
    for name, value in (values | dict(scalars)).items():
        if name not in kinds:
            raise AttributeError(f"{struct.__name__} has no field {name}")
        setattr(params, name, value)
    for name, tensor in tensors.items():
        if name not in kinds:
            raise AttributeError(f"{struct.__name__} has no field {name}")
        packed = kinds[name] is abi.Tensor
        setattr(params, name, _strided(tensor) if packed else tensor.data_ptr())
    return params


def launch(
    kernel: LoadedKernel,
    problem: Problem,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, float],
    workspace: Workspace,
) -> None:
    """Launch once on torch's current stream; arguments are those of :func:`make_params`."""
    params = make_params(problem, tensors, scalars)
    num_bytes = kernel.workspace_bytes(params)
    taken = workspace.take(num_bytes) if num_bytes else 0
    device = tensors["q"].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kernel.launch(params, taken, stream, device.index or 0)


def _strided(tensor: torch.Tensor) -> abi.Tensor:
    steps = [
        0 if extent == 1 and axis < 2 else stride
        for axis, (extent, stride) in enumerate(
            zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
        )
    ]
    batch, head, row = steps
    return abi.Tensor(data=tensor.data_ptr(), stride_batch=batch, stride_head=head, stride_row=row)
