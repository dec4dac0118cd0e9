"""The arguments of a search: a problem in one of two forms, and settings in place of those in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any, cast

from .. import settings as settings_module
from ..core.problem import Mask, Problem
from ..errors import SettingsError, UnsupportedArgumentError
from ..operations.registry import OPERATIONS
from ..settings import Settings


def problem_of(problem: Problem | None, fields: Mapping[str, Any]) -> Problem:
    """The problem of a call that names it whole or by its fields.

    Raises:
        UnsupportedArgumentError: it names both, or a field does not exist.
        UnsupportedProblemError: the problem is outside what kernels here solve.
    """
    if problem is not None and fields:
        raise UnsupportedArgumentError(f"give a problem or its fields, not both: {sorted(fields)}")
    known = [field.name for field in dataclass_fields(Problem)]
    for name in fields:
        if name not in known:
            raise UnsupportedArgumentError(
                f"a problem has no field {name!r}; its fields: {', '.join(known)}"
            )
    return Problem(**{**_usual(fields), **fields}) if problem is None else problem


def _usual(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem that its operation has other defaults of than attention."""
    operation = OPERATIONS.get(str(fields.get("op", "attention")))
    if operation is None:
        return {}
    semantics = operation.semantics
    mask = fields.get("mask", semantics.default_mask)
    causal = isinstance(mask, str) and semantics.is_causal(cast(Mask, mask))
    return {"mask": mask, "causal": causal, **semantics.usual}


def check_listener(listener: object) -> None:
    """Check a listener.

    Raises:
        UnsupportedArgumentError: it is neither None nor callable.
    """
    if listener is not None and not callable(listener):
        raise UnsupportedArgumentError(
            f"listener must be a function of a message, or None, got {listener!r}"
        )


def settings_of(top_k: int, **arguments: Any) -> Settings:
    """The settings in force, with the arguments of a search in their place that are not None.

    Raises:
        SettingsError: an argument is not among what is allowed.
    """
    if type(top_k) is not int or top_k < 0:  # nor a bool
        raise SettingsError(f"top_k={top_k!r}: must be an integer of at least 0")
    changes = {name: value for name, value in arguments.items() if value is not None}
    return replace(settings_module.current(), **changes)
