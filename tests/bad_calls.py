"""Calls that must be refused: tensors for tables of them, and the check that a refusal names constraint and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_autotuner.errors import AttentionAutotunerError

Row = tuple[str, Callable[[], object], str, str]
"""A name, the call, and the texts of the message that name the constraint and the value."""

HALF = torch.float16


def t(*shape: int, dtype: torch.dtype = HALF, device: str = "cpu") -> torch.Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=dtype, device=device)


def calling(function: Callable[..., object], *good: Any) -> Callable[..., Callable[[], object]]:
    """A maker of calls: ``{position: value}`` replaces arguments of a good call, options are added to it."""

    def make(changed: dict[int, Any] | None = None, *rest: Any, **options: Any) -> Any:
        arguments = [(changed or {}).get(n, value) for n, value in enumerate(good)]
        return lambda: function(*arguments, *rest, **options)

    return make


def parametrize(rows: list[Row]) -> pytest.MarkDecorator:
    """A test of ``(call, constraint, value)`` for every row; names are unique."""
    names = [name for name, *_ in rows]
    assert len(set(names)) == len(names), sorted({name for name in names if names.count(name) > 1})
    return pytest.mark.parametrize(
        ("call", "constraint", "value"), [row[1:] for row in rows], ids=names
    )


def check_refusal(call: Callable[[], object], constraint: str, value: str) -> None:
    """Check that a call raises an error of this package that names both."""
    with pytest.raises(AttentionAutotunerError) as caught:
        call()
    message = str(caught.value)
    assert constraint in message, message
    assert value in message, message
