"""The C ABI of an artifact, mirrored from the headers ``templates/include/attention_autotuner/abi*.h`` for ctypes.

A test parses the header and compares every constant, field name, order, type and offset with this module.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

ABI_VERSION = 1007
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


Fields = tuple[tuple[str, Any], ...]


def _named(kind: Any, names: str) -> Fields:
    """Fields of one type, by their names."""
    return tuple((name, kind) for name in names.split())


HEAD = _named(ctypes.c_uint32, "struct_size abi_version")
SHAPE = _named(
    ctypes.c_int32, "batch heads_q heads_kv seqlen_q seqlen_k dim_qk dim_v causal causal_offset"
)
MODIFIED = (
    *_named(ctypes.c_int32, "window_left window_right"),
    *_named(ctypes.c_float, "softcap"),
    *_named(ctypes.c_int32, "alibi_per_batch"),
    *_named(ctypes.c_void_p, "alibi_slopes sinks"),
    *_named(Tensor, "attn_mask"),
    *_named(ctypes.c_int64, "attn_mask_stride_column"),
    *_named(ctypes.c_int32, "attn_mask_kind"),
)
PACKED = (
    *_named(ctypes.c_void_p, "cu_seqlens_q cu_seqlens_k"),
    *_named(ctypes.c_int32, "total_q total_k"),
)
RETENTION_PACKED = (*_named(ctypes.c_int32, "total"), *_named(ctypes.c_void_p, "cu_seqlens"))
BIAS = (*_named(ctypes.c_void_p, "bias_table"), *_named(ctypes.c_int32, "bias_distance"))
SPANNED = _named(ctypes.c_void_p, "document_ids prefix_lens")
RETENTION_SHAPE = _named(ctypes.c_int32, "batch heads_q heads_kv seqlen dim_qk dim_v")


class AttentionForwardParams(ctypes.Structure):
    """Attention forward: row i sees key j if not ``causal`` or ``j <= i + causal_offset``; key bounds may be null."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v o"),
        *_named(ctypes.c_void_p, "lse"),
        *SHAPE,
        *_named(ctypes.c_float, "softmax_scale"),
        *_named(ctypes.c_void_p, "seqlens_k starts_k"),
        *_named(ctypes.c_int32, "causal_from_end splits"),
        *MODIFIED,
        *PACKED,
        *BIAS,
        *SPANNED,
    )


class AttentionBackwardParams(ctypes.Structure):
    """Attention backward: ``dout`` and, unless null, ``dlse`` to ``dq``, ``dk`` and ``dv``; the rest as forward."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v o dout dq dk dv"),
        *_named(ctypes.c_void_p, "lse dlse"),
        *SHAPE,
        *_named(ctypes.c_float, "softmax_scale"),
        *MODIFIED,
        *_named(ctypes.c_void_p, "dsinks"),
        *PACKED,
        *_named(ctypes.c_int32, "causal_from_end"),
        *BIAS,
        *_named(ctypes.c_void_p, "dbias_table"),
        *SPANNED,
        *_named(ctypes.c_void_p, "dattn_mask"),
        *_named(ctypes.c_int32, "attn_mask_summed"),
    )


class RetNetForwardParams(ctypes.Structure):
    """Retnet forward: ``r = clamp(rowsum |X|, 1, r_clamp_max)`` or 1, ``O = (X / r) V``, with a mask or a decay."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v o mask"),
        *_named(ctypes.c_void_p, "log2_gamma r"),
        *SHAPE,
        *_named(ctypes.c_float, "scale"),
        *_named(ctypes.c_int32, "normalize"),
        *_named(ctypes.c_float, "r_clamp_max"),
    )


class RetNetBackwardParams(ctypes.Structure):
    """Retnet backward: gradients of q, k, v and, unless null, the mask; ``o`` is for ``r_grad`` alone."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v o dout dq dk dv mask dmask"),
        *_named(ctypes.c_void_p, "log2_gamma r"),
        *SHAPE,
        *_named(ctypes.c_float, "scale"),
        *_named(ctypes.c_int32, "r_grad"),
        *_named(ctypes.c_float, "r_clamp_max"),
    )


class RetentionForwardParams(ctypes.Structure):
    """Retention forward in any form; states are contiguous fp32 ``[batch, heads_q, dim_qk, dim_v]`` or null."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v o"),
        *_named(ctypes.c_void_p, "log2_gamma initial_state final_state"),
        *RETENTION_SHAPE,
        *_named(ctypes.c_float, "scale"),
    )


class RetentionBackwardParams(ctypes.Structure):
    """Retention backward; ``dlog2_gamma`` is ``[batch, heads_q]``, and null, like a state, when not wanted."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "q k v dout dq dk dv"),
        *_named(
            ctypes.c_void_p, "log2_gamma initial_state dfinal_state dinitial_state dlog2_gamma"
        ),
        *RETENTION_SHAPE,
        *_named(ctypes.c_float, "scale"),
    )


class RetentionPackedForwardParams(ctypes.Structure):
    """The same of packed sequences, ``batch`` of them, where ``seqlen`` is the greatest length."""

    _fields_: ClassVar[Fields] = (*RetentionForwardParams._fields_, *RETENTION_PACKED)


class RetentionPackedBackwardParams(ctypes.Structure):
    """Their gradients; ``dlog2_gamma`` is ``[heads_q]``."""

    _fields_: ClassVar[Fields] = (*RetentionBackwardParams._fields_, *RETENTION_PACKED)


class GemmForwardParams(ctypes.Structure):
    """A matrix product, its factors as they lie in memory: those by columns as their transposes."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(Tensor, "a b o"),
        *_named(ctypes.c_int32, "m n k splits row_blocks"),
    )


class KernelInfo(ctypes.Structure):
    """An artifact's description: its name, tile, threads, shared memory and copy width."""

    _fields_: ClassVar[Fields] = (
        *HEAD,
        *_named(ctypes.c_char_p, "name"),
        *_named(
            ctypes.c_int32,
            "padded_dim_qk padded_dim_v block_m block_n num_threads static_smem_bytes dynamic_smem_bytes copy_bytes",
        ),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "attention_autotuner_tensor": Tensor,
    "attention_autotuner_attention_forward_params": AttentionForwardParams,
    "attention_autotuner_attention_backward_params": AttentionBackwardParams,
    "attention_autotuner_retnet_forward_params": RetNetForwardParams,
    "attention_autotuner_retnet_backward_params": RetNetBackwardParams,
    "attention_autotuner_retention_forward_params": RetentionForwardParams,
    "attention_autotuner_retention_backward_params": RetentionBackwardParams,
    "attention_autotuner_retention_packed_forward_params": RetentionPackedForwardParams,
    "attention_autotuner_retention_packed_backward_params": RetentionPackedBackwardParams,
    "attention_autotuner_gemm_forward_params": GemmForwardParams,
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
