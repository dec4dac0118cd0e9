"""Bad input of flash_attn_func, settings and tune: each row a typed error that names constraint and value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from attention_autotuner import (
    autotune,
    flash_attn_func,
    listening,
    settings,
    tune,
    tune_step,
    warmup,
)
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError
from attention_autotuner.settings import PREFIX, from_environment
from tests.bad_calls import HALF, Row, calling, check_refusal, parametrize, t

Q, K, V = t(2, 4, 6, 16), t(2, 2, 5, 16), t(2, 2, 5, 24)
attn = calling(flash_attn_func, Q, K, V)
ARRAY = np.zeros((2, 4, 6, 16), np.float16)
arrays = calling(flash_attn_func, ARRAY, ARRAY, ARRAY)


def env(name: str, value: str) -> Callable[[], object]:
    return lambda: from_environment({PREFIX + name: value})


def override(**changes: Any) -> Callable[[], object]:
    return lambda: settings.override(**changes).__enter__()


nothing: Any = None
no_listener: Any = []


def tunable(x: int, n: int = 0) -> int:
    """A function with a configuration."""
    return x + n


def tuning(**fields: Any) -> Callable[[], object]:
    return lambda: tune(**({"device_type": "A100"} | fields))


DTYPES: list[Row] = [
    (f"{name} {dtype}", attn({n: (Q, K, V)[n].to(dtype)}), f"{name} must be float16", str(dtype))
    for n, name in enumerate("qkv")
    for dtype in (
        torch.float32,
        torch.float64,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.float8_e5m2,
    )
] + [
    ("mixed dtypes", attn({1: K.bfloat16()}), "one dtype", "torch.bfloat16"),
    ("fp32 arrays", calling(flash_attn_func, *[ARRAY.astype("f4")] * 3)(), "float16", "float32"),
    ("int arrays", calling(flash_attn_func, *[ARRAY.astype("i2")] * 3)(), "float16", "int16"),
]
DEVICES: list[Row] = [
    ("mixed devices", attn({1: K.to("meta")}), "one device", "meta"),
    ("v on meta", attn({2: V.to("meta")}), "one device", "meta"),
    ("unknown GPU", attn(None, "H900"), "unknown device_type", "H900"),
    ("empty GPU name", attn(None, ""), "unknown device_type", "''"),
    ("list as GPU", attn(None, ["A100"]), "device_type must be a name", "list"),
    ("object as GPU", attn(None, object()), "device_type must be a name", "object"),
    ("dtype as GPU", attn(None, torch.float16), "device_type must be a name", "dtype"),
    ("torch device as GPU", attn(None, torch.device("cuda")), "device_type must be", "device"),
    ("dropout_p in fourth place", attn(None, 0.0), "fourth argument", "0.0"),
    ("dropout on in fourth place", attn(None, 0.1), "dropout_p", "0.1"),
    ("an integer in fourth place", attn(None, 1), "fourth argument", "got 1"),
    ("a NumPy number there", attn(None, np.float32(0)), "dropout_p", "0.0"),
    ("a flag in fourth place", attn(None, True), "dropout_p", "True"),
]
RANKS_AND_SHAPES: list[Row] = [
    ("3-d q", attn({0: t(4, 6, 16)}), "q must have 4 dimensions", "got 3"),
    ("5-d k", attn({1: t(1, 2, 2, 5, 16)}), "k must have 4 dimensions", "got 5"),
    ("0-d v", attn({2: t()}), "v must have 4 dimensions", "got 0"),
    ("batch of k", attn({1: t(3, 2, 5, 16)}), "one batch", "2, 3 and 2"),
    ("broadcast batch", attn({0: t(1, 4, 6, 16)}), "one batch", "1, 2 and 2"),
    ("heads of v", attn({2: t(2, 1, 5, 24)}), "the same heads", "2 and 1"),
    ("heads of q", attn({0: t(2, 3, 6, 16)}), "a multiple of heads", "3 and 2"),
    ("fewer heads of q", attn({0: t(2, 1, 6, 16)}), "a multiple of heads", "1 and 2"),
    ("no heads of k", attn({1: t(2, 0, 5, 16), 2: t(2, 0, 5, 24)}), "at least 1", "got 0"),
    ("dim of q", attn({0: t(2, 4, 6, 24)}), "the same dim", "24 and 16"),
    ("seqlen of v", attn({2: t(2, 2, 7, 24)}), "the same seqlen", "5 and 7"),
    ("seqlen of v 0", attn({2: t(2, 2, 0, 24)}), "the same seqlen", "5 and 0"),
    ("dim 12", attn({0: t(2, 4, 6, 12), 1: t(2, 2, 5, 12)}), "multiple of 8", "got 12"),
    ("dim 0", attn({0: t(2, 4, 6, 0), 1: t(2, 2, 5, 0)}), "positive multiple of 8", "got 0"),
    ("dim 264", attn({0: t(2, 4, 6, 264), 1: t(2, 2, 5, 264)}), "at most 256", "got 264"),
    ("dim_v 20", attn({2: t(2, 2, 5, 20)}), "dim_v must be a positive multiple", "got 20"),
    ("dim_v 0", attn({2: t(2, 2, 5, 0)}), "dim_v must be a positive multiple", "got 0"),
    ("dim_v 520", attn({2: t(2, 2, 5, 520)}), "dim_v must be at most 512", "got 520"),
    ("dim 12, empty batch", attn({0: t(0, 4, 6, 12), 1: t(0, 2, 5, 12), 2: t(0, 2, 5, 24)}),
     "multiple of 8", "got 12"),
    ("cross attention of bshd", attn({0: t(1, 64, 8, 16), 1: t(1, 96, 8, 16), 2: t(1, 96, 8, 16)}),
     'layout="bshd"', "64 and 96"),
    ("decoding of bshd", attn({0: t(1, 1, 8, 16), 1: t(1, 96, 2, 16), 2: t(1, 96, 2, 16)}),
     'layout="bshd"', "1 and 96"),
    ("huge seqlen", attn({0: t(1, 1, 1, 8).expand(1, 1, 2**30 + 1, 8), 1: t(1, 1, 1, 8),
                          2: t(1, 1, 1, 8)}), "at most 2**30", str(2**30 + 1)),
]  # fmt: skip
STRIDES: list[Row] = [
    ("last stride of q", attn({0: t(2, 4, 16, 6).mT}), "q must have unit stride", "got 6"),
    ("last stride of k", attn({1: t(2, 2, 5, 32)[..., ::2]}), "k must have unit stride", "got 2"),
    ("expanded v", attn({2: t(2, 2, 5, 1).expand(2, 2, 5, 24)}), "v must have unit", "got 0"),
    ("sparse", attn({0: Q.to_sparse()}), "dense strided", "sparse_coo"),
    ("mkldnn", attn({1: K.float().to_mkldnn()}), "dense strided", "_mkldnn"),
    ("nested", attn({2: torch.nested.nested_tensor([t(2, 5, 24)] * 2)}), "dense", "nested"),
    ("rows backwards", arrays({0: ARRAY[:, :, ::-1]}), "q must have no negative", "-32"),
    ("dims backwards", arrays({1: ARRAY[..., ::-1]}), "k must have no negative", "-2"),
    ("batch backwards", arrays({2: ARRAY[::-1]}), "v must have no negative stride", "-768"),
    ("flipped", calling(flash_attn_func, *[np.flip(ARRAY)] * 3)(), "no negative stride", "-2"),
    ("every other column", arrays({0: np.zeros((2, 4, 6, 32), "f2")[..., ::2]}), "unit", "got 2"),
    ("a field of records", arrays({0: np.zeros((2, 4, 6, 16), "f2,f2")["f0"]}), "unit", "got 2"),
    (
        "big-endian",
        arrays({0: ARRAY.astype(">f2")}),
        "cannot be read through DLPack",
        "q (ndarray)",
    ),
    ("array of objects", arrays({2: ARRAY.astype(object)}), "cannot be read", "v (ndarray)"),
]
KINDS: list[Row] = [
    ("None", calling(flash_attn_func, None, None, None)(), "must be a torch tensor", "NoneType"),
    ("a list", calling(flash_attn_func, [[1.0]], K, V)(), "arrays of one library", "list"),
    ("a string", calling(flash_attn_func, "q", "k", "v")(), "must be a torch tensor", "str"),
    ("numbers", calling(flash_attn_func, 1, 2, 3)(), "must be a torch tensor", "int"),
    ("a class", calling(flash_attn_func, np.ndarray, ARRAY, ARRAY)(), "must be a torch", "type"),
    ("array among tensors", attn({1: np.zeros(K.shape, "f2")}), "one library", "ndarray"),
    ("tensor among arrays", arrays({1: K}), "one library", "Tensor"),
    ("a NumPy scalar", calling(flash_attn_func, *[np.float16(1)] * 3)(), "must be a", "float16"),
    ("numbers in bshd", calling(flash_attn_func, 1, 2, 3)(layout="bshd"), "must be a", "int"),
]
SCALES: list[Row] = [
    (f"scale {type(value).__name__} {text}", attn(softmax_scale=value), constraint, text)
    for value, constraint, text in (
        (math.nan, "finite in fp32", "nan"),
        (math.inf, "finite in fp32", "inf"),
        (-math.inf, "finite in fp32", "-inf"),
        (1e39, "finite in fp32", "1e+39"),
        (np.float64(-1e300), "finite in fp32", "-1e+300"),
        (np.float32("nan"), "finite in fp32", "nan"),
        (10**400, "finite in fp32", "inf"),
        ("0.1", "must be a float or None", "'0.1'"),
        (True, "must be a float or None", "True"),
        (np.True_, "must be a float or None", "bool"),
        (1j, "must be a float or None", "1j"),
        ([0.1], "must be a float or None", "[0.1]"),
        (np.ones(1), "must be a float or None", "ndarray [1]"),
        (torch.ones(2), "must be a float or None", "Tensor [2]"),
        (torch.ones((), device="meta"), "on the CPU", "meta"),
        (torch.ones((), requires_grad=True), "without a gradient", "requires_grad=True"),
    )
]
OPTIONS: list[Row] = [
    (f"{name}={text}", attn(**{name: value}), constraint, text)
    for name, value, constraint, text in (
        ("causal", 1, "causal must be True or False", "1"),
        ("causal", None, "causal must be True or False", "None"),
        ("causal", np.True_, "causal must be True or False", "bool []"),
        ("causal", np.array([True, False]), "causal must be True or False", "ndarray [2]"),
        ("return_lse", "yes", "return_lse must be True or False", "'yes'"),
        ("deterministic", 0, "deterministic must be True, False or None", "0"),
        ("deterministic", t(2), "deterministic must be True, False or None", "Tensor [2]"),
        ("causal_alignment", "middle", "one of ('bottom_right', 'top_left')", "'middle'"),
        ("causal_alignment", None, "causal_alignment must be one of", "None"),
        ("causal_alignment", ["top_left"], "causal_alignment must be one of", "['top_left']"),
        ("causal_alignment", np.array(["a", "b"]), "must be one of", "ndarray [2]"),
        ("layout", "sbhd", "layout must be one of ('bhsd', 'bshd')", "'sbhd'"),
        ("layout", None, "layout must be one of", "None"),
        ("layout", np.array(["a", "b"]), "layout must be one of", "ndarray [2]"),
        ("dropout_p", 0.1, "no dropout_p: it must be 0.0", "0.1"),
        ("dropout_p", None, "no dropout_p: it must be 0.0", "None"),
        ("window_size", (127,), "window_size must be two integers from -1 to 2**30", "(127,)"),
        ("window_size", [-2, 0], "window_size must be two integers from -1 to 2**30", "[-2, 0]"),
        ("window_size", (1.0, 0), "window_size must be two integers from -1", "(1.0, 0)"),
        ("window_size", None, "window_size must be two integers from -1", "None"),
        ("softcap", -30.0, "softcap must be a finite number, 0 for none", "-30.0"),
        ("softcap", math.inf, "softcap must be a finite number", "inf"),
        ("softcap", "30", "softcap must be a float", "'30'"),
        ("alibi_slopes", torch.ones(3), "alibi_slopes must have the shape (4,)", "(3,)"),
        ("alibi_slopes", torch.ones(4, dtype=HALF), "alibi_slopes must be torch.float32", "float16"),
        ("alibi_slopes", torch.ones(4, requires_grad=True), "alibi_slopes get no gradient", "True"),
        ("bias", torch.ones(4, 6), "bias must have the shape (heads_q, 2 * D + 1)", "(4, 6)"),
        ("bias", torch.ones(7), "bias must have the shape (heads_q, 2 * D + 1)", "(7,)"),
        ("bias", torch.ones(3, 7), "bias must have the shape (4, 7)", "(3, 7)"),
        ("bias", torch.ones(4, 131075), "bias must have entries for distances of at most 65536", "65537"),
        ("bias", torch.ones(4, 7, dtype=HALF), "bias must be torch.float32", "float16"),
        ("bias", torch.ones(7, 4).T, "bias must be contiguous", "(1, 4)"),
        ("bias", torch.ones(4, 7, device="meta"), "bias must be on", "meta"),
        ("sinks", torch.ones(1, 2), "sinks must have the shape (4,)", "(1, 2)"),
        ("sinks", torch.ones(8)[::2], "sinks must be contiguous", "(2,)"),
        ("attn_mask", torch.ones(6, 4).bool(), "attn_mask must broadcast to (2, 4, 6, 5)", "(6, 4)"),
        ("attn_mask", torch.ones(6, 5).int(), "attn_mask must be one of", "torch.int32"),
        ("attn_mask", torch.ones(5, device="meta"), "attn_mask must be on q's device cpu", "meta"),
        ("attn_mask", torch.ones(5).double(), "attn_mask must be one of", "torch.float64"),
        ("is_causal", True, "causal_alignment='top_left'", "got True"),
        ("enable_gqa", False, "no enable_gqa", "got False"),
        ("return_attn_probs", True, "return_lse=True", "got True"),
        ("cu_seqlens", torch.zeros(3), "no cu_seqlens", "Tensor [3]"),
        ("block_table", torch.zeros(2, 2), "no block_table", "Tensor [2, 2]"),
        ("score_mod", max, "no score_mod", "built-in function max"),
        ("block_mask", "mask", "no block_mask", "'mask'"),
        ("scale", 0.1, "did you mean softmax_scale?", "0.1"),
        ("casual", True, "did you mean causal?", "casual=True"),
        ("nonsense", 7, "no argument 'nonsense'", "nonsense=7"),
    )
] + [
    ("3-d in bshd", attn({0: t(4, 6, 16)}, layout="bshd"), "[batch, seqlen, heads, dim]", "got 3"),
    ("sparse in bshd", attn({0: Q.to_sparse()}, layout="bshd"), "dense", "sparse"),
    ("heads in bshd", attn(layout="bshd"), "a multiple of heads", "6 and 5"),
]  # fmt: skip
SETTINGS: list[Row] = [
    (f"{name}={value}", env(name, value), f"must be {allowed}", repr(value))
    for name, value, allowed in (
        ("MODE", "sometimes", "off, cached, tune or frozen"),
        ("EFFORT", "max", "none, quick or full"),
        ("BUDGET_SECONDS", "soon", "a positive number"),
        ("BUDGET_SECONDS", "-1", "a positive number"),
        ("BUDGET_SECONDS", "nan", "a positive number"),
        ("ALWAYS_TUNE", "maybe", "1, true"),
        ("STRICT_VERSIONS", "2", "1, true"),
        ("PRINT", "y", "1, true"),
        ("LOG_LEVEL", "loud", "debug, info"),
        ("JOBS", "0", "a positive integer"),
        ("JOBS", "2.5", "a positive integer"),
        ("JOBS", "all", "a positive integer"),
        *(
            (name, "~no such user/x", words)
            for name, words in (
                ("CACHE_DIR", "a folder that can be written"),
                ("UNTUNED_LOG", "a file that can be written"),
                ("CUTLASS_DIR", "a folder that holds"),
                ("NVCC", "an nvcc executable"),
                ("BUNDLE", "a folder that `attention-autotuner export` wrote"),
            )
        ),
    )
] + [
    ("unknown variable", env("FOO", "1"), "no such setting", "FOO='1'"),
    ("override of no setting", override(effrot="full"), "there is no setting", "'effrot'"),
    ("override mode", override(mode="on"), "must be off, cached, tune or frozen", "'on'"),
    ("override effort", override(effort=None), "must be none, quick or full", "None"),
    ("override jobs", override(jobs=True), "must be a positive integer", "True"),
    ("override jobs 0", override(jobs=0), "must be a positive integer", "0"),
    ("override budget", override(budget_seconds=math.inf), "a positive number", "inf"),
    ("override switch", override(always_tune=1), "must be 1, true", "1"),
    ("override jobs text", override(jobs="some"), "a positive integer; as no text, an int", "some"),
    ("override users", override(trust_owners=0), "as no text, a tuple of numbers of users", "0"),
    ("override flag", override(strict_picks=2), "or off; as no text, True or False", "2"),
    ("override folder", override(cache_dir=None), "a folder that can be written", "None"),
    (
        "override home",
        override(cache_dir="~no such user/x"),
        "cache_dir='~no such user/x'",
        "folder",
    ),
]
TUNE: list[Row] = [
    (f"tune {name}={value}", tuning(**{name: value}), constraint, text)
    for name, value, constraint, text in (
        ("op", "conv", "op must be one of", "'conv'"),
        ("direction", "sideways", "direction must be one of", "'sideways'"),
        ("dtype", "fp8", "dtype must be one of", "'fp8'"),
        ("heads_kv", 3, "heads_q must be a multiple of heads_kv", "16 and 3"),
        ("batch", 0, "batch must be at least 1", "0"),
        ("seqlen_k", 2**30 + 1, "seqlen_k must be at most 2**30", str(2**30 + 1)),
        ("dim_qk", 100, "dim_qk must be a positive multiple of 8", "100"),
        ("dim_v", 1024, "dim_v must be at most 512", "1024"),
        ("causal_alignment", "middle", "causal_alignment must be one of", "'middle'"),
        ("deterministic", True, "deterministic is for backward", "True"),
        ("form", "parallel", "form is for retention forward", "'parallel'"),
        ("mask", "decay", "mask must be 'explicit' or 'decay' for retnet", "'decay'"),
        ("device_type", "V100", "unknown device_type", "'V100'"),
        ("device_type", 3.5, "device_type must be a name", "float"),
        ("problem", {"batch": 1}, "problem must be a Problem or None", "got dict {'batch': 1}"),
        ("modifications", 5, "modifications must be a list of names", "got 5"),
        ("modifications", [5], "modifications must be a list of names", "got [5]"),
    )
] + [
    ("tune_step op", lambda: tune_step(device_type="A100", op="conv"), "op must be", "'conv'"),
    ("tune field", tuning(seqlen=64), "a problem has no field 'seqlen'", "seqlen_q"),
    ("tune listener", tuning(listener=3), "listener must be a function of a message", "got 3"),
    ("listening", lambda: listening(no_listener).__enter__(), "listener must be a function", "got []"),
    ("tune_step problem", lambda: tune_step(no_listener, "A100"), "problem must be a Prob", "list []"),
    ("tune_step direction", lambda: tune_step(device_type="A100", direction="forward"),
     "a step has both directions", "direction='forward'"),
    ("tune_step listener", lambda: tune_step(device_type="A100", listener=no_listener),
     "listener must be a function of a message", "got []"),
    ("autotune option", lambda: autotune([{"n": 1}], foo=1)(tunable), "no option 'foo'", "foo=1"),
    ("autotune key", lambda: autotune([{"n": 1}], key=["y"])(tunable), "some of x", "got ['y']"),
    ("key of configs", lambda: autotune([{"n": 1}], key=["n"])(tunable), "some of x", "got ['n']"),
    ("key as text", lambda: autotune([{"n": 1}], key="x")(tunable), "must be a list", "got 'x'"),
    ("key as number", lambda: autotune([{"n": 1}], key=3)(tunable), "must be a list", "got 3"),
    ("warmup of None", lambda: warmup(nothing), "a callable or the path of a file", "None"),
    ("warmup both", lambda: warmup("file", 1), "takes neither inputs", "file"),
    ("tune_step dim", lambda: tune_step(device_type="A100", dim_qk=7), "multiple of 8", "7"),
]  # fmt: skip
ROWS = [
    *DTYPES, *DEVICES, *RANKS_AND_SHAPES, *STRIDES, *KINDS, *SCALES, *OPTIONS, *SETTINGS, *TUNE,
]  # fmt: skip


@parametrize(ROWS)
def test_bad_input_is_refused(call: Callable[[], object], constraint: str, value: str) -> None:
    check_refusal(call, constraint, value)


def test_quantized_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match="quantized"):
        quantized = torch.quantize_per_tensor(Q.float(), 1.0, 0, torch.qint8)
    check_refusal(attn({0: quantized}), "dense strided", "quantized")


def test_an_argument_that_is_none_is_a_type_error_too() -> None:
    for options in ({"casual": True}, {"dropout_p": 0.5}):
        with pytest.raises(TypeError) as caught:
            flash_attn_func(Q, K, V, **options)
        assert isinstance(caught.value, UnsupportedArgumentError)
        assert isinstance(caught.value, UnsupportedProblemError)
        assert isinstance(caught.value, ValueError)


def test_off_values_change_nothing() -> None:
    q, k, v = (torch.randn(x.shape, dtype=HALF) for x in (Q, K, V))
    off: dict[str, Any] = {
        "dropout_p": 0,
        "window_size": [-1, -1],
        "softcap": np.float32(0.0),
        "alibi_slopes": None,
        "attn_mask": None,
        "is_causal": False,
        "enable_gqa": True,
        "return_attn_probs": False,
        "block_table": None,
        "block_mask": None,
        "score_mod": None,
        "cu_seqlens": None,
    }
    expected = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=True, **off), expected)


@pytest.mark.parametrize(
    "scale",
    [np.float32(0.25), np.float64(0.25), np.float16(0.25), np.array(0.25), torch.tensor(0.25)],
)
def test_numbers_of_other_libraries_are_scales(scale: Any) -> None:
    q, k, v = (torch.randn(x.shape, dtype=HALF) for x in (Q, K, V))
    expected = flash_attn_func(q, k, v, softmax_scale=0.25)
    assert torch.equal(flash_attn_func(q, k, v, softmax_scale=scale), expected)
    assert torch.equal(
        flash_attn_func(q, k, v, softmax_scale=np.int64(2)),
        flash_attn_func(q, k, v, softmax_scale=2.0),
    )
