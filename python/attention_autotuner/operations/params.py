"""The params of a launch as far as the problem alone decides them, and the workspace that they ask for."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.abi import ABI_VERSION, STRUCTS, SYMBOL_PREFIX, Tensor
from ..core.modifications import SPANNED, TYPICAL_BIAS_DISTANCE
from ..core.problem import Problem
from ..serving.loader import load
from .registry import OPERATIONS


def struct_of(problem: Problem) -> type[ctypes.Structure]:
    """The struct that a problem's kernels are launched with."""
    packed = f"{SYMBOL_PREFIX}{problem.op}_packed_{problem.direction}_params"
    if problem.packed and packed in STRUCTS:
        return STRUCTS[packed]
    return STRUCTS[f"{SYMBOL_PREFIX}{problem.op}_{problem.direction}_params"]


def abi_tensor(shape: Sequence[int], strides: Sequence[int], address: int | None = None) -> Tensor:
    """A tensor as the C ABI has it, null without an address; one without a batch is a mask, which heads may share."""
    if len(shape) == 3:
        strides = (0, 0 if shape[0] == 1 else strides[0], *strides[1:])
    batch, head, row, _ = strides
    return Tensor(data=address, stride_batch=batch, stride_head=head, stride_row=row)


SOMEWHERE = 256  # stands for an address that is not known, and not null


def field_names(problem: Problem) -> tuple[str, ...]:
    """The names of the params that a problem's kernels are launched with."""
    return tuple(str(entry[0]) for entry in struct_of(problem)._fields_)


def params_of(problem: Problem, scale: float | None = None) -> ctypes.Structure:
    """A problem's params with every size set and every pointer null.

    Args:
        problem: gives the sizes.
        scale: the factor of Q K^T; the operation's default when None.

    Returns:
        Scalars as the operation has them by default: retnet's normalise, without an upper limit and with r as a
        constant of the gradients.
    """
    struct = struct_of(problem)
    factor = problem.semantics.scale(problem) if scale is None else scale
    operation = OPERATIONS[problem.op].module("params")
    values = {
        "struct_size": ctypes.sizeof(struct),
        "abi_version": ABI_VERSION,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "dim_qk": problem.dim_qk,
        "dim_v": problem.dim_v,
        **operation.scalars(problem, factor),
    }
    names = field_names(problem)
    return struct(**{name: value for name, value in values.items() if name in names})


def workspace_bytes(
    problem: Problem, library: Path, launch_knobs: Mapping[str, int] | None = None
) -> int:
    """Bytes of device memory that a built kernel takes beside its tensors; needs no GPU.

    Args:
        problem: gives the sizes.
        library: the kernel's library, or the folder that holds it.
        launch_knobs: that it is launched with.

    Raises:
        ArtifactError: the library cannot be loaded.
    """
    params: Any = params_of(problem)
    # Kernels answer for params that they could be launched with; nobody reads these.
    if problem.score == "masked":
        params.mask.data = SOMEWHERE
    elif problem.score == "decayed":
        # The latter is a field of packed sequences alone.
        params.log2_gamma = params.cu_seqlens = SOMEWHERE
    elif problem.compiled_modifications:
        params.softcap, params.attn_mask.data = 1.0, SOMEWHERE
        params.q.stride_head = problem.dim_qk  # heads of no stride are not rows of one tile
        params.bias_distance = TYPICAL_BIAS_DISTANCE
        pointers = ("alibi_slopes", "bias_table", "dattn_mask", "dbias_table", "sinks")
        spanned = [name for name in SPANNED if name in problem.modifications]
        for name in (*pointers, "cu_seqlens_q", "cu_seqlens_k", *spanned):
            setattr(params, name, SOMEWHERE)
    return load(library).with_launch_knobs(launch_knobs or {}).workspace_bytes(params)
