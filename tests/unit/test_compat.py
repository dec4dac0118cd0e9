"""The functions of flash_attn, SDPA and fla under their names, on the CPU, against formulas in fp64 and torch's own."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import compat
from attention_autotuner.compat import fla, flash_attn, sdpa
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError

Tensors = list[torch.Tensor]
LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 33)]
torch_sdpa = torch.nn.functional.scaled_dot_product_attention


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensors:
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def make_three(sq: int, sk: int, dim: int = 16, dim_v: int = 16) -> Tensors:
    """q, k and v as flash_attn has them: a batch of 3, 4 heads on 2."""
    return make((3, sq, 4, dim), (3, sk, 2, dim), (3, sk, 2, dim_v))


def close(out: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), exact.double(), rtol=0.01, atol=0.004)


def bottom_right(sq: int, sk: int) -> torch.Tensor:
    return torch.arange(sk) <= torch.arange(sq)[:, None] + sk - sq


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and LSE of ``[batch, seqlen, heads, dim]`` tensors, differentiable, in fp64; the mask says what is visible."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = s.masked_fill(~mask, -math.inf).logsumexp(-1)
    p = torch.where(mask, (s - lse[..., None].nan_to_num(neginf=0.0)).exp(), 0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def check_gradients(o: torch.Tensor, exact: torch.Tensor, inputs: Tensors) -> None:
    """Compare outputs and the gradients of inputs."""
    close(o, exact)
    weights = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((o.float() * weights).sum(), inputs)
    expected = torch.autograd.grad((exact * weights).sum(), inputs)
    for gradient, other in zip(gradients, expected, strict=True):
        close(gradient, other)


# --- flash_attn --------------------------------------------------------------------------------------

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
    exact, exact_lse = formula(*three, None, mask)
    o = flash_attn.flash_attn_func(*three, causal=causal)
    assert o.shape == (3, lengths[0], 4, dim_v)
    assert o.dtype == torch.float16
    check_gradients(o, exact, three)
    o, lse, p = flash_attn.flash_attn_func(*three, 0.0, 0.3, causal, return_attn_probs=True)
    exact, exact_lse = formula(*three, 0.3, mask)
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
    check_gradients(o, formula(*qkv.unbind(2), 0.3, ones)[0], [qkv])
    o = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True)
    check_gradients(o, formula(q, *kv.unbind(2), None, bottom_right(5, 7))[0], [q, kv])
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
    ],
)
def test_windows_that_hide_nothing(window: Any, causal: bool, same: bool) -> None:
    three = make_three(5, 9)
    i, j = torch.arange(5)[:, None] + 4, torch.arange(9)
    left, right = (9 if side < 0 else side for side in window)
    mask = (j >= i - left) & (j <= i + (0 if causal else right))
    assert torch.equal(mask, bottom_right(5, 9) | torch.tensor(not same))
    o = flash_attn.flash_attn_func(*three, causal=causal, window_size=window)
    close(o, formula(*three, None, mask)[0])


REFUSED: list[tuple[str, Any]] = [
    ("dropout_p", 0.1),
    ("window_size", (3, 0)),
    ("window_size", (-1, 1)),
    ("window_size", (7, -1)),
    ("window_size", (8, 1)),
    ("window_size", None),
    ("window_size", (-1,)),
    ("softcap", 30.0),
    ("alibi_slopes", torch.ones(4)),
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
    with pytest.raises(UnsupportedArgumentError, match=f"{name}.* got (Tensor|\\d|\\(|None)"):
        flash_attn.flash_attn_func(*make_three(5, 9), **{name: value})


@pytest.mark.parametrize(("name", "value"), REFUSED_OF_CACHES)
def test_what_no_kernel_of_caches_has_is_refused_by_name(name: str, value: Any) -> None:
    q, k, v = make_three(5, 9)
    new = torch.zeros(3, 1, 2, 16, dtype=torch.float16)
    before = k.clone()
    with pytest.raises(UnsupportedArgumentError, match=f"{name}.* got (Tensor|\\d|\\(|None)"):
        flash_attn.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=3, **{name: value})
    assert torch.equal(k, before)


@pytest.mark.parametrize("form", ["", "kvpacked_", "qkvpacked_"])
def test_packed_sequences_can_be_imported_and_are_refused(form: str) -> None:
    function = getattr(flash_attn, f"flash_attn_varlen_{form}func")
    tensors = [torch.zeros(4, 2, 16)] * {"": 3, "kvpacked_": 2, "qkvpacked_": 1}[form]
    option = "cu_seqlens" if form == "qkvpacked_" else "cu_seqlens_q"
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    message = rf"flash_attn_varlen_{form}func .* got {option}=Tensor \[2\]"
    for arguments, named in (((*tensors, lengths, 4), {}), (tensors, {option: lengths})):
        with pytest.raises(UnsupportedArgumentError, match=message):
            function(*arguments, **named)


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
        one, two = (cache[b : b + 1, keys] for cache in expected)
        # The diagonal hangs at the last valid key.
        rows = torch.arange(3)[:, None] + int(before[b]) + new - 3
        mask = (torch.arange(12)[keys] <= rows) | torch.tensor(not causal)
        exact, exact_lse = formula(q[b : b + 1], one, two, None, mask)
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
    close(o, formula(q, k, v, 0.2, bottom_right(2, 9))[0])


def test_a_cache_keeps_no_history_of_what_was_appended() -> None:
    q, k, v = make_three(1, 1)
    caches = make_caches(int32(2, 3, 4))
    o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=int32(2, 3, 4))
    assert not any(cache.requires_grad for cache in caches)
    with pytest.raises(UnsupportedProblemError, match="has no backward yet"):
        o.sum().backward()


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


# --- SDPA --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dims", [(16, 16), (20, 12)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa(causal: bool, lengths: tuple[int, int], dims: tuple[int, int], kv_heads: int) -> None:
    (sq, sk), (dim, dim_v) = lengths, dims
    three = make((3, 4, sq, dim), (3, kv_heads, sk, dim), (3, kv_heads, sk, dim_v))
    for scale in (None, 0.3):
        options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": True}
        o = sdpa.scaled_dot_product_attention(*three, **options)
        assert o.shape == (3, 4, sq, dim_v)
        exact = torch_sdpa(*(x.double() for x in three), **options)
        check_gradients(o, exact, three)


@pytest.mark.parametrize(
    "shapes",
    [
        [(7, 16), (9, 16), (9, 16)],
        [(3, 7, 16), (3, 9, 16), (3, 9, 16)],
        [(2, 3, 4, 7, 16), (2, 3, 4, 9, 16), (2, 3, 4, 9, 16)],
        [(2, 3, 4, 7, 16), (3, 4, 9, 16), (2, 1, 1, 9, 16)],
        [(2, 1, 7, 16), (1, 4, 9, 16), (9, 16)],
    ],
)
def test_sdpa_of_other_ranks(shapes: list[tuple[int, ...]]) -> None:
    three = make(*shapes)
    o = sdpa.scaled_dot_product_attention(*three, None, 0.0, True)
    lead = torch.broadcast_shapes(*(s[:-2] for s in shapes))
    spread = [x.double().expand(*lead, *x.shape[-2:]) for x in three]
    exact = torch_sdpa(*spread, is_causal=True)
    assert o.shape == exact.shape
    check_gradients(o, exact, three)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (
            [(2, 4, 7, 16)] * 3,
            {"attn_mask": torch.ones(7, 7)},
            r"attn_mask: .* got Tensor \[7, 7\]",
        ),
        ([(2, 4, 7, 16)] * 3, {"dropout_p": 0.5}, "dropout_p: .* got 0.5"),
        ([(2, 4, 7, 16)] * 3, {"is_causal": None}, "is_causal must be True or False, got None"),
        ([(2, 4, 7, 16), *[(2, 2, 7, 16)] * 2], {}, r"enable_gqa=True .* got \[2, 4, 7, 16\]"),
        ([(2, 4, 7, 16), *[(3, 4, 7, 16)] * 2], {"enable_gqa": True}, "must fit together"),
        ([(2, 4, 7, 16), *[(2, 3, 7, 16)] * 2], {"enable_gqa": True}, "heads of q must be a mult"),
        ([(16,)] * 3, {}, r"query must have 2 dimensions or more, got \[16\]"),
    ],
)
def test_sdpa_refuses(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=message):
        sdpa.scaled_dot_product_attention(*make(*shapes), **options)


def test_sdpa_follows_autocast() -> None:
    three = make(*[(2, 4, 7, 16)] * 3, dtype=torch.float32)
    with pytest.raises(UnsupportedProblemError, match=r"float16 or bfloat16, got torch\.float32"):
        sdpa.scaled_dot_product_attention(*three)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = sdpa.scaled_dot_product_attention(*three)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), torch_sdpa(*three), rtol=0.03, atol=0.02)
    o.sum().backward()
    assert three[0].grad is not None


# --- fla ---------------------------------------------------------------------------------------------


def retain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, state: Any) -> Any:
    """o and the state, token by token in fp64."""
    heads, gamma = q.shape[2], 1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))
    state = torch.zeros(q.shape[0], heads, q.shape[3], v.shape[3]) if state is None else state
    state, outputs = state.double(), []
    for q_t, k_t, v_t in zip(*(x.double().unbind(1) for x in (q, k, v)), strict=True):
        state = gamma[:, None, None] * state + k_t[..., None] * v_t[..., None, :]
        outputs.append(scale * torch.einsum("bhd,bhdv->bhv", q_t, state))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("name", fla.__all__)
@pytest.mark.parametrize("seqlen", [1, 7, 33])
def test_retention(name: str, seqlen: int) -> None:
    function: Callable[..., Any] = getattr(fla, name)
    three = make((2, seqlen, 4, 16), (2, seqlen, 4, 16), (2, seqlen, 4, 24))
    o, nothing = function(*three)
    assert nothing is None
    check_gradients(o, retain(*three, 0.25, None)[0], three)
    close(function(*three, 0.125)[0], retain(*three, 0.125, None)[0])


@pytest.mark.parametrize("function", [fla.chunk_retention, fla.fused_recurrent_retention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_of_retention(function: Callable[..., Any], dtype: torch.dtype) -> None:
    three = make((2, 7, 4, 16), (2, 7, 4, 16), (2, 7, 4, 24))
    (before,) = make((2, 4, 16, 24), dtype=dtype)
    o, after = function(*three, None, before, True)
    exact, exact_after = retain(*three, 0.25, before)
    assert after.dtype == torch.float32
    close(after, exact_after)
    check_gradients(o, exact, [*three, before])
    first, between = function(*(x[:, :3] for x in three), None, before, True)
    second, _ = function(*(x[:, 3:] for x in three), initial_state=between)
    close(torch.cat([first, second], dim=1), exact)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        *(
            (function, "cu_seqlens", torch.tensor([0, 5]))
            for function in (
                fla.chunk_retention,
                fla.fused_recurrent_retention,
                fla.parallel_retention,
            )
        ),
        (fla.chunk_retention, "head_first", True),
        (fla.fused_recurrent_retention, "reverse", True),
        (fla.fused_recurrent_retention, "transpose_state_layout", True),
        (fla.parallel_retention, "output_attentions", True),
        (fla.parallel_retention, "head_first", True),
    ],
)
def test_retention_refuses(function: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"{name}: .* got (True|Tensor)"):
        function(*make(*[(1, 5, 4, 16)] * 3), **{name: value})


def test_arguments_of_retention_are_the_packages_in_its_order() -> None:
    def options(function: Callable[..., Any]) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:3] == ["q", "k", "v"]
        return {name: p.default for name, p in list(parameters.items())[3:]}

    states = {"scale": None, "initial_state": None, "output_final_state": False}
    lengths = {"cu_seqlens": None, "head_first": False}
    recurrent = {"reverse": False, "cu_seqlens": None, "transpose_state_layout": False}
    parallel = {"scale": None, "output_attentions": False}
    for function, expected in (
        (fla.chunk_retention, states | lengths),
        (fla.fused_recurrent_retention, states | recurrent),
        (fla.parallel_retention, parallel | lengths),
    ):
        found = options(function)
        assert list(found.items()) == list(expected.items())


def test_code_written_against_fla_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.retention", compat.fla)
    names: dict[str, Any] = {}
    exec("from fla.ops.retention import chunk_retention, fused_recurrent_retention", names)
    assert names["chunk_retention"] is fla.chunk_retention


# --- torch.compile -----------------------------------------------------------------------------------


def test_all_of_them_compile_without_a_graph_break() -> None:
    def together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor) -> Any:
        caches = [x.new_zeros(3, 12, 2, 16) for x in (k, v)]
        o = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(-1, 0))
        cached = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=ends)
        turned = (x.transpose(1, 2) for x in (q, k, v))
        other = sdpa.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
        return o, cached, other, fla.chunk_retention(q, k, v, output_final_state=True)[1]

    compiled = torch.compile(together, fullgraph=True, backend="aot_eager")
    tensors = [x.detach() for x in make_three(5, 5)]
    for ends in (int32(1, 2, 3), int32(7, 0, 4)):
        for out, expected in zip(compiled(*tensors, ends), together(*tensors, ends), strict=True):
            assert torch.equal(out, expected)
