"""Every bad argument of flash_attn_func gets a typed error that names the constraint and the value."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import (
    Decay,
    flash_attn_func,
    matmul,
    retention_func,
    retnet_attn_func,
    settings,
)
from attention_autotuner.compat import fla
from attention_autotuner.errors import (
    SettingsError,
    UnsupportedArchitectureError,
    UnsupportedProblemError,
)

GOOD: dict[str, tuple[int, ...]] = {"q": (2, 4, 6, 16), "k": (2, 2, 5, 16), "v": (2, 2, 5, 24)}


def call(
    options: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    **shapes: Any,
) -> Any:
    tensors: list[Any] = [
        value if not isinstance(value, tuple) else torch.zeros(value, dtype=dtype, device=device)
        for value in (GOOD | shapes).values()
    ]
    q, k, v = tensors
    return flash_attn_func(q, k, v, **(options or {}))


def test_the_good_call_is_good() -> None:
    assert call().shape == (2, 4, 6, 24)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (4, 6, 16)}, "q must have 4 dimensions [batch, heads, seqlen, dim], got 3"),
        ({"v": (1, 2, 2, 5, 24)}, "v must have 4 dimensions [batch, heads, seqlen, dim], got 5"),
        ({"k": (3, 2, 5, 16)}, "q, k and v must have one batch, got 2, 3 and 2"),
        ({"v": (2, 1, 5, 24)}, "k and v must have the same heads, got 2 and 1"),
        ({"q": (2, 3, 6, 16)}, "heads of q must be a multiple of heads of k and v, got 3 and 2"),
        ({"k": (2, 0, 5, 16), "v": (2, 0, 5, 24)}, "heads of k and v must be at least 1"),
        ({"q": (2, 4, 6, 24)}, "q and k must have the same dim, got 24 and 16"),
        ({"v": (2, 2, 7, 24)}, "k and v must have the same seqlen, got 5 and 7"),
        (
            {"q": (2, 4, 6, 12), "k": (2, 2, 5, 12)},
            "dim_qk must be a positive multiple of 8, got 12",
        ),
        ({"v": (2, 2, 5, 20)}, "dim_v must be a positive multiple of 8, got 20"),
        ({"q": (2, 4, 6, 264), "k": (2, 2, 5, 264)}, "dim_qk must be at most 256, got 264"),
        ({"v": (2, 2, 5, 520)}, "dim_v must be at most 512, got 520"),
        ({"q": (2, 4, 6, 0), "k": (2, 2, 5, 0)}, "dim_qk must be a positive multiple of 8, got 0"),
        ({"v": (2, 2, 5, 0)}, "dim_v must be a positive multiple of 8, got 0"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shapes(shapes: dict[str, Any], message: str, device: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        call(device=device, **shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedProblemError, match=f"q must be float16 or bfloat16, got {dtype}"
    ):
        call(dtype=dtype)


def test_mixed_dtypes() -> None:
    with pytest.raises(UnsupportedProblemError, match=r"one dtype, got torch\.float16, .*bfloat16"):
        call(k=torch.zeros(GOOD["k"], dtype=torch.bfloat16))


def test_mixed_devices() -> None:
    with pytest.raises(UnsupportedProblemError, match="on one device, got cpu, meta and cpu"):
        call(k=torch.zeros(GOOD["k"], dtype=torch.float16, device="meta"))


@pytest.mark.parametrize("value", [None, [[1.0]], 3, "q"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_no_tensor(value: Any, name: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=type(value).__name__):
        call(**{name: value})
    with pytest.raises(UnsupportedProblemError, match="q must be a torch tensor or an array"):
        flash_attn_func(value, value, value)


def test_arrays_and_tensors_do_not_mix() -> None:
    with pytest.raises(UnsupportedProblemError, match="one library, got Tensor, ndarray, Tensor"):
        call(k=np.zeros(GOOD["k"], dtype=np.float16))


def test_an_array_that_cannot_be_shared() -> None:
    frozen: list[Any] = [np.zeros(GOOD[name], dtype=np.float16) for name in "qkv"]
    frozen[1] = frozen[1].astype(object)
    with pytest.raises(
        UnsupportedProblemError, match=r"k \(ndarray\) cannot be read through DLPack"
    ):
        flash_attn_func(*frozen)


def test_last_stride() -> None:
    q = torch.zeros((2, 4, 16, 6), dtype=torch.float16).transpose(2, 3)
    with pytest.raises(
        UnsupportedProblemError, match="q must have unit stride in its last dim, got 6"
    ):
        call(q=q)


def test_sparse_and_nested() -> None:
    sparse = torch.zeros(GOOD["q"], dtype=torch.float16).to_sparse()
    with pytest.raises(
        UnsupportedProblemError, match=r"q must be a dense strided tensor, got torch.sparse_coo"
    ):
        call(q=sparse)
    nested = torch.nested.nested_tensor([torch.zeros(4, 16, 64, dtype=torch.float16)] * 2)
    with pytest.raises(
        UnsupportedProblemError, match="k must be a dense strided tensor, got nested"
    ):
        call(k=nested)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, -1e300])
def test_scales_that_are_no_finite_fp32(scale: float) -> None:
    with pytest.raises(UnsupportedProblemError, match=re.escape(f"finite in fp32, got {scale}")):
        call({"softmax_scale": scale})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": "1"}, "softmax_scale must be a float or None, got str"),
        ({"softmax_scale": True}, "softmax_scale must be a float or None, got bool"),
        ({"softmax_scale": torch.ones(2)}, "softmax_scale must be a float or None, got Tensor"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"return_lse": "yes"}, "return_lse must be True or False, got 'yes'"),
        ({"deterministic": 1}, "deterministic must be True, False or None, got 1"),
        (
            {"causal_alignment": "middle"},
            "causal_alignment must be one of ('bottom_right', 'top_left'), got 'middle'",
        ),
        ({"causal_alignment": None}, "causal_alignment must be one of"),
        ({"causal_alignment": ["top_left"]}, "causal_alignment must be one of"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=re.escape(message)):
        call(options)


@pytest.mark.parametrize("device_type", ["H900", "", object(), [1], torch.float16])
def test_device_types(device_type: Any) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"device_type|unknown"):
        call({"device_type": device_type})


def test_forward_mode_is_refused_rather_than_dropped() -> None:
    from torch.autograd import forward_ad

    q = torch.zeros(GOOD["q"], dtype=torch.float16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedProblemError, match="no forward-mode derivative"):
            call(q=dual)
        assert call().shape == (2, 4, 6, 24)


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: flash_attn_func(x, x, x),
    "retention": lambda x: retention_func(x, x, x),
    "retnet": lambda x: retnet_attn_func(x, x, x, Decay()),
    "gemm": lambda x: matmul(x[0, 0], x[0, 0]),
    "fla": lambda x: fla.chunk_retention(x, x, x),
    "compiled": torch.compile(lambda x: retention_func(x, x, x)[0], backend="aot_eager"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_wrong_settings_are_refused_by_calls_on_the_cpu(
    call: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(1, 16, 16, 16, dtype=torch.float16)
    call(x)
    with monkeypatch.context() as environment:
        environment.setenv(settings.PREFIX + "FOO", "1")
        with pytest.raises(SettingsError):
            settings.reload()
        with pytest.raises(SettingsError, match="there is no such setting"):
            call(x)
    call(x)


QUIET = """
import torch
from attention_autotuner import Decay, flash_attn_func, matmul, retention_func, retnet_attn_func
x = torch.zeros(1, 16, 16, 16, dtype=torch.float16)
retention_func(x, x, x), retnet_attn_func(x, x, x, Decay()), matmul(x[0, 0], x[0, 0]), flash_attn_func(x, x, x)
"""


@pytest.mark.parametrize(("level", "lines"), [("error", 0), ("warning", 4)])
def test_the_log_level_holds_for_every_operation_on_the_cpu(level: str, lines: int) -> None:
    variables = {**os.environ, settings.PREFIX + "LOG_LEVEL": level}
    done = subprocess.run(
        [sys.executable, "-c", QUIET], env=variables, capture_output=True, text=True, check=True
    )
    said = [line for line in done.stderr.splitlines() if "tensors on the CPU" in line]
    assert len(said) == lines
    assert all(line.startswith("attention_autotuner.") for line in said)
