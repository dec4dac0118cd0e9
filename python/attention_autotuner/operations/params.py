"""The params of a launch as far as the problem alone decides them, and the workspace that they ask for."""

from __future__ import annotations

import ctypes
from math import inf
from pathlib import Path
from typing import Any

from ..core.abi import (
    ABI_VERSION,
    AttentionBackwardParams,
    AttentionForwardParams,
    RetentionBackwardParams,
    RetentionForwardParams,
    RetNetBackwardParams,
    RetNetForwardParams,
)
from ..core.problem import Direction, Op, Problem
from ..serving.loader import load

STRUCTS: dict[tuple[Op, Direction], type[ctypes.Structure]] = {
    ("attention", "forward"): AttentionForwardParams,
    ("attention", "backward"): AttentionBackwardParams,
    ("retnet", "forward"): RetNetForwardParams,
    ("retnet", "backward"): RetNetBackwardParams,
    ("retention", "forward"): RetentionForwardParams,
    ("retention", "backward"): RetentionBackwardParams,
}
"""(op, direction) -> what its kernels are launched with."""


SOMEWHERE = 256  # an address that is not null


def field_names(problem: Problem) -> tuple[str, ...]:
    """The names of the params that a problem's kernels are launched with."""
    return tuple(str(entry[0]) for entry in STRUCTS[problem.op, problem.direction]._fields_)


def default_scale(problem: Problem) -> float:
    """The factor of Q K^T where a caller names none: 1 for retnet, ``1 / sqrt(dim_qk)`` for the others."""
    return 1.0 if problem.op == "retnet" else problem.dim_qk**-0.5


def params_of(problem: Problem, scale: float | None = None) -> ctypes.Structure:
    """A problem's params with every size set and every pointer null.

    Args:
        problem: gives the sizes.
        scale: the factor of Q K^T; :func:`default_scale` when None.

    Returns:
        Retnet's normalise, without an upper limit and with r as a constant of the gradients.
    """
    struct = STRUCTS[problem.op, problem.direction]
    factor = default_scale(problem) if scale is None else scale
    values = {
        "struct_size": ctypes.sizeof(struct),
        "abi_version": ABI_VERSION,
        "batch": problem.batch,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seqlen": problem.seqlen_q,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "dim_qk": problem.dim_qk,
        "dim_v": problem.dim_v,
        "causal": int(problem.causal),
        "causal_offset": problem.causal_offset,
        "softmax_scale": factor,
        "scale": factor,
        "normalize": 1,
        "r_clamp_max": inf,
        "r_grad": 0,
    }
    names = field_names(problem)
    return struct(**{name: value for name, value in values.items() if name in names})


def workspace_bytes(problem: Problem, library: Path) -> int:
    """Bytes of device memory that a built kernel takes beside its tensors; needs no GPU.

    Args:
        problem: gives the sizes.
        library: the kernel's library, or the folder that holds it.

    Raises:
        ArtifactError: the library cannot be loaded.
    """
    params: Any = params_of(problem)
    # Kernels answer for params that they could be launched with; nobody reads these.
    if problem.score == "masked":
        params.mask.data = SOMEWHERE
    elif problem.score == "decayed":
        params.log2_gamma = SOMEWHERE
    return load(library).workspace_bytes(params)
