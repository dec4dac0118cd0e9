"""Launch plans of attention backward, the twin of :mod:`.plan`: warm calls touch no file and may be captured.

The gradients are dense, each with its tensor's order of dimensions. Q, K and V are read where they lie; what autograd
hands over beside them (the gradients of O and LSE) is copied where a kernel could not read it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .. import abi, dispatch, settings
from ..loader import LoadedKernel
from . import checks, launch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NAMES = ("q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse", "dlse")
_WORDS = launch.words_of(abi.AttentionBackwardParams, *_NAMES)
_Q, _K, _V, _O, _DOUT, _DQ, _DK, _DV, _LSE, _DLSE = _WORDS
_Signature = tuple[Any, ...]


class Plan:
    """A call of one kind; see :class:`.plan.Plan`.

    Attributes:
        settings: those in force when it was made, held so that their ``id`` in the key stays theirs.
        workspace_bytes: device memory that a call needs beside its tensors, and frees again.
    """

    __slots__ = (
        "_allocate",
        "_copy_lse",
        "_copy_lse_gradient",
        "_copy_o",
        "_copy_o_gradient",
        "_dtype",
        "_index",
        "_launch",
        "_layouts",
        "settings",
        "workspace_bytes",
    )

    def __init__(
        self,
        kernel: LoadedKernel | None,
        params: ctypes.Structure,
        tensors: Gradients,
        strides: tuple[tuple[int, ...], ...],
        copies: tuple[bool, bool, bool, bool],
        in_force: settings.Settings,
    ) -> None:
        """Prepare a call.

        Args:
            kernel: what to launch; None where q is empty.
            params: complete but for the pointers.
            tensors: q, k and v, for shapes, dtype and device of their gradients.
            strides: of the gradients.
            copies: which of o, the gradient of o, lse and the gradient of lse must be copied before they are read.
            in_force: the present settings.
        """
        self.settings = in_force
        q = tensors[0]
        self._allocate = launch.allocator(q.device)
        self._index = q.get_device()
        self._dtype = q.dtype
        self._layouts = tuple((tuple(x.shape), y) for x, y in zip(tensors, strides, strict=True))
        self._copy_o, self._copy_o_gradient, self._copy_lse, self._copy_lse_gradient = copies
        self._launch = None
        self.workspace_bytes = 0
        if kernel is not None:
            self._launch = launch.Launch(kernel, params, index=self._index, allocate=self._allocate)
            self.workspace_bytes = self._launch.workspace_bytes

    def run(
        self,
        addresses: tuple[int, int, int],
        grad_o: torch.Tensor,
        grad_lse: torch.Tensor | None,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> Gradients:
        """Allocate the gradients and enqueue the kernels on torch's current stream of the tensors' device."""
        if launch.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.run(addresses, grad_o, grad_lse, o, lse)
        dq, dk, dv = (self._allocate(*layout, self._dtype) for layout in self._layouts)
        if self._launch is None:
            # No rows of queries, so no gradient reaches a key.
            return dq, dk.zero_(), dv.zero_()
        # The copies live until the launch is enqueued; torch reuses their memory for later work of this stream only.
        if self._copy_o:
            o = launch.copy_of(o)
        if self._copy_o_gradient:
            grad_o = launch.copy_of(grad_o)
        if self._copy_lse:
            lse = launch.copy_of(lse)
        if grad_lse is not None and self._copy_lse_gradient:
            grad_lse = launch.copy_of(grad_lse)
        held = self._launch.params()
        words = held[1]
        words[_Q], words[_K], words[_V] = addresses
        words[_O] = o.data_ptr()
        words[_DOUT] = grad_o.data_ptr()
        words[_DQ] = dq.data_ptr()
        words[_DK] = dk.data_ptr()
        words[_DV] = dv.data_ptr()
        words[_LSE] = lse.data_ptr()
        words[_DLSE] = 0 if grad_lse is None else grad_lse.data_ptr()
        self._launch.enqueue(held)
        return dq, dk, dv


_plans: dict[_Signature, Plan] = {}


def attention_backward(
    grad_o: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    top_left: bool,
    device_type: str,
    deterministic: bool,
) -> Gradients:
    """Gradients of q, k and v through a kernel.

    Args:
        grad_o: ``[batch, heads_q, seqlen_q, dim_v]`` in q's dtype, any strides; None for zero.
        grad_lse: ``[batch, heads_q, seqlen_q]`` in fp32, any strides; None for zero.
        q: as given to the forward, on a GPU; k and v likewise.
        k: see q.
        v: see q.
        o: what the forward returned.
        lse: what the forward returned.
        softmax_scale: None is ``1 / sqrt(dim_qk)``.
        causal: whether rows see keys up to their diagonal only.
        top_left: alignment of the diagonal.
        device_type: a policy's name for :func:`naming.policy_named`; empty is the GPU of q.
        deterministic: only kernels that give equal bits each time may serve.

    Raises:
        UnsupportedProblemError: the tensors name no problem that can be solved here.
        NotWarmError: a graph is being captured and the kernel is not ready.
        torch.OutOfMemoryError: there is no room for the gradients or the workspace.
    """
    if grad_o is None:
        checks.check_some_gradient(grad_lse)
        grad_o = o.new_zeros(o.shape[-1:]).expand(o.shape)
    q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
    key = (
        q.shape,
        q.stride(),
        k.shape,
        k.stride(),
        v.shape,
        v.stride(),
        o.shape,
        o.stride(),
        lse.shape,
        lse.stride(),
        grad_o.shape,
        grad_o.stride(),
        None if grad_lse is None else (grad_lse.shape, grad_lse.stride(), grad_lse.dtype),
        (q.dtype, k.dtype, v.dtype, o.dtype, lse.dtype, grad_o.dtype),
        q.get_device(),
        k.get_device(),
        v.get_device(),
        o.get_device(),
        lse.get_device(),
        grad_o.get_device(),
        None if grad_lse is None else grad_lse.get_device(),
        (q_address | k_address | v_address) & 15 == 0,
        o.data_ptr() & 15 == 0,
        grad_o.data_ptr() & 15 == 0,
        softmax_scale,
        causal,
        top_left,
        device_type,
        deterministic,
        dispatch.generation(),
        id(settings.current()),
    )
    plan = _plans.get(key)
    if plan is None:
        tensors = (q, k, v)
        checks.check_tensors(*tensors)
        checks.check_gradients(grad_o, grad_lse, q, v, o, lse)
        plan = _make_plan(
            tensors,
            (grad_o, grad_lse, o, lse),
            softmax_scale,
            causal=causal,
            top_left=top_left,
            device_type=device_type,
            deterministic=deterministic,
        )
        launch.remember(_plans, key, plan)
    return plan.run((q_address, k_address, v_address), grad_o, grad_lse, o, lse)


def _make_plan(
    tensors: Gradients,
    others: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    softmax_scale: float | None,
    *,
    causal: bool,
    top_left: bool,
    device_type: str,
    deterministic: bool,
) -> Plan:
    q, k, v = tensors
    grad_o, grad_lse, o, lse = others
    in_force = settings.current()
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    checks.check_scale(scale)
    copies = (
        not launch.is_readable(o),
        not launch.is_readable(grad_o),
        not lse.is_contiguous(),
        grad_lse is not None and not grad_lse.is_contiguous(),
    )
    strides = tuple(checks.output_strides(x.shape, x.stride(), x.shape[3]) for x in tensors)
    kernel: LoadedKernel | None = None
    params: ctypes.Structure = abi.AttentionBackwardParams()
    if q.shape[0] > 0 and q.shape[1] > 0:
        problem = checks.make_problem(
            q, k, v, causal=causal, top_left=top_left, backward=True, deterministic=deterministic
        )
        kernel = launch.kernel_of(problem, device_type, q.get_device())
        dq, dk, dv = strides
        params = launch.strided_params(
            problem,
            scale,
            q=q.stride(),
            k=k.stride(),
            v=v.stride(),
            o=launch.strides_read(o, copied=copies[0]),
            dout=launch.strides_read(grad_o, copied=copies[1]),
            dq=dq,
            dk=dk,
            dv=dv,
        )
    return Plan(kernel, params, tensors, strides, copies, in_force)
