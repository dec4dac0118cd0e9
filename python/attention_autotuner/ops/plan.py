"""Launch plans: all that a call needs to know, decided once per kind of call and then only replayed.

A warm call looks its plan up, allocates the outputs, writes up to five pointers into prepared params and calls the
kernel's C entry. It touches no file, never synchronises, and may run under CUDA-graph capture. Plans hold no tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from .. import abi, dispatch, settings
from ..arch import naming
from ..codegen.problem import Problem
from ..loader import LoadedKernel
from . import checks

MAX_PLANS = 4096
"""Kinds of call remembered; the oldest are forgotten first."""

Outputs = tuple[torch.Tensor, "torch.Tensor | None"]

# Where the pointers lie in the params, in 8-byte words.
_WORDS = tuple(
    getattr(abi.AttentionForwardParams, name).offset // 8 for name in ("q", "k", "v", "o", "lse")
)
_Q, _K, _V, _O, _LSE = _WORDS

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


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


class Plan:
    """A call of one kind: shapes, strides, dtype, device, mask, scale, alignment and settings are fixed.

    Attributes:
        settings: those in force when it was made, held so that their ``id`` in the key stays theirs.
    """

    __slots__ = (
        "_allocate",
        "_dtype",
        "_entry",
        "_index",
        "_index_argument",
        "_kernel",
        "_lse_shape",
        "_lse_strides",
        "_o_shape",
        "_o_strides",
        "_params",
        "_spare",
        "_template",
        "_workspace_bytes",
        "settings",
    )

    def __init__(
        self,
        kernel: LoadedKernel | None,
        params: abi.AttentionForwardParams,
        q: torch.Tensor,
        dim_v: int,
        *,
        return_lse: bool,
        in_force: settings.Settings,
    ) -> None:
        """Prepare a call.

        Args:
            kernel: what to launch; None for empty outputs, which need no launch.
            params: complete but for the pointers.
            q: for shape, strides, dtype and device of the outputs.
            dim_v: their last dim.
            return_lse: whether LSE is wanted.
            in_force: the present settings.
        """
        self.settings = in_force
        self._kernel = kernel
        self._entry = None if kernel is None else kernel.launch_function
        self._template = bytes(params)
        self._workspace_bytes = 0 if kernel is None else kernel.workspace_bytes(params)
        self._allocate = allocator(q.device)
        self._index = q.get_device()
        # Arguments that are ctypes objects already pass quicker than integers.
        self._index_argument = ctypes.c_int32(self._index)
        self._dtype = q.dtype
        batch, heads, seqlen = q.shape[:3]
        self._o_shape = (batch, heads, seqlen, dim_v)
        self._o_strides = checks.output_strides(q.shape, q.stride(), dim_v)
        self._lse_shape = (batch, heads, seqlen) if return_lse else None
        self._lse_strides = (heads * seqlen, seqlen, 1)
        # Params in use by no call. A list's pop and append are atomic, so threads share it without a lock.
        self._spare: list[tuple[ctypes.c_void_p, memoryview, Any]] = []

    def run(self, q_address: int, k_address: int, v_address: int) -> Outputs:
        """Allocate the outputs and enqueue the kernel on torch's current stream of the tensors' device."""
        index = self._index
        if current_device() != index:
            with torch.cuda.device(index):
                return self.run(q_address, k_address, v_address)
        allocate = self._allocate
        o = allocate(self._o_shape, self._o_strides, self._dtype)
        lse = None
        if self._lse_shape is not None:
            lse = allocate(self._lse_shape, self._lse_strides, torch.float32)
        if self._entry is None:
            return o, lse
        workspace = None
        if self._workspace_bytes:
            # Freed on return: torch reuses it only for work that comes later on this stream.
            workspace = allocate((self._workspace_bytes,), (1,), torch.uint8)
        try:
            held = self._spare.pop()
        except IndexError:
            held = self._new_params()
        params, words, _ = held
        words[_Q] = q_address
        words[_K] = k_address
        words[_V] = v_address
        words[_O] = o.data_ptr()
        words[_LSE] = 0 if lse is None else lse.data_ptr()
        status = self._entry(
            params,
            None if workspace is None else workspace.data_ptr(),
            current_stream(index),
            self._index_argument,
        )
        if status:
            self._fail(status)
        self._spare.append(held)  # the launch has copied the params
        return o, lse

    def _fail(self, status: int) -> None:
        if self._kernel is not None:
            self._kernel.raise_for_status(status, f"launch it on cuda:{self._index}")

    def _new_params(self) -> tuple[ctypes.c_void_p, memoryview, Any]:
        params = abi.AttentionForwardParams.from_buffer_copy(self._template)
        address = ctypes.c_void_p(ctypes.addressof(params))
        return address, memoryview(params).cast("B").cast("Q"), params


_plans: dict[Any, Plan] = {}
_lock = threading.Lock()


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
    addresses: tuple[int, int, int] | None = None,
) -> Outputs:
    """Attention forward through a kernel.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]`` on a GPU.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        softmax_scale: None is ``1 / sqrt(dim_qk)``.
        causal: whether rows see keys up to their diagonal only.
        top_left: alignment of the diagonal.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        return_lse: whether LSE is wanted.
        addresses: where q, k and v lie, from a caller who has asked them.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
    """
    if addresses is None:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    q_address, k_address, v_address = addresses
    key = (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        k.get_device(),
        v.get_device(),
        (q_address | k_address | v_address) & 15 == 0,
        softmax_scale,
        causal,
        top_left,
        device_type,
        return_lse,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(q, k, v, softmax_scale, causal, top_left, device_type, return_lse)
        with _lock:
            while len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan.run(q_address, k_address, v_address)


def _make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
) -> Plan:
    checks.check_tensors(q, k, v)
    in_force = settings.current()
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    checks.check_scale(scale)
    kernel: LoadedKernel | None = None
    params = abi.AttentionForwardParams()
    if q.shape[0] > 0 and q.shape[1] > 0:
        problem = checks.make_problem(q, k, v, causal=causal, top_left=top_left)
        index = q.get_device()
        with nullcontext() if current_device() == index else torch.cuda.device(index):
            capturing = torch.cuda.is_current_stream_capturing()
            policy = naming.policy_named(device_type, device=index)
            kernel = dispatch.kernel_for(problem, policy, device=index, must_be_warm=capturing)
        params = _make_params(problem, q, k, v, scale)
    return Plan(kernel, params, q, v.shape[3], return_lse=return_lse, in_force=in_force)


def _make_params(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> abi.AttentionForwardParams:
    """Params complete but for the pointers."""
    strides = checks.output_strides(q.shape, q.stride(), problem.dim_v)
    return abi.AttentionForwardParams(
        struct_size=ctypes.sizeof(abi.AttentionForwardParams),
        abi_version=abi.ABI_VERSION,
        q=_tensor(q.stride()),
        k=_tensor(k.stride()),
        v=_tensor(v.stride()),
        o=_tensor(strides),
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        dim_qk=problem.dim_qk,
        dim_v=problem.dim_v,
        causal=int(problem.causal),
        causal_offset=problem.causal_offset,
        softmax_scale=scale,
    )


def _tensor(strides: tuple[int, ...]) -> abi.Tensor:
    return abi.Tensor(stride_batch=strides[0], stride_head=strides[1], stride_row=strides[2])
