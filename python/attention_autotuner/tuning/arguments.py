"""The arguments of a search: a problem in one of two forms, and settings in place of those in force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import settings as settings_module
from ..core.problem import Problem
from ..core.problem_fields import problem_of_fields
from ..errors import SettingsError, UnsupportedArgumentError
from ..settings import Settings


def problem_of(problem: Problem | None, fields: Mapping[str, Any]) -> Problem:
    """The problem of a call that names it whole or by its fields, as :func:`~..core.problem_fields.problem_of_fields`.

    Raises:
        UnsupportedArgumentError: it names both, or something else than a problem, or a field does not exist.
        UnsupportedProblemError: the problem is outside what kernels here solve.
    """
    if problem is not None and fields:
        raise UnsupportedArgumentError(f"give a problem or its fields, not both: {sorted(fields)}")
    if problem is None:
        return problem_of_fields(fields)
    check_problem(problem, " or None; its fields are arguments of their own")
    return problem


def check_problem(problem: object, also: str = "") -> None:
    """Check a problem.

    Args:
        problem: of an untyped caller.
        also: what else it may be, in messages.

    Raises:
        UnsupportedArgumentError: it is something else.
    """
    if not isinstance(problem, Problem):
        raise UnsupportedArgumentError(
            f"problem must be a Problem{also}, got {type(problem).__name__} {problem!r}"
        )


def check_listener(listener: object, *, optional: bool = True) -> None:
    """Check a listener.

    Raises:
        UnsupportedArgumentError: it is not callable, nor None where that is allowed.
    """
    if not (callable(listener) or (optional and listener is None)):
        also = ", or None" if optional else ""
        raise UnsupportedArgumentError(
            f"listener must be a function of a message{also}, got {listener!r}"
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
