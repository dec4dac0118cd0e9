"""Kernels whose knob schema changed since a record was written, for tests of its validity."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attention_autotuner.kernels.configs import knob_schema
from attention_autotuner.tuning import record_schema, validity

KnobsOfAnotherDay = Callable[[str], None]
"""Changes the knob schema of the kernel of this name."""


def other_schemas(monkeypatch: pytest.MonkeyPatch) -> KnobsOfAnotherDay:
    changed: set[str] = set()

    def schema(kernel: str) -> str:
        return "of another day" if kernel in changed else knob_schema(kernel)

    for module in (record_schema, validity):
        monkeypatch.setattr(module, "knob_schema", schema)
    return changed.add
