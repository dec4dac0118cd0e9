"""flash_attn's functions under their names, on the CPU, against the formula in fp64."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import compat
from attention_autotuner.compat import fla, sdpa
from attention_autotuner.compat import flash_attn as module
from attention_autotuner.errors import UnsupportedProblemError
from tests.compat_formulas import (
    LENGTHS,
    Tensors,
    bottom_right,
    check_gradients,
    close,
    formula,
    make,
    make_three,
)
from tests.numerics.packed_sequences import each_sequence, ends_of

flash_attn: Any = module  # as an untyped caller sees it
torchs: Any = sdpa


OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
CACHE_OPTIONS = {
    **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")),
    **dict.fromkeys(("cache_leftpad", "block_table", "softmax_scale")),
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}


@pytest.mark.parametrize(
    ("name", "tensors", "options"),
    [
        ("flash_attn_func", ["q", "k", "v"], OPTIONS),
        ("flash_attn_with_kvcache", ["q", "k_cache", "v_cache"], CACHE_OPTIONS),
        (
            "flash_attn_varlen_func",
            ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
            {**OPTIONS, "block_table": None},
        ),
    ],
)
def test_arguments_are_the_packages_in_its_order(
    name: str, tensors: list[str], options: dict[str, Any]
) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*tensors, *options]
    assert {n: p.default for n, p in parameters.items() if n not in tensors} == options
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("dim", "dim_v"), [(16, 16), (20, 20), (16, 13), (36, 24)])
def test_flash_attn_func(causal: bool, lengths: tuple[int, int], dim: int, dim_v: int) -> None:
    three = make_three(*lengths, dim, dim_v)
    mask = bottom_right(*lengths) if causal else torch.ones(lengths, dtype=torch.bool)
    exact, exact_lse = formula(*three, mask=mask)
    o = flash_attn.flash_attn_func(*three, causal=causal)
    assert o.shape == (3, lengths[0], 4, dim_v)
    assert o.dtype == torch.float16
    check_gradients(o, exact, three)
    o, lse, p = flash_attn.flash_attn_func(*three, 0.0, 0.3, causal, return_attn_probs=True)
    exact, exact_lse = formula(*three, scale=0.3, mask=mask)
    check_gradients(o, exact, three)
    close(lse, exact_lse)
    assert p.shape == (0,)


def test_strides_are_free() -> None:
    three = make_three(6, 6)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in three]
    assert turned[0].stride(-1) != 1
    o = flash_attn.flash_attn_func(*turned)
    assert torch.equal(o, flash_attn.flash_attn_func(*three))


@pytest.mark.parametrize("dim", [16, 20])
def test_packed_tensors(dim: int) -> None:
    qkv, q, kv = make((2, 7, 3, 4, dim), (2, 5, 4, dim), (2, 7, 2, 2, dim))
    ones = torch.ones(7, 7, dtype=torch.bool)
    o = flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, 0.3)
    check_gradients(o, formula(*qkv.unbind(2), scale=0.3, mask=ones)[0], [qkv])
    o = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True)
    check_gradients(o, formula(q, *kv.unbind(2), mask=bottom_right(5, 7))[0], [q, kv])
    for call in (
        lambda: flash_attn.flash_attn_qkvpacked_func(kv),
        lambda: flash_attn.flash_attn_kvpacked_func(q, qkv),
    ):
        with pytest.raises(UnsupportedProblemError, match=r"kv must be \[batch, seqlen, \d, heads"):
            call()


@pytest.mark.parametrize(
    ("window", "causal", "same"),
    [
        ((-1, 0), False, True),
        ((8, 0), False, True),
        ([9, 4], False, False),
        ((-1, 4), False, False),
        ((8, 3), True, True),
        ((3, 1), False, None),
        ((2, -7), False, None),
        ((3, 2), True, None),
    ],
)
def test_windows(window: Any, causal: bool, same: bool | None) -> None:
    three = make_three(5, 9)
    i, j = torch.arange(5)[:, None] + 4, torch.arange(9)
    left, right = (9 if side < 0 else side for side in window)
    mask = (j >= i - left) & (j <= i + (0 if causal else right))
    if same is not None:
        assert torch.equal(mask, bottom_right(5, 9) | torch.tensor(not same))
    o = flash_attn.flash_attn_func(*three, causal=causal, window_size=window)
    close(o, formula(*three, mask=mask)[0])


REFUSED: list[tuple[str, Any]] = [
    ("dropout_p", 0.1),
    ("window_size", None),
    ("window_size", (-1,)),
    ("softcap", -30.0),
    ("alibi_slopes", torch.ones(3)),
]
REFUSED_OF_CACHES = [
    *REFUSED[1:],
    ("rotary_cos", torch.ones(9, 8)),
    ("rotary_sin", torch.ones(9, 8)),
    ("cache_batch_idx", torch.arange(3)),
    ("block_table", torch.zeros(3, 1)),
    ("num_splits", 2),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_no_kernel_has_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedProblemError, match=f"{name}.* got (Tensor|-?\\d|\\(|None)"):
        flash_attn.flash_attn_func(*make_three(5, 9), **{name: value})


@pytest.mark.parametrize(("name", "value"), REFUSED_OF_CACHES)
def test_what_no_kernel_of_caches_has_is_refused_by_name(name: str, value: Any) -> None:
    q, k, v = make_three(5, 9)
    new = torch.zeros(3, 1, 2, 16, dtype=torch.float16)
    before = k.clone()
    with pytest.raises(UnsupportedProblemError, match=f"{name}.* got (Tensor|-?\\d|\\(|None)"):
        flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3, **{name: value})
    assert torch.equal(k, before)


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("form", ["", "kvpacked_", "qkvpacked_"])
def test_packed_sequences(form: str, dim: int) -> None:
    lengths, ends = (3, 0, 5), ends_of([3, 0, 5])
    qkv, q, kv = make((8, 3, 4, dim), (8, 4, dim), (8, 2, 2, dim))
    tensors = {"": [q, *kv.unbind(1)], "kvpacked_": [q, kv], "qkvpacked_": [qkv]}[form]
    three = qkv.unbind(1) if form == "qkvpacked_" else (q, *kv.unbind(1))
    places = (ends, 5) if form == "qkvpacked_" else (ends, ends, 5, 5)
    function = getattr(flash_attn, f"flash_attn_varlen_{form}func")
    exact = [
        formula(*(x[rows][None] for x in three), scale=0.3, mask=bottom_right(n, n))
        for n, (_, rows, _) in zip(lengths, each_sequence(ends, ends), strict=True)
    ]
    o, lse, p = function(*tensors, *places, 0.0, 0.3, True, return_attn_probs=True)
    leaves = [qkv] if form == "qkvpacked_" else [q, kv]
    check_gradients(o, torch.cat([x[0] for x, _ in exact]), leaves)
    close(lse, torch.cat([x[0] for _, x in exact], dim=1))
    assert p.shape == (0,)
    for option in ({"dropout_p": 0.1}, {"block_table": ends}, {"window_size": (1,)}):
        if form == "" or "block_table" not in option:
            with pytest.raises(UnsupportedProblemError, match=next(iter(option))):
                function(*tensors, *places, **option)
    with pytest.raises(UnsupportedProblemError, match=r"^(q|kv|qkv) must"):
        function(*(x[None] for x in tensors), *places)


@pytest.mark.parametrize(
    ("three", "message"),
    [
        (([1.0], None, None), r"q must be a tensor, got \[1.0\]"),
        (make((3, 5, 16), (3, 5, 16), (3, 5, 16)), r"q must have 4 dimensions, got \[3, 5, 16\]"),
        (make((3, 5, 2, 20), (3, 5, 2, 24), (3, 5, 2, 24)), "the same dim, got 20 and 24"),
        (make((3, 5, 3, 16), (3, 5, 2, 16), (3, 5, 2, 16)), "heads of q must be a multiple"),
        (make(*[(3, 5, 2, 16)] * 3, dtype=torch.float32), "float16 or bfloat16, got torch.float32"),
    ],
)
def test_tensors_that_fit_nothing(three: Any, message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=message):
        flash_attn.flash_attn_func(*three)


# --- caches ------------------------------------------------------------------------------------------


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_caches(filled: torch.Tensor, size: int = 12, dim: int = 16) -> Tensors:
    """Caches with NaN behind their valid part."""
    caches = [x.detach() for x in make((3, size, 2, dim), (3, size, 2, dim))]
    for cache in caches:
        cache[torch.arange(size) >= filled[:, None]] = math.nan
    return caches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize(
    ("filled", "starts"),
    [
        (int32(4, 9, 1), None),
        (int32(4, 9, 3), int32(2, 0, 3)),
        (5, None),
        (0, None),
    ],
)
def test_caches(causal: bool, new: int, dim: int, filled: Any, starts: Any) -> None:
    before = torch.as_tensor(filled, dtype=torch.int32).expand(3)
    caches = make_caches(before, dim=dim)
    q, k, v = (x.detach() for x in make((3, 3, 4, dim), *[(3, new, 2, dim)] * 2))
    expected = [cache.clone() for cache in caches]
    for cache, fresh in zip(expected, (k, v), strict=True):
        for b in range(3):
            cache[b, before[b] : before[b] + new] = fresh[b]
    o, lse = flash_attn.flash_attn_with_kvcache(
        q,
        *caches,
        *((k, v) if new else (None, None)),
        cache_seqlens=filled,
        cache_leftpad=starts,
        causal=causal,
        return_softmax_lse=True,
    )
    for cache, other in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)
    for b in range(3):
        keys = slice(0 if starts is None else starts[b], before[b] + new)
        pair = (cache[b : b + 1, keys] for cache in expected)
        # The diagonal hangs at the last valid key.
        rows = torch.arange(3)[:, None] + int(before[b]) + new - 3
        mask = (torch.arange(12)[keys] <= rows) | torch.tensor(not causal)
        exact, exact_lse = formula(q[b : b + 1], *pair, mask=mask)
        close(o[b : b + 1], exact)
        close(lse[b : b + 1], exact_lse)
    assert torch.equal(
        flash_attn.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=before + new, cache_leftpad=starts, causal=causal
        ),
        o,
    )


def test_a_cache_without_lengths_is_full() -> None:
    q, k, v = make_three(2, 9)
    o = flash_attn.flash_attn_with_kvcache(q, k, v, softmax_scale=0.2, causal=True)
    close(o, formula(q, k, v, scale=0.2, mask=bottom_right(2, 9))[0])


def test_a_cache_keeps_no_history_of_what_was_appended() -> None:
    q, k, v = make_three(1, 1)
    caches = make_caches(int32(2, 3, 4))
    o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=int32(2, 3, 4))
    assert not any(cache.requires_grad for cache in caches)
    with pytest.raises(UnsupportedProblemError, match="flash_attn_with_kvcache has no backward"):
        o.sum().backward()


@pytest.mark.parametrize("name", ["k", "v"])
def test_what_is_appended_asks_for_a_gradient_too(name: str) -> None:
    q, k, v = (x.detach() for x in make_three(1, 1))
    asking = {"k": k, "v": v}[name].requires_grad_()
    caches = make_caches(int32(2, 3, 4))
    call: dict[str, Any] = {"cache_seqlens": int32(2, 3, 4), "return_softmax_lse": True}
    o, lse = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, **call)
    with pytest.raises(UnsupportedProblemError, match="flash_attn_with_kvcache has no backward"):
        torch.autograd.grad(o.sum(), asking)
    with torch.no_grad():
        same, _ = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, **call)
    assert torch.equal(same, o)
    assert not lse.requires_grad
    assert not same.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": None}, "k, v and cache_seqlens must be given together.* v=None"),
        ({"cache_seqlens": None}, "must be given together.* cache_seqlens=None"),
        ({"cache_seqlens": 11}, "from 0 to 10 for 2 new keys in a cache of 12, got 11"),
        ({"cache_seqlens": -1}, "cache_seqlens must be from 0 to 10 .* got -1"),
        ({"cache_seqlens": int32(1, 2, 3).long()}, "cache_seqlens must be torch.int32"),
        ({"cache_seqlens": int32(1, 2)}, r"cache_seqlens must have the shape \(3,\), got \(2,\)"),
        ({"cache_seqlens": [1, 2, 3]}, r"cache_seqlens must be a tensor, got \[1, 2, 3\]"),
        ({"cache_leftpad": int32(1)}, r"cache_leftpad must have the shape \(3,\), got \(1,\)"),
        ({"k": torch.zeros(3, 2, 2, 24).half()}, r"k must have the shape \(3, 2, 2, 16\)"),
        (
            {"v": torch.zeros(3, 1, 2, 16).half()},
            r"v must have the shape \(3, 2, 2, 16\), got \(3, 1,",
        ),
        ({"v": torch.zeros(3, 2, 2, 16)}, "v must be torch.float16, got torch.float32"),
        ({"q": torch.zeros(3, 16)}, "q must have 4 dimensions"),
        ({"q": None}, "q must be a tensor, got None"),
        ({"k_cache": torch.zeros(4, 12, 2, 16)}, "k_cache must have q's batch of 3, got 4"),
    ],
)
def test_caches_that_fit_nothing(changes: dict[str, Any], message: str) -> None:
    q, k, v = make_three(1, 2)
    k_cache, v_cache = make_caches(int32(1, 2, 3))
    before = [k_cache.clone(), v_cache.clone()]
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": 4}
    with pytest.raises(UnsupportedProblemError, match=message):
        flash_attn.flash_attn_with_kvcache(**call | changes)
    for cache, other in zip((k_cache, v_cache), before, strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)


# --- substitution ------------------------------------------------------------------------------------

LAYER = '''
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_kvpacked_func, flash_attn_qkvpacked_func
import torch

assert tuple(int(x) for x in flash_attn.__version__.split(".")) >= (2, 6, 0)


class Attention(torch.nn.Module):
    """Training on whole sequences, and decoding token by token."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        o = flash_attn_qkvpacked_func(qkv, dropout_p=0.0, causal=True)
        assert torch.equal(o, flash_attn_func(*qkv.unbind(2), causal=True))
        assert torch.equal(o, flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True))
        return o.flatten(2)

    @torch.no_grad()
    def step(self, x, caches, lengths):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        o = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
        lengths += 1
        return o.flatten(2)
'''


def test_a_module_written_against_flash_attn_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", compat.flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", compat.flash_attn)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "layer_of_flash_attn.py").write_text(LAYER, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "layer_of_flash_attn", raising=False)
    layer = importlib.import_module("layer_of_flash_attn").Attention(64, 4).to(torch.bfloat16)
    monkeypatch.delitem(sys.modules, "layer_of_flash_attn")
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = layer(x)
    whole.float().square().mean().backward()
    assert layer.qkv.weight.grad.abs().sum() > 0
    caches = [torch.zeros(2, 8, 4, 16, dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.zeros(2, dtype=torch.int32)
    steps = [layer.step(x[:, t : t + 1], caches, lengths) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0.03, atol=0.02)


# --- torch.compile -----------------------------------------------------------------------------------


def test_all_of_them_compile_without_a_graph_break() -> None:
    def together(*tensors: torch.Tensor) -> Any:
        q, k, v, ends = tensors
        caches = [x.new_zeros(3, 12, 2, 16) for x in (k, v)]
        o = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(-1, 0))
        cached = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=ends)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        other = torchs.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        return o, cached, other, fla.chunk_retention(q, k, v, output_final_state=True)[1]

    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    tensors = [x.detach() for x in make_three(5, 5)]
    for ends in (int32(1, 2, 3), int32(7, 0, 4)):
        for out, expected in zip(compiled(*tensors, ends), together(*tensors, ends), strict=True):
            assert torch.equal(out, expected)


def test_rows_of_caches_may_lie_apart() -> None:
    q, k, v = (torch.randn(2, 5, 16, 4).half().transpose(2, 3) for _ in range(3))
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    apart = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    q, k, v = (x.contiguous() for x in (q, k, v))
    dense = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    torch.testing.assert_close(apart, dense)
