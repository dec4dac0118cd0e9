"""The C ABI of an artifact, mirrored from ``templates/include/attention_autotuner/abi.h`` for ctypes.

A test parses the header and compares every constant, field name, order, type and offset with this module.
"""

from __future__ import annotations

import ctypes

ABI_VERSION = 1003
ABI_MAJOR = ABI_VERSION // 1000

STATUS_OK = 0
STATUS_BAD_VERSION = 1
STATUS_BAD_SHAPE = 2
STATUS_BAD_ALIGNMENT = 3
STATUS_BAD_DEVICE = 4
STATUS_CUDA_ERROR = 1000

CUDA_ERROR_MEMORY_ALLOCATION = 2
"""``cudaErrorMemoryAllocation``, from the CUDA runtime's own list of error codes."""

SYMBOL_PREFIX = "attention_autotuner_"


class Tensor(ctypes.Structure):
    """A strided ``[batch, heads, seqlen, dim]`` tensor with unit last stride; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
        ("stride_row", ctypes.c_int64),
    )


class AttentionForwardParams(ctypes.Structure):
    """Attention forward: row i sees key j if not ``causal`` or ``j <= i + causal_offset``; key bounds may be null."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("causal_offset", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("seqlens_k", ctypes.c_void_p),
        ("starts_k", ctypes.c_void_p),
        ("causal_from_end", ctypes.c_int32),
        ("splits", ctypes.c_int32),
    )


class AttentionBackwardParams(ctypes.Structure):
    """Attention backward: ``dout`` and, unless null, ``dlse`` to ``dq``, ``dk`` and ``dv``; the rest as forward."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("lse", ctypes.c_void_p),
        ("dlse", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("causal_offset", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
    )


class RetNetForwardParams(ctypes.Structure):
    """Retnet forward: ``r = clamp(rowsum |X|, 1, r_clamp_max)`` or 1, ``O = (X / r) V``, with a mask or a decay."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("mask", Tensor),
        ("log2_gamma", ctypes.c_void_p),
        ("r", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("causal_offset", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("normalize", ctypes.c_int32),
        ("r_clamp_max", ctypes.c_float),
    )


class RetNetBackwardParams(ctypes.Structure):
    """Retnet backward: gradients of q, k, v and, unless null, the mask; ``o`` is for ``r_grad`` alone."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("mask", Tensor),
        ("dmask", Tensor),
        ("log2_gamma", ctypes.c_void_p),
        ("r", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen_q", ctypes.c_int32),
        ("seqlen_k", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("causal_offset", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("r_grad", ctypes.c_int32),
        ("r_clamp_max", ctypes.c_float),
    )


class RetentionForwardParams(ctypes.Structure):
    """Retention forward in any form; states are contiguous fp32 ``[batch, heads_q, dim_qk, dim_v]`` or null."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("log2_gamma", ctypes.c_void_p),
        ("initial_state", ctypes.c_void_p),
        ("final_state", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class RetentionBackwardParams(ctypes.Structure):
    """Retention backward; ``dlog2_gamma`` is ``[batch, heads_q]``, and null, like a state, when not wanted."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("log2_gamma", ctypes.c_void_p),
        ("initial_state", ctypes.c_void_p),
        ("dfinal_state", ctypes.c_void_p),
        ("dinitial_state", ctypes.c_void_p),
        ("dlog2_gamma", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads_q", ctypes.c_int32),
        ("heads_kv", ctypes.c_int32),
        ("seqlen", ctypes.c_int32),
        ("dim_qk", ctypes.c_int32),
        ("dim_v", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class KernelInfo(ctypes.Structure):
    """An artifact's description: its name, tile, threads, shared memory and copy width."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("padded_dim_qk", ctypes.c_int32),
        ("padded_dim_v", ctypes.c_int32),
        ("block_m", ctypes.c_int32),
        ("block_n", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("static_smem_bytes", ctypes.c_int32),
        ("dynamic_smem_bytes", ctypes.c_int32),
        ("copy_bytes", ctypes.c_int32),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "attention_autotuner_tensor": Tensor,
    "attention_autotuner_attention_forward_params": AttentionForwardParams,
    "attention_autotuner_attention_backward_params": AttentionBackwardParams,
    "attention_autotuner_retnet_forward_params": RetNetForwardParams,
    "attention_autotuner_retnet_backward_params": RetNetBackwardParams,
    "attention_autotuner_retention_forward_params": RetentionForwardParams,
    "attention_autotuner_retention_backward_params": RetentionBackwardParams,
    "attention_autotuner_kernel_info": KernelInfo,
}
"""C name -> mirror."""

PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "abi_version": (ctypes.c_uint32, ()),
    "get_kernel_info": (ctypes.c_int32, (ctypes.POINTER(KernelInfo),)),
    "prepare": (ctypes.c_int32, (ctypes.c_int32,)),
    "workspace_bytes": (ctypes.c_size_t, (ctypes.c_void_p,)),
    "launch": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)),
    "status_string": (ctypes.c_char_p, (ctypes.c_int32,)),
}
"""Exported function without :data:`SYMBOL_PREFIX` -> (result, arguments)."""
