"""Calls that start no compiler and never wait for the GPU, for tests of what changes from call to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attention_autotuner.codegen import build as build_module


@contextmanager
def nothing_built_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where the block builds a kernel, or synchronizes with the GPU."""
    runs: list[object] = []
    compile_units: Callable[..., Any] = build_module._compile

    def counted(*arguments: Any, **named: Any) -> Any:
        runs.append(arguments)
        return compile_units(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_compile", counted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not runs
