"""Results of tunable functions: which are those of the reference, and which are wrong."""

from __future__ import annotations

import copy
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import settings
from attention_autotuner.tuning.function_values import compare
from attention_autotuner.tuning.functions import Tunable

NAN = float("nan")


@pytest.mark.parametrize(
    ("right", "others"),
    [
        (np.float32(1), [np.float32(1.001), np.float64(1), np.float32(NAN), 1.0, np.ones(1)]),
        (np.int64(1), [np.int64(2), np.int32(1), 1]),
        (np.bool_(True), [np.bool_(False), True]),
        (np.ones(2), [np.ones(2, np.float32), np.ones((2, 1)), [1.0, 1.0], torch.ones(2)]),
        (np.array([1, 2j]), [np.array([1, -2j])]),
        (np.array([NAN, np.inf]), [np.array([NAN, 1e300]), np.array([0, np.inf])]),
        (np.ones(2, np.longdouble), [np.array([1, 1.1], np.longdouble), np.ones(2)]),
        (np.array(["a"]), [np.array(["b"]), np.array(["ab"])]),
        (np.array([1, "a", None]), [np.array([1, "b", None]), np.array([1, "a", 0])]),
        (np.zeros(1, [("a", "i4")]), [np.ones(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])]),
        (torch.ones(2), [torch.ones(2).half(), torch.ones(2, 1), np.ones(2, np.float32), None]),
        (torch.ones(2).to(torch.float8_e4m3fn), [torch.zeros(2).to(torch.float8_e4m3fn)]),
        (torch.eye(2).to_sparse(), [2 * torch.eye(2).to_sparse(), torch.eye(2)]),
        ("right", ["wrong", 1, None]),
        (Decimal(1), [Decimal(2), Decimal("nan")]),
        (Decimal("nan"), [Decimal(1)]),
        (1, [2, True, 1.0]),
        (1.5, [1.6, np.float64(1.5)]),
        (1e300, [2e300]),
        (1 << 80, [1]),
        ([1, 2.0], [[1, 2.5], [1], (1, 2.0)]),
        ({"a": np.ones(1), "b": 1}, [{"a": np.ones(1)}, {"a": np.ones(1), "c": 1}]),
        ({"a": 1, "b": [2]}, [{"a": 1, "b": [3]}]),
        ({1, 2}, [{1, 3}]),
        (None, [0]),
        (range(3), [range(4)]),
    ],
    ids=str,
)
def test_another_value_type_dtype_or_shape_is_wrong(right: Any, others: list[Any]) -> None:
    assert compare({"return": copy.deepcopy(right)}, {"return": right}, None) == ""
    for other in others:
        reason = compare({"return": other}, {"return": right}, None)
        assert reason.startswith("result return"), other
    assert compare({"out": {"a": [1, 2]}}, {"out": {"a": [1, 3]}}, None) == (
        "result out['a'][1]: it is 2, 3 is expected"
    )


def test_what_has_no_comparison_counts_by_type() -> None:
    class Unlike:
        def __eq__(self, other: object) -> bool:
            raise ValueError("not comparable")

        __hash__ = None  # type: ignore[assignment]  # as of most that compare

    class Vague(Unlike):
        def __eq__(self, other: object) -> Any:
            return "it depends"

        __hash__ = None  # as above

    for kind in (object, Unlike, Vague, lambda: iter([1])):
        assert compare({"return": kind()}, {"return": kind()}, None) == ""
    reordered = {"b": 2, "a": 1}
    assert compare({"return": reordered}, {"return": {"a": 1, "b": 2}}, None) == ""


def test_tolerances_are_those_of_the_dtype() -> None:
    for dtype, ulps in (("float16", 2), ("float32", 128), ("float64", 128)):
        of_torch, of_numpy = getattr(torch, dtype), np.dtype(dtype)
        for off, is_right in ((0.9 * ulps, True), (1.1 * ulps + 1, False)):
            values = [4.0, 1.0 + 4.0 * off * torch.finfo(of_torch).eps]
            for out, right in (
                (torch.tensor(values, dtype=of_torch), torch.tensor([4.0, 1.0], dtype=of_torch)),
                (np.array(values, of_numpy), np.array([4.0, 1.0], of_numpy)),
            ):
                reason = compare({"return": out}, {"return": right}, None)
                assert (reason == "") == is_right
                assert compare({"return": out}, {"return": right}, 10.0) == ""
    assert compare({"return": 1.0 + 1e-6}, {"return": 1.0}, None) == ""  # as of float32


@pytest.mark.parametrize("first", ["float32", "float16"])
def test_a_reference_may_have_a_wider_dtype_than_all_configurations(
    first: str, tmp_path: Path
) -> None:
    def exact(x: torch.Tensor) -> Any:
        return [x.double() / 3, np.float64(x[0]) / 3, 1]

    def third(x: torch.Tensor, *, dtype: str) -> Any:
        scalar = np.dtype(dtype).type(float(x[0]) / 3)
        return [(x / 3).to(getattr(torch, dtype)), scalar, 1]

    dtypes = [first, *({"float16", "float32", "float64"} - {first})]
    with settings.override(in_process=True, cache_dir=tmp_path):
        tunable = Tunable(third, {"dtype": dtypes}, reference=exact, budget_seconds=0.1)
        kinds = {t.name: t.outcome.kind for t in tunable.tune(torch.ones(2)).timings}
    assert {name for name, kind in kinds.items() if kind == "ok"} == {f"dtype={first}"}
    assert set(kinds.values()) == {"ok", "wrong"}
