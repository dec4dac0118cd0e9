"""Bad values of several functions' common arguments, and values of other libraries that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import (
    Decay,
    flash_attn_func,
    flash_attn_varlen_func,
    matmul,
    retention_func,
    retnet_attn_func,
)
from attention_autotuner.compat import fla
from attention_autotuner.compat import flash_attn as of_flash_attn
from attention_autotuner.errors import UnknownCandidateError
from tests.bad_calls import HALF, Row, calling, check_refusal, parametrize, t

Q, ROWS, A, B = t(1, 2, 6, 16), t(6, 2, 16), t(16, 24), t(24, 8)
attn = calling(flash_attn_func, Q, Q, Q)
retain: Callable[..., Any] = retention_func
fla_retain: Callable[..., Any] = fla.chunk_retention
retention = calling(retention_func, Q, Q, Q)
product = calling(matmul, A, B)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(ends_q: Any, ends_k: Any = None, longest: Any = 6, **options: Any) -> Any:
    ends = (ends_q, ends_q if ends_k is None else ends_k)
    function: Any = flash_attn_varlen_func
    return lambda: function(ROWS, ROWS, ROWS, *ends, longest, longest, **options)


WRONG_ENDS: list[tuple[str, torch.Tensor, str, str]] = [
    ("beyond the rows", int32(0, 2, 7), "must end within the 6 rows", "got 7"),
    ("decreasing", int32(0, 5, 3), "must never decrease", "got 3 after 5"),
    ("not from 0", int32(1, 6), "must begin with 0", "got 1"),
    ("negative", int32(-1, 6), "must begin with 0", "got -1"),
    ("negative later", int32(0, -2, 6), "must never decrease", "got -2 after 0"),
]
ENDS: list[Row] = []
for name, ends, words, value in WRONG_ENDS:
    of_retention = retention(cu_seqlens=ends)
    good = int32(*range(len(ends)))
    ENDS += [
        (f"retention, {name}", of_retention, f"cu_seqlens {words}", value),
        (f"queries, {name}", packed(ends, good), f"cu_seqlens_q {words}", value),
        (f"keys, {name}", packed(good, ends), f"cu_seqlens_k {words}", value),
    ]


def of_fla(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: fla_retain(Q, Q, Q, cu_seqlens=torch.tensor([0, 2], dtype=dtype))


FLA: list[Row] = [
    (
        f"fla {dtype}",
        of_fla(dtype),
        "cu_seqlens must be one of (torch.int32, torch.int64)",
        str(dtype),
    )
    for dtype in (torch.float32, torch.int16, torch.bool)
]

CALLERS: dict[str, Callable[..., Callable[[], object]]] = {
    "attention": attn,
    "packed": lambda **options: packed(int32(0, 6), **options),
    "retention": retention,
    "retnet": calling(retnet_attn_func, Q, Q, Q, Decay(0.9)),
    "product": product,
}
CONFIGS: list[Row] = [
    (f"{kind}, {type(config).__name__} {text}", make(config=config), "config must be", text)
    for kind, make in CALLERS.items()
    for config, text in (
        (3, "got int 3"),
        (True, "got bool True"),
        ([], "got list []"),
        ((), "got tuple ()"),
        (b"x", "got bytes b'x'"),
        ([3], "got int 3"),
        ({"kernel"}, "got set {'kernel'}"),
        (np.zeros(1), "got ndarray"),
    )
]

WINDOW = "window_size must be two integers from -1 to 2**30"
WINDOWS: list[Row] = [
    (f"{kind}, {text}", make(window_size=window), WINDOW, text)
    for kind, make in (("attention", attn), ("packed", CALLERS["packed"]))
    for window, text in (
        (np.array([1, 2]), "got ndarray [2]"),
        (torch.tensor([1, 2]), "got Tensor [2]"),
        ((np.array([1, 2]), 0), "got (array([1, 2]), 0)"),
        ((np.int64(-2), 0), "got (np.int64(-2), 0)"),
        ((np.float32(1), 0), "got (np.float32(1.0), 0)"),
        ((np.True_, 0), "got (np.True_, 0)"),
        ((True, 0), "got (True, 0)"),
        (7, "got 7"),
    )
]

PRODUCTS: list[Row] = [
    ("columns of a", product({0: t(16, 20), 1: t(20, 8)}), "a must lie by rows or", "(20, 1)"),
    (
        "12 of 16 columns",
        product({0: t(16, 16)[:, :12], 1: t(12, 8)}),
        "k must be a positive",
        "got 12",
    ),
    ("columns of b", product({1: t(24, 16)[:, :12]}), "n must be a positive", "got 12"),
    ("no unit stride", product({0: t(16, 48)[:, ::2]}), "a must lie by rows or", "(48, 2)"),
    ("address", product({0: t(16, 32)[:, 1:25]}), "a must lie by rows or by columns", "(32, 1)"),
    ("rows by columns", product({0: t(24, 16)[:, :9].T}), "rows of A that lies by", "got 9"),
]

HINTS: list[Row] = [
    ("scale of retention", retention(softmax_scale=0.1), "did you mean scale?", "0.1"),
    ("causal retention", retention(causal=True), "it is causal always", "causal=True"),
    ("mask of blocks", attn(block_mask=3), "document_ids and attn_mask", "got 3"),
    ("negative softcap", attn(softcap=-1.0), "not negative", "got -1.0"),
]


@parametrize([*ENDS, *FLA, *CONFIGS, *WINDOWS, *PRODUCTS, *HINTS])
def test_bad_values_are_refused(call: Callable[[], object], constraint: str, value: str) -> None:
    check_refusal(call, constraint, value)


def test_a_config_of_another_type_is_no_candidate() -> None:
    with pytest.raises(UnknownCandidateError):
        attn(config=3)()


def test_sequences_may_end_before_the_rows_do() -> None:
    ends = int32(0, 2, 2, 5)
    assert packed(ends)().shape == ROWS.shape
    assert retain(Q, Q, Q, cu_seqlens=ends)[0].shape == Q.shape
    assert fla_retain(*[Q.transpose(1, 2)] * 3, cu_seqlens=ends.long())[0].shape == (1, 6, 2, 16)


def test_integers_of_numpy_are_integers() -> None:
    q, k, v = (torch.randn(1, 2, 6, 16).half() for _ in range(3))
    function: Any = flash_attn_func
    varlen: Any = flash_attn_varlen_func
    expected = function(q, k, v, window_size=(2, 0))
    for window in ((np.int64(2), 0), [np.int32(2), np.int8(0)], (2, np.uint8(0))):
        assert torch.equal(function(q, k, v, window_size=window), expected)
        rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        ends, longest = int32(0, 6), np.int64(6)
        arguments: Any = (*rows, ends, ends, longest, longest)
        o = varlen(*arguments, window_size=window)
        torch.testing.assert_close(o.transpose(0, 1), expected[0])
    everything = function(q, k, v)
    assert torch.equal(function(q, k, v, window_size=(np.int64(-1), np.int64(-1))), everything)
    three: Any = [x.transpose(1, 2) for x in (q, k, v)]
    window = (np.int64(-7), np.int64(0))
    o = of_flash_attn.flash_attn_func(three[0], three[1], three[2], window_size=window)
    assert torch.equal(o.transpose(1, 2), function(q, k, v, causal=True))


def test_empty_arrays_need_no_unit_stride() -> None:
    def strideless(*shape: int) -> torch.Tensor:
        """An empty tensor with the strides that NumPy 2.4 gives to an empty array."""
        return torch.empty(0, dtype=HALF).as_strided(shape, [0] * len(shape))

    empty, no_rows = strideless(0, 2, 6, 16), strideless(1, 2, 0, 16)
    assert flash_attn_func(empty, empty, empty).shape == empty.shape
    assert not flash_attn_func(Q, no_rows, no_rows).count_nonzero()
    assert not flash_attn_func(Q, no_rows, no_rows, softcap=3.0).count_nonzero()
    assert retain(empty, empty, empty)[0].shape == empty.shape
    assert not retain(no_rows, no_rows, no_rows)[1].count_nonzero()
    masks = (strideless(2, 0, 0), Decay(0.9))
    for mask in masks:
        assert retnet_attn_func(no_rows, no_rows, no_rows, mask).shape == no_rows.shape
    ends, nothing = int32(0, 0), strideless(0, 2, 16)
    assert flash_attn_varlen_func(nothing, nothing, nothing, ends, ends, 0, 0).shape == (0, 2, 16)
    assert matmul(strideless(0, 24), B).shape == (0, 8)
    array = np.zeros((0, 2, 6, 16), np.float16)
    assert flash_attn_func(array, array, array).shape == array.shape


def test_a_product_on_the_cpu_needs_what_one_on_a_gpu_needs() -> None:
    a, b = torch.randn(9, 24).half(), torch.randn(8, 24).half()
    assert torch.equal(matmul(a, b.T), a @ b.T)
    assert matmul(t(3, 0), t(0, 5)).shape == (3, 5)
