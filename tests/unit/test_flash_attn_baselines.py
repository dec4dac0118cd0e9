"""The flash-attn packages as baselines: what they are asked for, what they lack, where they join."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention_autotuner.core.problem import Problem
from benchmarks.baselines import BASELINES
from benchmarks.baselines.flash_attn import (
    FROM_SITE,
    INSTALLED,
    FlashAttention3,
    beside_suites,
)

LATER = Problem(direction="backward", causal=True, seqlen_q=4096, seqlen_k=4096)


def test_only_the_deterministic_baseline_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Module:
        @staticmethod
        def flash_attn_func(q: Any, k: Any, v: Any, **options: Any) -> Any:
            asked.append(options)
            return q, None

    monkeypatch.setattr("benchmarks.baselines.flash_attn.import_module", lambda name: Module)
    for name in (*INSTALLED, *FROM_SITE):
        assert BASELINES[name].function(LATER)("q", "k", "v") == "q"
    assert asked == [{"causal": True}, {"causal": True, "deterministic": True}] * 2


def test_flash_attn_3_may_split_keys_forward_and_has_no_wide_deterministic_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FlashAttention3, "absence", lambda self: "")
    first, strict = (BASELINES[name] for name in INSTALLED)
    assert isinstance(first, FlashAttention3)
    assert first.extra(replace(LATER, direction="forward")) == {"num_splits": 0}
    for dims, takes, takes_strict in (
        *(((192, 192), True, True), ((200, 200), True, False), ((192, 128), True, True)),
        *(((64, 128), True, True), ((128, 256), False, False), ((256, 128), False, False)),
    ):
        problem = replace(LATER, dim_qk=dims[0], dim_v=dims[1])
        assert (first.limit(problem) == "") is takes
        assert (strict.limit(problem) == "") is takes_strict


def test_flash_attn_3_joins_every_suite_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(FlashAttention3, "absence", lambda self: "not installed")
    assert (beside_suites(None), beside_suites(tmp_path)) == ((), FROM_SITE)
    monkeypatch.setattr(FlashAttention3, "absence", lambda self: "")
    assert beside_suites(None) == INSTALLED
    assert beside_suites(tmp_path) == (*INSTALLED, *FROM_SITE)
