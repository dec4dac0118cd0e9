"""Searches after which the next call in this process sees the new records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..tuning import listed, search, step
from .dispatch import invalidate

P = ParamSpec("P")
R = TypeVar("R")


def invalidating(function: Callable[P, R]) -> Callable[P, R]:
    """A function after which the next call in this process sees the new records."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        finally:
            invalidate()

    return wrapped


tune = invalidating(search.tune)
tune_step = invalidating(step.tune_step)
tune_problems = invalidating(listed.tune_problems)
