"""Launch plans of attention forward: all that a call needs to know, decided once per kind of call, then only replayed.

A warm call looks its plan up, allocates the outputs, writes up to five pointers into prepared params and calls the
kernel's C entry. It touches no file, never synchronises, and may run under CUDA-graph capture. Plans hold no tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .. import abi, dispatch, settings
from ..codegen.problem import Problem
from ..loader import LoadedKernel
from . import checks, launch

Outputs = tuple[torch.Tensor, "torch.Tensor | None"]

_Q, _K, _V, _O, _LSE = launch.words_of(abi.AttentionForwardParams, "q", "k", "v", "o", "lse")


class Plan:
    """A call of one kind: shapes, strides, dtype, device, mask, scale, alignment and settings are fixed.

    Attributes:
        settings: those in force when it was made, held so that their ``id`` in the key stays theirs.
    """

    __slots__ = (
        "_allocate",
        "_dtype",
        "_index",
        "_launch",
        "_lse_shape",
        "_lse_strides",
        "_o_shape",
        "_o_strides",
        "settings",
    )

    def __init__(
        self,
        kernel: LoadedKernel | None,
        params: ctypes.Structure,
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
        self._allocate = launch.allocator(q.device)
        self._index = q.get_device()
        self._launch = None
        if kernel is not None:
            self._launch = launch.Launch(kernel, params, index=self._index, allocate=self._allocate)
        self._dtype = q.dtype
        batch, heads, seqlen = q.shape[:3]
        self._o_shape = (batch, heads, seqlen, dim_v)
        self._o_strides = checks.output_strides(q.shape, q.stride(), dim_v)
        self._lse_shape = (batch, heads, seqlen) if return_lse else None
        self._lse_strides = (heads * seqlen, seqlen, 1)

    def run(self, q_address: int, k_address: int, v_address: int) -> Outputs:
        """Allocate the outputs and enqueue the kernel on torch's current stream of the tensors' device."""
        if launch.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.run(q_address, k_address, v_address)
        o = self._allocate(self._o_shape, self._o_strides, self._dtype)
        lse, lse_address = None, 0
        if self._lse_shape is not None:
            lse = self._allocate(self._lse_shape, self._lse_strides, torch.float32)
            lse_address = lse.data_ptr()
        if self._launch is not None:
            held = self._launch.params()
            words = held[1]
            words[_Q] = q_address
            words[_K] = k_address
            words[_V] = v_address
            words[_O] = o.data_ptr()
            words[_LSE] = lse_address
            self._launch.enqueue(held)
        return o, lse


_plans: dict[Any, Plan] = {}


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    return_lse: bool,
    addresses: Sequence[int] | None = None,
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
        launch.remember(_plans, key, plan)
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
    params: ctypes.Structure = abi.AttentionForwardParams()
    if q.shape[0] > 0 and q.shape[1] > 0:
        problem = checks.make_problem(q, k, v, causal=causal, top_left=top_left)
        kernel = launch.kernel_of(problem, device_type, q.get_device())
        params = _make_params(problem, q, k, v, scale)
    return Plan(kernel, params, q, v.shape[3], return_lse=return_lse, in_force=in_force)


def _make_params(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> ctypes.Structure:
    """Params complete but for the pointers."""
    return launch.strided_params(
        problem,
        scale,
        q=q.stride(),
        k=k.stride(),
        v=v.stride(),
        o=checks.output_strides(q.shape, q.stride(), problem.dim_v),
    )
