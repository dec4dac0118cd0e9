"""Replayed calls of both layouts by a library of the host in a kernel's place, which reads by addresses and strides."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner.api.attention import function
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.shared import replay
from attention_autotuner.reference import attention
from tests.fake_kernels import FakeDispatch, serve_fakes

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

flash_attn_func: Any = attention_autotuner.flash_attn_func  # as an untyped caller sees it
BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, DIM = 2, 4, 2, 6, 9, 16
Loss = Callable[[torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "dense": lambda o: (o.float() * torch.sin(torch.arange(o.numel())).view(o.shape)).sum(),
    "of rows": lambda o: (o * torch.linspace(-1, 1, o.shape[1])[:, None, None].half()).sum(),
    "all the same": lambda o: o.sum(),
    "dims first": lambda o: LOSSES["dense"](o.permute(3, 0, 1, 2).contiguous()),
}


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    for memory in (attention_plan.FORWARD_REPLAYS, attention_plan.BACKWARD_REPLAYS):
        memory._plans.clear()
    monkeypatch.setattr(replay.Replays, "takes", lambda *_: True)
    with serve_fakes(fake_kernel, monkeypatch, ()) as fake:
        yield fake


def leaves(layout: str) -> list[torch.Tensor]:
    """q, k and v, dense in their layout."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, SEQLEN_Q), (HEADS_KV, SEQLEN_K), (HEADS_KV, SEQLEN_K))
    made = [torch.randn(BATCH, *size, DIM, generator=generator).half() for size in sizes]
    if layout == "bshd":
        made = [x.transpose(1, 2).contiguous() for x in made]
    return [x.requires_grad_() for x in made]


def swapped(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.transpose(1, 2) if layout == "bshd" else x


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_of_any_strides(
    fake: FakeDispatch, kind: str, layout: str, return_lse: bool
) -> None:
    three = leaves(layout)
    exact = [swapped(x.detach(), layout).float().requires_grad_() for x in three]
    o_exact, lse_exact = attention(*exact, causal=True)
    loss = LOSSES[kind](swapped(o_exact.half(), layout))
    if return_lse:
        loss = loss + lse_exact.square().sum()
    wanted = torch.autograd.grad(loss, exact)
    for _ in range(3):
        results = flash_attn_func(*three, layout=layout, causal=True, return_lse=return_lse)
        o = results[0] if return_lse else results
        loss = LOSSES[kind](o)
        if return_lse:
            loss = loss + results[1].square().sum()
        torch.testing.assert_close(swapped(o, layout), o_exact.half(), atol=2e-3, rtol=2e-3)
        for ours, theirs in zip(torch.autograd.grad(loss, three), wanted, strict=True):
            torch.testing.assert_close(swapped(ours, layout).float(), theirs, atol=2e-2, rtol=2e-2)
        with torch.no_grad():
            again = flash_attn_func(*three, layout=layout, causal=True)
        torch.testing.assert_close(again, o)
    assert fake.read("launch_count", direction="backward") == 3


def test_calls_under_a_default_device_are_recognised(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = leaves("bhsd")
    o = flash_attn_func(*three, causal=True)
    monkeypatch.setattr(function, "_through_dispatcher", None)
    monkeypatch.setattr(attention_plan, "forward_plan", None)
    replayed, heard = attention_plan.replayed_plan, []

    def hears(*arguments: Any) -> Any:
        heard.append(torch._C._is_torch_function_mode_enabled())
        return replayed(*arguments)

    monkeypatch.setattr(attention_plan, "replayed_plan", hears)
    with torch.device("meta"):  # where nothing of a call may be made
        torch.testing.assert_close(flash_attn_func(*three, causal=True), o)
        assert torch._C._is_torch_function_mode_enabled()
    assert len(fake.asked) == 1
    assert heard == [False]


def of_seen_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqlens_k: torch.Tensor | None = None,
    starts_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of all keys, and LSE, with those out of bounds hidden."""
    keys, rows = torch.arange(SEQLEN_K), torch.arange(SEQLEN_Q)[:, None]
    ends = torch.full((BATCH,), SEQLEN_K) if seqlens_k is None else seqlens_k
    starts = torch.zeros(BATCH) if starts_k is None else starts_k
    ends, starts = ends[:, None, None], starts[:, None, None]
    seen = (keys >= starts) & (keys < ends) & (keys <= rows + ends - SEQLEN_Q)
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("names", [("seqlens_k",), ("starts_k",), ("seqlens_k", "starts_k")])
def test_key_bounds_are_those_of_each_call(
    fake: FakeDispatch, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], layout: str
) -> None:
    three = [x.detach() for x in leaves(layout)]
    exact = [swapped(x, layout).float() for x in three]
    values = {"seqlens_k": [[9, 4], [3, 9], [8, 0]], "starts_k": [[0, 2], [1, 0], [5, 8]]}
    for time in range(3):
        bounds = {name: torch.tensor(values[name][time], dtype=torch.int32) for name in names}
        options: dict[str, Any] = {"layout": layout, "causal": True, **bounds}
        o, lse = flash_attn_func(*three, return_lse=True, **options)
        expected, expected_lse = of_seen_keys(*exact, **bounds)
        torch.testing.assert_close(swapped(o, layout), expected.half(), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(flash_attn_func(*three, **options), o)
        assert o.is_contiguous()
        monkeypatch.setattr(function, "_through_dispatcher", None)  # from the first on
        monkeypatch.setattr(attention_plan, "forward_plan", None)
    assert len(fake.asked) == 1
