"""The making of launch plans: the kernel that dispatch chooses, and params complete but for their pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch

from ... import settings
from ...arch import naming
from ...core import abi
from ...core.problem import Problem
from ...operations.params import abi_tensor, params_of
from ...serving import dispatch
from ...serving.loader import LoadedKernel
from . import launch
from .launch import Layout, Plan, contiguous

Strided = tuple[str, Sequence[int], Sequence[int]]
"""A tensor's name in params, its shape and its strides, in elements."""


def kernel_of(problem: Problem, device_type: str, index: int) -> LoadedKernel:
    """The kernel that dispatch chooses for a problem, ready on a device.

    Args:
        problem: what is to be computed.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU itself.
        index: CUDA device index.

    Raises:
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    with nullcontext() if launch.current_device() == index else torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
        policy = naming.policy_named(device_type, device=index)
        return dispatch.kernel_for(problem, policy, device=index, must_be_warm=capturing)


def strided_params(
    problem: Problem, scale: float, tensors: Iterable[Strided], **scalars: float
) -> ctypes.Structure:
    """A problem's params, complete but for the pointers.

    Args:
        problem: gives the sizes.
        scale: the factor of Q K^T.
        tensors: those that the params name; of bare pointers there is nothing to fill in yet.
        scalars: other fields, by name.
    """
    params = params_of(problem, scale)
    kinds = dict(type(params)._fields_)  # type: ignore[arg-type]  # pairs here, though ctypes allows bit fields
    for name, shape, strides in tensors:
        if kinds[name] is abi.Tensor:
            setattr(params, name, abi_tensor(shape, strides))
    for name, value in scalars.items():
        setattr(params, name, value)
    return params


def plan_of(
    problem: Problem | None,
    device_type: str,
    scale: float,
    *,
    inputs: Mapping[str, torch.Tensor | None],
    outputs: Sequence[Layout],
    copies: Sequence[str] = (),
    keep: torch.Tensor | None = None,
    **scalars: float,
) -> Plan:
    """The plan of a call by the kernel that dispatch chooses.

    Args:
        problem: what is to be computed; None where there is nothing to read.
        device_type: as :func:`kernel_of` takes it.
        scale: as :func:`strided_params` takes it, as are the scalars.
        inputs: as :class:`Plan` takes them, as are outputs and copies.
        outputs: see inputs.
        copies: see inputs.
        keep: the logarithms of decays that are no tensor of the caller's.
        scalars: see scale.

    Raises:
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    in_force, kernel, params = settings.current(), None, None
    if problem is not None:
        present = {name: x for name, x in inputs.items() if x is not None}
        kernel = kernel_of(problem, device_type, present["q"].get_device())
        read = [
            contiguous(name, x.shape, x.dtype)[:3]
            if name in copies
            else (name, x.shape, x.stride())
            for name, x in present.items()
        ]
        if keep is not None:
            scalars["log2_gamma"] = keep.data_ptr()
        params = strided_params(problem, scale, [*read, *(x[:3] for x in outputs)], **scalars)
    return Plan(
        kernel, params, inputs=inputs, outputs=outputs, in_force=in_force, copies=copies, keep=keep
    )
