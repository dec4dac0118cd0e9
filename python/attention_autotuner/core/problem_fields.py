"""Problems named by some of their fields: by ``tune``, by the options of a command, or by the entries of a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, cast

from ..errors import UnsupportedArgumentError
from ..operations.registry import OPERATIONS
from .operation import require
from .problem import Mask, Problem

FOLLOWERS = {"heads_kv": "heads_q", "seqlen_k": "seqlen_q", "dim_v": "dim_qk"}
"""Field -> the field whose value it has where that alone is given."""

DTYPE_NAMES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
"""PyTorch's name of a dtype -> the one that a problem has."""

_FIELDS = tuple(field.name for field in dataclass_fields(Problem))


def problem_of_fields(fields: Mapping[str, Any]) -> Problem:
    """The problem with some of its fields.

    Left out, ``heads_kv``, ``seqlen_k`` and ``dim_v`` are as ``heads_q``, ``seqlen_q`` and ``dim_qk`` where these are
    given; the mask, ``causal`` and the sizes of a product are the operation's, and others have the defaults of
    :class:`.Problem`. A dtype may have PyTorch's name, or be PyTorch's.

    Raises:
        UnsupportedArgumentError: a field does not exist.
        UnsupportedProblemError: the problem is outside what kernels here solve.
    """
    for name in fields:
        if name not in _FIELDS:
            raise UnsupportedArgumentError(
                f"a problem has no field {name!r}; its fields: {', '.join(_FIELDS)}"
            )
    names = fields.get("modifications", ())
    named = isinstance(names, Collection) and not isinstance(names, str)
    require(
        named and all(isinstance(name, str) for name in names),
        f"modifications must be a list of names, got {names!r}",
    )
    following = {name: fields[other] for name, other in FOLLOWERS.items() if other in fields}
    whole = {**_of_operation(fields), **following, **fields}
    if "dtype" in whole:
        whole["dtype"] = dtype_name(whole["dtype"])
    return Problem(**whole)


def dtype_name(dtype: object) -> Any:
    """The name that a problem has for a dtype, given any name of it or PyTorch's own object; others as they are."""
    name = str(dtype).lower().removeprefix("torch.")
    return DTYPE_NAMES.get(name, name if name in DTYPE_NAMES.values() else dtype)


def _of_operation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a problem's operation has other defaults of than attention."""
    operation = OPERATIONS.get(str(fields.get("op", "attention")))
    if operation is None:
        return {}
    semantics = operation.semantics
    mask = fields.get("mask", semantics.default_mask)
    causal = isinstance(mask, str) and semantics.is_causal(cast(Mask, mask))
    return {"mask": mask, "causal": causal, **semantics.usual}
