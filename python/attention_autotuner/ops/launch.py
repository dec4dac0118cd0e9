"""What launch plans of every operation stand on: torch's allocator and stream, the C entry, and the memory of plans."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from .. import abi, dispatch
from ..arch import naming
from ..codegen.problem import Problem
from ..loader import LoadedKernel
from ..tuning.params import params_of

MAX_PLANS = 4096
"""Kinds of call remembered per operation; the oldest are forgotten first."""

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

Params = tuple[ctypes.c_void_p, memoryview, Any]
"""The address of params, their memory in 8-byte words, and what keeps it."""


def _stream_of(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# Torch's own shortcuts, a tenth of the time of torch.cuda's functions; absent from builds without CUDA.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
"""Torch's current stream of a device, as a raw ``cudaStream_t``."""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The calling thread's current device."""


def allocator(device: torch.device) -> Allocate:
    """What makes an uninitialised tensor of ``(shape, strides, dtype)`` on a device, which must be current."""
    if device.type in ("cuda", "cpu"):
        # What Inductor's code allocates with: no parsing of options and no dispatcher, a third of the time.
        guards = getattr(torch._C._dynamo, "guards", None)
        quick: Allocate | None = getattr(guards, f"_empty_strided_{device.type}", None)
        if quick is not None:
            return quick
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


class Launch:
    """A kernel with params that are complete but for their pointers, ready to be enqueued again and again.

    Attributes:
        workspace_bytes: device memory that a launch needs beside its tensors.
    """

    __slots__ = (
        "_allocate",
        "_entry",
        "_index",
        "_index_argument",
        "_kernel",
        "_kind",
        "_spare",
        "_template",
        "workspace_bytes",
    )

    def __init__(
        self,
        kernel: LoadedKernel,
        params: ctypes.Structure,
        *,
        index: int,
        allocate: Allocate,
    ) -> None:
        """Prepare launches.

        Args:
            kernel: what to launch.
            params: complete but for the pointers.
            index: CUDA device index.
            allocate: where the workspace comes from.
        """
        self._kernel = kernel
        self._entry = kernel.launch_function
        self._kind = type(params)
        self._template = bytes(params)
        self.workspace_bytes = kernel.workspace_bytes(params)
        self._allocate = allocate
        self._index = index
        # Arguments that are ctypes objects already pass quicker than integers.
        self._index_argument = ctypes.c_int32(index)
        # Params in use by no call. A list's pop and append are atomic, so threads share it without a lock.
        self._spare: list[Params] = []

    def params(self) -> Params:
        """Params for :meth:`enqueue`, whose pointers are to be written through the second item, 8 bytes a word."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._new_params()

    def enqueue(self, held: Params) -> None:
        """Launch on torch's current stream of the device, which must be current.

        Args:
            held: from :meth:`params`, every pointer written (0 for null); not the caller's any more.

        Raises:
            torch.OutOfMemoryError: there is no room for the workspace; nothing was launched.
            ArtifactError: the launch failed.
        """
        workspace = None
        if self.workspace_bytes:
            # Freed on return: torch reuses it only for work that comes later on this stream.
            workspace = self._allocate((self.workspace_bytes,), (1,), torch.uint8)
        status = self._entry(
            held[0],
            None if workspace is None else workspace.data_ptr(),
            current_stream(self._index),
            self._index_argument,
        )
        if status:
            self._kernel.raise_for_status(status, f"launch it on cuda:{self._index}")
        self._spare.append(held)  # the launch has copied the params

    def _new_params(self) -> Params:
        params = self._kind.from_buffer_copy(self._template)
        address = ctypes.c_void_p(ctypes.addressof(params))
        return address, memoryview(params).cast("B").cast("Q"), params


def kernel_of(problem: Problem, device_type: str, index: int) -> LoadedKernel:
    """The kernel that dispatch chooses for a problem, ready on a device.

    Args:
        problem: what is to be computed.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU itself.
        index: CUDA device index.

    Raises:
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    with nullcontext() if current_device() == index else torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing()
        policy = naming.policy_named(device_type, device=index)
        return dispatch.kernel_for(problem, policy, device=index, must_be_warm=capturing)


def words_of(kind: type[ctypes.Structure], *pointers: str) -> tuple[int, ...]:
    """Where the fields that hold or begin with an address lie in params, in 8-byte words."""
    return tuple(getattr(kind, name).offset // 8 for name in pointers)


def strided_params(problem: Problem, scale: float, **strides: Sequence[int]) -> ctypes.Structure:
    """A problem's params, complete but for the pointers.

    Args:
        problem: gives the sizes.
        scale: the softmax scale.
        strides: of each tensor that the params name, ``[batch, heads, seqlen, dim]``, in elements.
    """
    params = params_of(problem, scale)
    for name, (batch, head, row, _) in strides.items():
        tensor = abi.Tensor(stride_batch=batch, stride_head=head, stride_row=row)
        setattr(params, name, tensor)
    return params


PlanT = TypeVar("PlanT")
_lock = threading.Lock()


def remember(plans: dict[Any, PlanT], key: Any, plan: PlanT) -> None:
    """Keep a plan for the next call of its kind, within :data:`MAX_PLANS`."""
    with _lock:
        while len(plans) >= MAX_PLANS:
            del plans[next(iter(plans))]
        plans[key] = plan
