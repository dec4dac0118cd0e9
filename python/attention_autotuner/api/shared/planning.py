"""The making of launch plans: the kernel that dispatch chooses, and params complete but for their pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from ... import errors, settings
from ...arch import naming
from ...core import abi
from ...core.memo import Table
from ...core.problem import Problem
from ...operations.params import abi_tensor, params_of
from ...serving import dispatch, pinning
from ...serving.loader import LoadedKernel
from . import gammas, launch
from .launch import Layout, Plan, ReferencePlan, contiguous
from .plain import notice

Strided = tuple[str, Sequence[int], Sequence[int]]
"""A tensor's name in params, its shape and its strides, in elements."""

NOTHING_SERVES = (errors.ToolchainError, errors.BuildError, errors.NoCandidateError)
"""Errors where no kernel can be built and no bundle has one."""


class Asked(NamedTuple):
    """The arguments of :func:`kernel_of`."""

    problem: Problem
    device_type: str
    device: int


_RECORDED: dict[int, list[Asked]] = {}
"""By the ``id`` of settings under which calls are noted and not computed: a backward pass adopts them in its thread."""


@contextmanager
def recording() -> Iterator[list[Asked]]:
    """Inside the block calls of this thread, and their backward passes, give zeros and are noted in the list."""
    in_force = replace(settings.current())  # a copy: plans that are made under it serve nobody else
    recorded = _RECORDED[id(in_force)] = []
    try:
        with settings.adopted(in_force):
            yield recorded
    finally:
        del _RECORDED[id(in_force)]


def kernel_of(problem: Problem, device_type: str, index: int) -> LoadedKernel:
    """The kernel that dispatch chooses for a problem, ready on a device.

    Args:
        problem: what is to be computed.
        device_type: a policy's name for :func:`naming.policy_named`, perhaps with candidates pinned
            (:func:`~...serving.pinning.pinned_name`); empty is the GPU itself.
        index: CUDA device index.

    Raises:
        NotWarmError: a graph is being captured and the kernel is not ready.
        UnknownCandidateError: what is pinned is no candidate of the problem.
    """
    name, pins = pinning.split(device_type)
    with nullcontext() if launch.current_device() == index else torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
        policy = naming.policy_named(name, device=index)
        if pins:
            running = dispatch.running_on(policy, index)
            candidate = pinning.pinned(problem, running, pins)
            if candidate is not None:
                return dispatch.pinned_kernel(
                    candidate, running, device=index, must_be_warm=capturing
                )
        return dispatch.kernel_for(problem, policy, device=index, must_be_warm=capturing)


def strided_params(
    problem: Problem, scale: float | None, tensors: Iterable[Strided], **scalars: float
) -> ctypes.Structure:
    """A problem's params, complete but for the pointers.

    Args:
        problem: gives the sizes.
        scale: the factor of Q K^T; the operation's default when None.
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
    scale: float | None,
    *,
    inputs: Mapping[str, torch.Tensor | None],
    outputs: Sequence[Layout],
    reference: Callable[..., Sequence[torch.Tensor]],
    copies: Sequence[str] = (),
    gamma: gammas.Floats | None = None,
    **scalars: float,
) -> Plan | ReferencePlan:
    """The plan of a call by the kernel that dispatch chooses, or by the reference where there is none to be had.

    Args:
        problem: what is to be computed; None where there is nothing to read.
        device_type: as :func:`kernel_of` takes it.
        scale: as :func:`strided_params` takes it, as are the scalars.
        inputs: as :class:`Plan` takes them, as are outputs and copies.
        outputs: see inputs.
        reference: gives the outputs from the inputs; it serves where no kernel does, unless the settings forbid it or
            the call names its candidate.
        copies: see inputs.
        gamma: decays that are numbers, where the problem has decays and the inputs do not; None for the usual ones.
        scalars: see scale.

    Raises:
        NotWarmError: a graph is being captured and the kernel, or the decays, are not ready.
    """
    in_force, kernel, params, keep = settings.current(), None, None, None
    first = next(iter(inputs.values()))
    assert first is not None
    if problem is not None and problem.score == "decayed" and inputs["log2_gamma"] is None:
        keep = gammas.on_device(gamma, problem.heads_q, first.device)
    recorded = _RECORDED.get(id(in_force))
    if recorded is not None and problem is not None:
        recorded.append(Asked(problem, device_type, first.get_device()))
    elif problem is not None:
        present = {name: x for name, x in inputs.items() if x is not None}
        try:
            kernel = kernel_of(problem, device_type, first.get_device())
        except NOTHING_SERVES as error:
            if in_force.strict_kernels or pinning.split(device_type)[1]:
                raise
            _notice_reference(problem.op, error)
            return ReferencePlan(reference, in_force)
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


def _notice_reference(op: str, error: Exception) -> None:
    """Log, once a process and operation, that the reference computes it; others of its problems say the same."""
    if op not in _NOTICED:
        _NOTICED.remember(op, True)
        notice(
            f"no kernel for {op} can be built here and no bundle has one: the PyTorch reference computes it, many "
            f"times slower (ATTENTION_AUTOTUNER_STRICT_KERNELS=1 makes this an error). The reason: {error}"
        )


_NOTICED: Table[str, bool] = Table("notices.without_kernels")
