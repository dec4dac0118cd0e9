"""Kernels whose knobs can say something else than they could, for tests of what that disturbs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attention_autotuner.codegen import candidate as candidate_module
from attention_autotuner.codegen.kernel_names import knob_schema
from attention_autotuner.tuning import record_migration

KnobsOfAnotherDay = Callable[[str], None]
"""Gives the kernel of this name another knob schema."""


def other_schemas(monkeypatch: pytest.MonkeyPatch) -> KnobsOfAnotherDay:
    changed: set[str] = set()

    def schema(kernel: str, variant: str = "") -> str:
        return "of another day" if kernel in changed else knob_schema(kernel, variant)

    monkeypatch.setattr(candidate_module, "knob_schema", schema)
    monkeypatch.setattr(record_migration, "knob_schema", schema)
    return changed.add
