"""Calls of other packages' functions that are refused: by their callers' names, and before anything is written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention_autotuner.compat import fla, sdpa
from attention_autotuner.compat import flash_attn as module
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError
from tests.bad_calls import calling, check_refusal, parametrize, t

flash_attn: Any = module  # as an untyped caller sees it
scaled_dot_product_attention: Any = sdpa.scaled_dot_product_attention
chunk_retention: Any = fla.chunk_retention


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def appending(**changes: Any) -> dict[str, Any]:
    """A call that writes two keys behind the four of caches of 12."""
    call: dict[str, Any] = {"q": t(3, 1, 4, 16), "cache_seqlens": int32(4, 4, 4)}
    call |= {name: t(3, 12, 2, 16) for name in ("k_cache", "v_cache")}
    call |= {name: torch.ones(3, 2, 2, 16, dtype=torch.float16) for name in ("k", "v")}
    return call | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"return_softmax_lse": 1}, "return_softmax_lse must be True or False, got 1"),
        ({"softmax_scale": math.nan}, "softmax_scale must be finite in fp32, got nan"),
        ({"softmax_scale": "0.1"}, "softmax_scale must be a float or None, got str '0.1'"),
        ({"softcap": -1.0}, "softcap .* got -1.0"),
        ({"window_size": (-1,)}, "window_size must be two integers"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have the shape \(4,\), got \(3,\)"),
        ({"q": t(3, 1, 4, 16, dtype=torch.float32)}, "q must be float16 or bfloat16"),
        ({"q": t(3, 1, 4, 16, dtype=torch.bfloat16)}, "q, k and v must have one dtype"),
        ({"q": t(3, 1, 4, 16, device="meta")}, "q, k and v must be on one device, got meta"),
        ({"q": t(3, 1, 3, 16)}, "heads of q must be a multiple of heads of k and v, got 3 and 2"),
        ({"q": t(3, 1, 4, 24)}, "q and k must have the same dim, got 24 and 16"),
        ({"q": t(3, 1, 4, 16).to_sparse()}, "q must be a dense strided tensor"),
        ({"v_cache": t(3, 11, 2, 16)}, "k and v must have the same seqlen, got 12 and 11"),
        ({"v_cache": t(3, 12, 2, 16).bfloat16(), "v": t(3, 2, 2, 16).bfloat16()}, "have one dtype"),
        ({"cache_leftpad": int32(0, 0)}, r"cache_leftpad must have the shape \(3,\), got \(2,\)"),
        ({"cache_leftpad": int32(*[0] * 6)[::2]}, "cache_leftpad must be contiguous, got a stride"),
        ({"cache_seqlens": int32(1, -1, 1)}, r"cache_seqlens must be from 0 to 10 .* got \[-1\]"),
        ({"cache_seqlens": int32(1, 2, 11)}, r"cache_seqlens must be from 0 to 10 .* got \[11\]"),
        ({"cache_seqlens": -1}, "cache_seqlens must be from 0 to 10 .* got -1"),
        ({"k_cache": t(1, 12, 2, 16).expand(3, -1, -1, -1)}, r"k_cache must .* strides \(0, 32,"),
        ({"v_cache": t(3, 1, 2, 16).expand(-1, 12, -1, -1)}, r"v_cache must .* for \(3, 12, 2, 16"),
        (
            {"v_cache": t(14, 2, 16).unfold(0, 12, 1).permute(0, 3, 1, 2)},
            "v_cache must have memory",
        ),
    ],
)
def test_a_refused_call_leaves_the_cache_as_it_was(changes: dict[str, Any], message: str) -> None:
    call = appending(**changes)
    with pytest.raises(UnsupportedProblemError, match=message):
        flash_attn.flash_attn_with_kvcache(**call)
    assert not call["k_cache"].count_nonzero()
    assert not call["v_cache"].count_nonzero()


def test_caches_too_large_for_any_kernel_are_left_as_they_were() -> None:
    shapes = {"q": (3, 1, 4, 260), "k_cache": (3, 12, 2, 260), "k": (3, 2, 2, 260)}
    call = appending(**{name: torch.ones(*shape).half() for name, shape in shapes.items()})
    call["k_cache"].zero_()
    with pytest.raises(
        UnsupportedProblemError, match="dim of q and k must be at most 256, got 260"
    ):
        flash_attn.flash_attn_with_kvcache(**call)
    assert not call["k_cache"].count_nonzero()


def test_caches_are_written_in_any_order_of_dimensions_but_once() -> None:
    heads_first = t(3, 2, 12, 16).transpose(1, 2)
    call = appending(k_cache=heads_first)
    for _ in range(2):  # the second call is known to fit
        flash_attn.flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], call["v_cache"])
    assert heads_first[:, 4:6].all()
    shared = t(1, 12, 2, 16).expand(3, -1, -1, -1)
    with pytest.raises(UnsupportedProblemError, match="memory of its own"):
        flash_attn.flash_attn_with_kvcache(**appending(k_cache=shared))
    assert not shared.count_nonzero()
    flash_attn.flash_attn_with_kvcache(**appending(k_cache=shared, k=None, v=None))  # is read only


def test_lengths_that_do_not_lie_together_are_taken_where_keys_are_written() -> None:
    call = appending(cache_seqlens=int32(4, 0, 4, 0, 4, 0)[::2])
    flash_attn.flash_attn_with_kvcache(**call)
    assert call["k_cache"].nonzero()[:, 1].unique().tolist() == [4, 5]


Q = t(1, 3, 2, 16)
attn = calling(flash_attn.flash_attn_func, Q, Q, Q)
of_torch = calling(scaled_dot_product_attention, Q, Q, Q)
LARGE = t(1, 3, 2, 300)


@parametrize(
    [
        (
            "probabilities",
            attn(return_attn_probs=1),
            "return_attn_probs must be True or False",
            "1",
        ),
        ("scale of torch", of_torch(scale=math.nan), "scale must be finite in fp32", "got nan"),
        ("words as scale", of_torch(scale="1"), "scale must be a float or None", "'1'"),
        (
            "dim 300",
            calling(flash_attn.flash_attn_func, LARGE, LARGE, LARGE)(),
            "dim of q and k must be at most 256",
            "got 300",
        ),
        ("dim of v", attn({2: t(1, 3, 2, 515)}), "dim of v must be at most 512", "got 515"),
    ]
)
def test_refusals_have_their_callers_names(call: Any, constraint: str, value: str) -> None:
    check_refusal(call, constraint, value)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # prototypes of torch's
    UNREADABLE = {
        "torch.sparse_coo": Q.to_sparse(),
        "torch.sparse_csr": Q[0, 0].to_sparse_csr(),
        "got nested": torch.nested.nested_tensor([t(2, 16), t(3, 16)]),
        "nested": torch.nested.nested_tensor([t(2, 16), t(3, 16)], layout=torch.jagged),
        "dim": torch.tensor(1.0, dtype=torch.float16),
    }
UNREAD: dict[str, tuple[Callable[..., object], dict[str, Any], tuple[str, ...]]] = {
    "sdpa": (
        scaled_dot_product_attention,
        {"query": Q, "key": Q, "value": Q},
        ("attn_mask", "scale"),
    ),
    "attention": (
        flash_attn.flash_attn_func,
        {"q": Q, "k": Q, "v": Q},
        ("softmax_scale", "alibi_slopes", "window_size", "deterministic"),
    ),
    "packed": (
        flash_attn.flash_attn_varlen_func,
        {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": int32(0, 3), "cu_seqlens_k": int32(0, 3)}
        | {"max_seqlen_q": 3, "max_seqlen_k": 3},
        ("softmax_scale", "deterministic"),
    ),
    "caches": (flash_attn.flash_attn_with_kvcache, appending(), ("cache_leftpad",)),
    "retention": (chunk_retention, {"q": Q, "k": Q, "v": Q}, ("initial_state", "cu_seqlens")),
}


@pytest.mark.parametrize("words", UNREADABLE)
@pytest.mark.parametrize(
    ("function", "name"),
    [(kind, name) for kind, (_, good, others) in UNREAD.items() for name in (*good, *others)],
)
def test_tensors_without_strided_memory_are_refused(function: str, name: str, words: str) -> None:
    call, good, _ = UNREAD[function]
    x = UNREADABLE[words]
    if x.dim() == 0 and name in ("scale", "softmax_scale", "attn_mask"):
        return  # a number
    with pytest.raises(UnsupportedProblemError) as caught:
        call(**(good | {name: x}))
    assert name in str(caught.value)
    if name in ("q", "query", "k_cache", "attn_mask"):
        assert words in str(caught.value)


def test_the_scale_of_torch_is_not_called_otherwise() -> None:
    with pytest.raises(UnsupportedProblemError) as caught:
        of_torch(scale=math.inf)()
    assert "softmax_scale" not in str(caught.value)


def test_options_that_no_kernel_has_are_type_errors_and_values_out_of_range_are_not() -> None:
    with pytest.raises(UnsupportedArgumentError):
        attn(dropout_p=0.1)()
    with pytest.raises(UnsupportedProblemError) as caught:
        attn(softcap=-1.0)()
    assert not isinstance(caught.value, TypeError)
