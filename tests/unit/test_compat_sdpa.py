"""torch's attention function by its name, on the CPU, against torch's own in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_autotuner.compat import sdpa as module
from attention_autotuner.errors import UnsupportedProblemError
from tests.compat_formulas import LENGTHS, check_gradients, make

sdpa: Any = module  # as an untyped caller sees it
torch_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


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
            {"attn_mask": torch.ones(7, 3)},
            r"attn_mask must broadcast to \(2, 4, 7, 7\), got \(7, 3\)",
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


def test_sdpa_of_tensors_without_values() -> None:
    three = [torch.empty(2, 4, n, 16, dtype=torch.float16, device="meta") for n in (7, 9, 9)]
    o = sdpa.scaled_dot_product_attention(*three, is_causal=True)
    assert (o.shape, o.device.type, o.dtype) == (three[0].shape, "meta", torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which is of no other device
        assert sdpa.scaled_dot_product_attention(*three).dtype == torch.float16


@pytest.mark.parametrize("shape", [(7, 5), (1, 1, 5), (2, 1, 7, 5), (2, 4, 7, 5)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float16])
def test_masks(shape: tuple[int, ...], kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, n, 16, generator=generator, dtype=torch.float16) for n in (7, 5, 5)
    )
    mask = torch.randn(shape, generator=generator)
    mask = mask > -1.5 if kind == torch.bool else mask.to(kind)
    o = sdpa.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    of_torch = torch_sdpa(
        *(x.double() for x in (q, k, v)), attn_mask=mask if kind == torch.bool else mask.double()
    )
    torch.testing.assert_close(o.double(), of_torch.nan_to_num(0.0), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("outer", [(2,), (2, 3), ()])
@pytest.mark.parametrize("shape", [(7, 5), (4, 1, 5), (4, 7, 5)])
def test_added_masks_get_gradients(shape: tuple[int, ...], outer: tuple[int, ...]) -> None:
    tensors = make(*((*outer, 4, n, 16) for n in (7, 5, 5)), shape)
    o = sdpa.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3])
    exact = torch_sdpa(*(x.double() for x in tensors[:3]), attn_mask=tensors[3].double())
    check_gradients(o, exact, tensors)
