"""Argument checks that operations share, each failure naming the constraint and the value.

They read shapes, strides and dtypes only, so that fake tensors pass through them as well as real ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal, cast

import torch

from ...core.operation import require
from ...core.problem import MAX_EXTENT, DType, Problem, is_integer
from ...errors import UnsupportedProblemError
from .plain import is_plain, notice

DTYPE_NAMES: dict[torch.dtype, DType] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
VECTOR_BYTES = 16
VECTOR_ELEMENTS = 8
MAX_SCALE = torch.finfo(torch.float32).max
MANY_HEADS = 64
MANY_HEADS_A_TOKEN = 4
LAYOUT_HINT = (
    'layout="bhsd", the default, is [batch, heads, seqlen, dim]; pass layout="bshd" for '
    "[batch, seqlen, heads, dim], as flash_attn and fla have it"
)
SUPPORTED_DEVICES = ("cuda", "cpu", "meta")


def to_float(number: Any) -> float:
    """A number as a float: infinite where it is an integer beyond all floats."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def whole(number: Any) -> Any:
    """NumPy's integers as Python's, anything else as it is."""
    # Python's own first: torch.compile traces no question about others.
    if type(number) is int or torch.compiler.is_compiling():
        return number
    is_other = isinstance(number, Integral) and not isinstance(number, int)
    return int(number) if is_other else number


def check_ends(name: str, ends: torch.Tensor, rows: int) -> None:
    """Check where packed sequences end, if the values lie on the CPU; those of a GPU are not looked at.

    Rows behind the last sequence are nobody's, so that they may end before the rows do.

    Raises:
        UnsupportedProblemError: they do not begin at 0, decrease, or go beyond the rows.
    """
    if ends.device.type != "cpu":
        return
    values = ends.tolist()
    require(values[0] == 0, f"{name} must begin with 0, got {values[0]}")
    for left, right in pairwise(values):
        require(left <= right, f"{name} must never decrease, got {right} after {left}")
    require(values[-1] <= rows, f"{name} must end within the {rows} rows, got {values[-1]}")


def check_scale(scale: float | None, name: str) -> None:
    """Check that a scale is a finite fp32 number; None is passed over.

    Raises:
        UnsupportedProblemError: it is not.
    """
    # NaN is in no range. A plain `if`, as torch.compile cannot put a symbolic float into a message.
    if scale is not None and not -MAX_SCALE <= scale <= MAX_SCALE:
        raise UnsupportedProblemError(f"{name} must be finite in fp32, got {scale}")


def check_flags(**flags: object) -> None:
    """Check arguments that are switches, by their names.

    Raises:
        UnsupportedProblemError: one is neither True nor False.
    """
    for name, value in flags.items():
        require(isinstance(value, bool), f"{name} must be True or False, got {shown(value)}")


def check_some_gradient(result: str, *gradients: torch.Tensor | None) -> None:
    """Check that there is anything to propagate, through o or another result.

    Raises:
        UnsupportedProblemError: every gradient is None.
    """
    require(
        any(x is not None for x in gradients),
        f"the gradient of o or of {result} must be given, got None for both",
    )


def shown(value: object) -> str:
    """A value for a message: arrays by type and shape only, whose elements may lie on a GPU."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "nested tensor"  # which may have no shape
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} {list(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_longest(name: str, length: object, *, optional: bool = False) -> None:
    """Check a greatest length of packed sequences.

    Raises:
        UnsupportedProblemError: it is no integer from 0 to 2**30, nor None where that is allowed.
    """
    fine = is_integer(length) and 0 <= cast(int, length) <= MAX_EXTENT
    # The text only here, as torch.compile cannot put a symbolic length into one.
    if not (fine or (optional and length is None)):
        allowed = "None or an integer" if optional else "an integer"
        raise UnsupportedProblemError(
            f"{name} must be {allowed} from 0 to 2**30, got {shown(length)}"
        )


def check_layout(name: str, x: torch.Tensor) -> None:
    """Check that a tensor's values lie in strided memory.

    Raises:
        UnsupportedProblemError: it is sparse, nested or of another layout.
    """
    if not (x.layout == torch.strided and not x.is_nested and not x.is_quantized):
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        raise UnsupportedProblemError(f"{name} must be a dense strided tensor, got {kind}")


def check_layouts(named: Mapping[str, torch.Tensor | None]) -> None:
    """Check that tensors by their names have layouts that the dispatcher has a kernel for; None is passed over.

    Raises:
        UnsupportedProblemError: one is sparse, nested or of another layout.
    """
    for name, x in named.items():
        if x is not None:
            check_layout(name, x)


def check_dims(name: str, x: torch.Tensor, dims: str = "[batch, heads, seqlen, dim]") -> None:
    """Check that a tensor has four dimensions, named in the message.

    Raises:
        UnsupportedProblemError: it has more or fewer.
    """
    require(x.dim() == 4, f"{name} must have 4 dimensions {dims}, got {x.dim()}")


def check_places(**tensors: torch.Tensor | None) -> None:
    """Check that the dispatcher has a kernel to hand tensors to, by their names; None is passed over.

    Raises:
        UnsupportedProblemError: one is on another kind of device, or in no strided memory.
    """
    for name, x in tensors.items():
        if x is None:
            continue
        require(
            x.device.type in SUPPORTED_DEVICES,
            f"{name} must be on one of {SUPPORTED_DEVICES}, got {x.device}",
        )
        check_layout(name, x)


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **problem: Any) -> None:
    """Check q, k and v and how they fit together; batch, heads and sequences may be empty.

    Args:
        q: ``[batch, heads_q, seqlen_q, dim_qk]``.
        k: ``[batch, heads_kv, seqlen_k, dim_qk]``.
        v: ``[batch, heads_kv, seqlen_k, dim_v]``.
        problem: the fields of the :class:`Problem` beside their sizes, as far as its limits depend on them.

    Raises:
        UnsupportedProblemError: they name nothing that can be computed here.
    """
    check_kinds(q, k, v)
    check_shapes(q.shape, k.shape, v.shape, **problem)
    for name, x in (("q", q), ("k", k), ("v", v)):
        # An array without elements may have strides of 0, as NumPy's have.
        require(
            x.stride(3) == 1 or x.numel() == 0,
            f"{name} must have unit stride in its last dim, got {x.stride(3)}",
        )


def check_kinds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check the layouts, ranks, dtypes and devices of q, k and v.

    Raises:
        UnsupportedProblemError: kernels take no such tensors, or one is of another kind than the others.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_layout(name, x)
        check_dims(name, x)
        require(x.dtype in DTYPE_NAMES, f"{name} must be float16 or bfloat16, got {x.dtype}")
    require(
        q.dtype == k.dtype == v.dtype,
        f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}",
    )
    require(
        q.device == k.device == v.device,
        f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}",
    )


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int], **problem: Any) -> None:
    """Check the shapes of q, k and v; see :func:`check_tensors`.

    Raises:
        UnsupportedProblemError: they do not fit together, or are outside the limits of a problem.
    """
    require(q[0] == k[0] == v[0], f"q, k and v must have one batch, got {q[0]}, {k[0]} and {v[0]}")
    require(k[1] == v[1], f"k and v must have the same heads, got {k[1]} and {v[1]}")
    if k[1] == 0:
        require(q[1] == 0, f"heads of k and v must be at least 1 for {q[1]} heads of q, got 0")
    elif q[1] % k[1]:
        exchanged = k[2] == v[2] > 0 and q[2] > 0 and q[2] % k[2] == 0
        raise UnsupportedProblemError(
            f"heads of q must be a multiple of heads of k and v, got {q[1]} and {k[1]}"
            + (f"; with dims 1 and 2 exchanged they would be: {LAYOUT_HINT}" if exchanged else "")
        )
    require(q[3] == k[3], f"q and k must have the same dim, got {q[3]} and {k[3]}")
    require(k[2] == v[2], f"k and v must have the same seqlen, got {k[2]} and {v[2]}")
    # The limits of sizes and dims are the problem's own; an empty extent stands in for any other number.
    Problem(
        batch=max(q[0], 1),
        heads_q=max(q[1], 1),
        heads_kv=max(k[1], 1) if q[1] else 1,
        seqlen_q=max(q[2], 1),
        seqlen_k=max(k[2], 1),
        dim_qk=q[3],
        dim_v=v[3],
        **problem,
    )


def is_empty(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True where there is no query or no key, so that no kernel has anything to read."""
    return q.numel() == 0 or k.numel() == 0


def notice_exchanged(q: torch.Tensor, k: torch.Tensor) -> None:
    """Log, once a process, that heads and sequence of checked tensors look exchanged.

    They do where k has many heads, several for each key, and memory in the order of its dimensions: attention of
    ``[batch, seqlen, heads, dim]`` gives a result of the shape that its caller expects, and wrong numbers.
    """
    for x in (q, k):
        heads, seqlen = x.shape[1], x.shape[2]
        many = heads >= MANY_HEADS and heads >= MANY_HEADS_A_TOKEN * seqlen
        if not (many and x.stride(1) >= x.stride(2)):
            return
    notice(
        f"q and k have {MANY_HEADS} heads or more and few tokens, as [batch, seqlen, heads, dim] read as "
        f"[batch, heads, seqlen, dim] has: {LAYOUT_HINT}"
    )


def check_like(
    name: str, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Check a tensor whose shape, dtype and device follow from those of q, k and v; strides are free.

    Raises:
        UnsupportedProblemError: one is another.
    """
    check_layout(name, x)
    require(
        tuple(x.shape) == tuple(shape),
        f"{name} must have the shape {tuple(shape)}, got {tuple(x.shape)}",
    )
    require(x.dtype == dtype, f"{name} must be {dtype}, got {x.dtype}")
    require(x.device == device, f"{name} must be on q's device {device}, got {x.device}")


def has_values(x: torch.Tensor) -> bool:
    """True where a tensor's values can be read at once: on the CPU, and where nothing traces or transforms the call."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(x)


def check_results(
    named: Mapping[str, torch.Tensor | None], q: torch.Tensor, v: torch.Tensor | None = None
) -> None:
    """Check tensors by their names against checked q and v; None is passed over, and strides are free.

    Args:
        named: shaped like o and in q's dtype; without v like a value of every row, in fp32.
        q: the queries.
        v: the values.

    Raises:
        UnsupportedProblemError: one is of another shape, dtype or device.
    """
    dtype = torch.float32 if v is None else q.dtype
    shape = q.shape[:3] if v is None else (*q.shape[:3], v.shape[3])
    for name, x in named.items():
        if x is not None:
            check_like(name, x, shape, dtype, q.device)


def sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """The fields of a problem that the dtype and shapes of checked, non-empty tensors decide."""
    return {
        "dtype": DTYPE_NAMES[q.dtype],
        "batch": q.shape[0],
        "heads_q": q.shape[1],
        "heads_kv": k.shape[1],
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "dim_qk": q.shape[3],
        "dim_v": v.shape[3],
    }


def alignment_bytes(*tensors: torch.Tensor) -> Literal[2, 16]:
    """The widest accesses that all rows of some tensors allow."""
    return 16 if all(is_aligned(x) for x in tensors) else 2


def is_aligned(x: torch.Tensor) -> bool:
    """Return True where every row of a tensor with unit stride in its last dim starts at a multiple of 16 bytes.

    Strides of dimensions of size 1 do not matter.
    """
    rows = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.data_ptr() % VECTOR_BYTES == 0 and all(
        size <= 1 or stride % VECTOR_ELEMENTS == 0 for size, stride in rows
    )


def output_strides(
    shape: Sequence[int], strides: Sequence[int], dim_v: int
) -> tuple[int, int, int, int]:
    """Strides of a dense output with q's order of dimensions, its last dim innermost.

    Args:
        shape: of q.
        strides: of q; dimensions that q only broadcasts (stride 0) or that have size 1 keep their place outside.
        dim_v: the output's last dim.
    """
    fixed = [axis for axis in range(3) if shape[axis] <= 1 or strides[axis] == 0]
    moving = sorted((axis for axis in range(3) if axis not in fixed), key=lambda a: strides[a])
    result = [0, 0, 0, 1]
    step = dim_v
    for axis in [*moving, *reversed(fixed)]:
        result[axis] = step
        step *= max(shape[axis], 1)
    return (result[0], result[1], result[2], 1)


def empty_output(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An uninitialised output of q's dtype and order of dimensions, with v's last dim."""
    strides = output_strides(q.shape, q.stride(), v.shape[3])
    return q.new_empty_strided((*q.shape[:3], v.shape[3]), strides)


def empty_gradient(x: torch.Tensor) -> torch.Tensor:
    """An uninitialised gradient of a tensor: dense, in its order of dimensions."""
    return x.new_empty_strided(x.shape, output_strides(x.shape, x.stride(), x.shape[3]))
