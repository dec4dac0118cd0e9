"""The params of a launch as far as the problem alone decides them, and the workspace that they ask for."""

from __future__ import annotations

import ctypes
from pathlib import Path

from ..abi import ABI_VERSION, AttentionBackwardParams, AttentionForwardParams
from ..codegen.problem import Direction, Op, Problem
from ..loader import load

STRUCTS: dict[tuple[Op, Direction], type[ctypes.Structure]] = {
    ("attention", "forward"): AttentionForwardParams,
    ("attention", "backward"): AttentionBackwardParams,
}
"""(op, direction) -> what its kernels are launched with."""


def params_of(problem: Problem, softmax_scale: float | None = None) -> ctypes.Structure:
    """A problem's params with every size set, every pointer null, and scale ``1 / sqrt(dim_qk)`` when None is given."""
    struct = STRUCTS[problem.op, problem.direction]
    return struct(
        struct_size=ctypes.sizeof(struct),
        abi_version=ABI_VERSION,
        batch=problem.batch,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        dim_qk=problem.dim_qk,
        dim_v=problem.dim_v,
        causal=int(problem.causal),
        causal_offset=problem.causal_offset,
        softmax_scale=problem.dim_qk**-0.5 if softmax_scale is None else softmax_scale,
    )


def workspace_bytes(problem: Problem, library: Path) -> int:
    """Bytes of device memory that a built kernel takes beside its tensors; needs no GPU.

    Args:
        problem: gives the sizes.
        library: the kernel's library, or the folder that holds it.

    Raises:
        ArtifactError: the library cannot be loaded.
    """
    return load(library).workspace_bytes(params_of(problem))
