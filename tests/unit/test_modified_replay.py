"""Gradients of replayed calls with modified scores: those of the longer way, further derivatives, and mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.api.attention import function, varlen, views
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.shared import planning, replay

flash_attn_func: Any = attention_autotuner.flash_attn_func  # as an untyped caller sees it
varlen_func: Any = attention_autotuner.flash_attn_varlen_func
SHAPE = (2, 4, 12, 16)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 0)},
    "top left": {"window_size": (3, -1), "causal": True, "causal_alignment": "top_left"},
    "softcap and slopes": {"softcap": 1.5, "alibi_slopes": torch.linspace(0.1, 0.6, 4)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "table": {"bias": torch.linspace(-1, 1, 4 * 9).view(4, 9), "sinks": torch.ones(4)},
    "mask": {"attn_mask": torch.eye(12).flip(0) - torch.eye(12), "causal": True},
    "mask of heads": {"attn_mask": torch.linspace(-1, 1, 4 * 12).view(4, 1, 12), "softcap": 2.0},
    "boolean mask": {"attn_mask": torch.eye(12).flip(0) == 0},
    "documents": {"document_ids": torch.arange(12, dtype=torch.int32).div(5).int().expand(2, -1)},
}


class Reference:
    """A plan that computes by the reference, and counts."""

    runs = 0
    reads_in_place = True

    def __init__(self, reference: Callable[..., Sequence[torch.Tensor]], inputs: Any) -> None:
        self.settings = settings.current()
        self._reference = reference
        self._shapes = [None if x is None else x.shape for x in inputs.values()]

    def run(self, *tensors: Any) -> list[torch.Tensor]:
        """The results."""
        Reference.runs += 1
        # A kernel takes addresses alone; the reference takes views as those that the plan was made of.
        seen = map(self._as_planned, tensors, self._shapes)
        return list(self._reference(*seen))

    def _as_planned(self, x: Any, shape: Any) -> Any:
        if x is None or x.shape == shape:
            return x
        if x.dtype == torch.float16:  # q, k, v, O and the gradient of O
            return (views.ROWS if x.dim() == 3 else views.BSHD).to_kernel(x)
        return x.expand(shape)  # LSE of packed sequences, masks


def made(*, reference: Any, inputs: Any, **_: Any) -> Reference:
    return Reference(reference, inputs)


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tensors of the CPU for those of a GPU, whose kernels the reference stands for."""
    monkeypatch.setattr(replay.Replays, "takes", lambda *_: True)
    monkeypatch.setattr(replay, "Plan", Reference)
    monkeypatch.setattr(planning, "plan_of", lambda *_, **named: made(**named))
    for table in (
        attention_plan.FORWARD_PLANS,
        attention_plan.BACKWARD_PLANS,
        attention_plan.FORWARD_REPLAYS._plans,
        attention_plan.BACKWARD_REPLAYS._plans,
    ):
        table.clear()


def leaves_of(options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v, then what is learned, and the options with those."""
    generator = torch.Generator().manual_seed(1)
    three = [torch.randn(SHAPE, generator=generator).half() for _ in range(3)]
    learned: dict[str, Any] = {
        name: options[name].clone()
        for name in ("sinks", "bias", "attn_mask")
        if name in options and options[name].is_floating_point()
    }
    if "document_ids" in options:
        learned["document_ids"] = options["document_ids"].clone()  # contiguous
    leaves = [*three, *(x for x in learned.values() if x.is_floating_point())]
    for x in leaves:
        x.requires_grad_()
    return leaves, {**options, **learned}


def gradients(
    options: dict[str, Any], *, of_lse: bool = True, layout: str = "bhsd"
) -> tuple[torch.Tensor, ...]:
    """O and gradients, all ``[batch, heads, seqlen, dim]``."""
    leaves, named = leaves_of(options)
    if layout == "bshd":
        three = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves[:3]]
        leaves = [*three, *leaves[3:]]
    o, lse = flash_attn_func(*leaves[:3], return_lse=True, layout=layout, **named)
    seen = o.transpose(1, 2) if layout == "bshd" else o
    total = (seen.float() * torch.sin(torch.arange(o.numel())).view(seen.shape)).sum()
    if of_lse:
        total = total + lse.masked_fill(lse.isinf(), 0.0).square().sum()
    results = torch.autograd.grad(total, leaves)
    if layout == "bshd":
        assert o.is_contiguous()
        assert all(x.is_contiguous() for x in results[:3])
        results = (*(x.transpose(1, 2) for x in results[:3]), *results[3:])
    return seen, *results


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("name", [*OPTIONS, "plain"])
def test_gradients_are_those_of_the_longer_way(
    monkeypatch: pytest.MonkeyPatch, name: str, of_lse: bool, layout: str
) -> None:
    options = OPTIONS.get(name, {})
    with monkeypatch.context() as patched:
        patched.setattr(replay.Replays, "takes", lambda *_: False)  # nothing is remembered
        expected = gradients(options, of_lse=of_lse)
    gradients(options, of_lse=of_lse, layout=layout)  # no call like it was before
    monkeypatch.setattr(function, "_through_dispatcher", None)
    for time in range(2):  # forward as before, then backward as well
        if time == 1 and not of_lse:
            monkeypatch.setattr(attention_plan, "backward_plan", None)
        before = Reference.runs
        replayed = gradients(options, of_lse=of_lse, layout=layout)
        assert Reference.runs == before + 2
        for gradient, wanted in zip(replayed, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_those_of_the_longer_way(name: str, return_lse: bool) -> None:
    leaves, named = leaves_of(OPTIONS[name])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            first, second = (
                flash_attn_func(*leaves[:3], return_lse=return_lse, **named) for _ in range(2)
            )
        assert type(first) is type(second)
        torch.testing.assert_close(first, second)


def test_second_derivatives_are_those_of_the_longer_way() -> None:
    def twice() -> tuple[torch.Tensor, ...]:
        leaves, named = leaves_of(OPTIONS["table"])
        o = flash_attn_func(*leaves[:3], **named)
        once = torch.autograd.grad(o.float().square().sum(), leaves, create_graph=True)
        total: Any = sum(x.float().square().sum() for x in once)
        return torch.autograd.grad(total, leaves)

    for replayed, expected in zip(*reversed([twice(), twice()]), strict=True):
        torch.testing.assert_close(replayed, expected, atol=5e-3, rtol=5e-3)


def test_what_is_kept_may_not_be_overwritten() -> None:
    leaves, named = leaves_of(OPTIONS["softcap and slopes"])
    for _ in range(2):
        o = flash_attn_func(*leaves[:3], **named)
    named["alibi_slopes"].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.float().sum().backward()
    OPTIONS["softcap and slopes"]["alibi_slopes"].div_(2.0)


def test_gradients_go_by_the_settings_of_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[settings.Settings] = []
    backward = attention_plan.attention_backward

    def look(*arguments: Any, **named: Any) -> Any:
        seen.append(settings.current())
        return backward(*arguments, **named)

    monkeypatch.setattr(attention_plan, "attention_backward", look)
    with settings.override(budget_seconds=2.0):
        leaves, named = leaves_of(OPTIONS["window"])
        for _ in range(2):
            o = flash_attn_func(*leaves[:3], **named)
        inside = settings.current()
    o.float().sum().backward()
    assert seen == [inside]
    assert settings.current() is not inside


def test_a_gradient_of_nothing_asks_for_nothing() -> None:
    leaves, named = leaves_of(OPTIONS["window"])
    for _ in range(2):
        o, lse = flash_attn_func(*leaves[:3], return_lse=True, **named)
    before = Reference.runs
    by_lse = torch.autograd.grad(lse.sum(), leaves[:2], allow_unused=True)
    assert all(x is not None for x in by_lse)
    assert Reference.runs == before + 1
    assert o.requires_grad


@pytest.mark.parametrize("names", [("seqlens_k",), ("starts_k",), ("seqlens_k", "starts_k")])
@pytest.mark.parametrize("name", ["window", "sinks", "table"])
def test_key_bounds_are_those_of_the_call(name: str, names: tuple[str, ...]) -> None:
    leaves, named = leaves_of(OPTIONS[name])
    bounds = {
        "seqlens_k": torch.tensor([12, 7], dtype=torch.int32),
        "starts_k": torch.tensor([2, 0], dtype=torch.int32),
    }
    asked = {name: bounds[name] for name in names}
    with torch.no_grad():
        first = flash_attn_func(*leaves[:3], **named, **asked)
        before = Reference.runs
        again = {name: x.clone() for name, x in asked.items()}
        torch.testing.assert_close(flash_attn_func(*leaves[:3], **named, **again), first)
        assert Reference.runs == before + 1
        for x in again.values():
            x.add_(1 if x is again.get("starts_k") else -1)
        other = flash_attn_func(*leaves[:3], **named, **again)
        assert not torch.equal(other, first)
        assert torch.equal(other, flash_attn_func(*leaves[:3].copy(), **named, **again))
        whole = flash_attn_func(*leaves[:3], **named)
        assert not torch.equal(whole, first)
    assert flash_attn_func(*leaves[:3], **named, **asked).requires_grad


PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal and a window": {"causal": True, "window_size": (3, -1)},
    "all": {
        "softcap": 2.0,
        "alibi_slopes": torch.linspace(0.1, 0.6, 4),
        "bias": torch.linspace(-1, 1, 4 * 9).view(4, 9),
        "sinks": torch.linspace(-1, 1, 4),
    },
}
ENDS = torch.tensor([0, 5, 5, 16, 22], dtype=torch.int32)


def packed_leaves(options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v of packed sequences, then what is learned, and the options with those."""
    generator = torch.Generator().manual_seed(2)
    three = [torch.randn(24, heads, 16, generator=generator).half() for heads in (4, 2, 2)]
    learned: dict[str, Any] = {
        name: options[name].clone() for name in ("sinks", "bias") if name in options
    }
    leaves = [x.requires_grad_() for x in (*three, *learned.values())]
    return leaves, {**options, **learned}


def packed_results(
    options: dict[str, Any], ends: torch.Tensor = ENDS, *, of_lse: bool = False
) -> tuple[torch.Tensor, ...]:
    """O and gradients."""
    leaves, named = packed_leaves(options)
    o, lse = varlen_func(*leaves[:3], ends, ends, 11, 11, return_lse=True, **named)
    total = (o.float() * torch.sin(torch.arange(o.numel())).view(o.shape)).sum()
    if of_lse:
        total = total + lse.masked_fill(lse.isinf(), 0.0).square().sum()
    return (o, *torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("of_lse", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_replayed(
    monkeypatch: pytest.MonkeyPatch, name: str, of_lse: bool
) -> None:
    expected = packed_results(PACKED[name], of_lse=of_lse)
    monkeypatch.setattr(varlen, "FORWARD_OP", None)
    for time in range(2):
        if time == 1 and not of_lse:
            monkeypatch.setattr(attention_plan, "backward_plan", None)
        replayed = packed_results(PACKED[name], of_lse=of_lse)
        for ours, wanted in zip(replayed, expected, strict=True):
            assert ours.shape == wanted.shape
            assert ours.stride() == wanted.stride()
            torch.testing.assert_close(ours, wanted, atol=2e-3, rtol=2e-3)


def test_replayed_packed_calls_follow_their_lengths() -> None:
    others = torch.tensor([0, 9, 12, 13, 24], dtype=torch.int32)
    leaves, _ = packed_leaves({})
    packed_results({})
    for ends in (others, ENDS):
        replayed = varlen_func(*leaves[:3], ends, ends, 9, 12)  # greatest lengths of one bucket
        with torch.no_grad():
            alone = varlen_func(*leaves[:3], ends, ends, 9, 12)
        by_sequence = [
            flash_attn_func(*(x[a:b].transpose(0, 1)[None] for x in leaves[:3]))[0].transpose(0, 1)
            for a, b in pairwise(ends.tolist())
        ]
        for o in (replayed, alone):
            torch.testing.assert_close(o[: ends[-1]], torch.cat(by_sequence), atol=2e-3, rtol=2e-3)
            assert not o[ends[-1] :].any()


def test_results_of_packed_calls_are_no_views() -> None:
    leaves, _ = packed_leaves({})
    for _ in range(2):
        o, lse = varlen_func(*leaves[:3], ENDS, ENDS, 11, 11, return_lse=True)
    assert not o._is_view()
    assert not lse._is_view()
    (2.0 * lse).relu_().sum().backward()
    with torch.no_grad():
        o += 1.0


def test_second_derivatives_of_packed_calls_are_those_of_the_longer_way() -> None:
    def twice() -> tuple[torch.Tensor, ...]:
        leaves, named = packed_leaves(PACKED["all"])
        o = varlen_func(*leaves[:3], ENDS, ENDS, 11, 11, **named)
        once = torch.autograd.grad(o.float().square().sum(), leaves, create_graph=True)
        total: Any = sum(x.float().square().sum() for x in once)
        return torch.autograd.grad(total, leaves)

    for replayed, expected in zip(*reversed([twice(), twice()]), strict=True):
        torch.testing.assert_close(replayed, expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("kind", ["packed", "bshd"])
def test_plans_that_copy_are_not_remembered_for_views(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def call() -> tuple[torch.Tensor, ...]:
        if kind == "packed":
            return packed_results({})
        return gradients(OPTIONS["window"], of_lse=False, layout="bshd")

    monkeypatch.setattr(Reference, "reads_in_place", False)
    expected = call()
    for _ in range(2):
        for ours, wanted in zip(call(), expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=2e-3, rtol=2e-3)
    monkeypatch.setattr(attention_plan, "backward_plan", None)
    with pytest.raises(TypeError, match="not callable"):
        call()


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone()


def checkpointed(call: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Compare a checkpointed call's gradients with its own, for calls like none before and for later ones."""
    expected = None
    for kept in (False, True, False):  # the first is cold, the last keeps what hooks make
        o = checkpoint(call, *leaves, use_reentrant=kept)
        total = (o.float() * torch.sin(torch.arange(o.numel())).view(o.shape)).sum()
        results = torch.autograd.grad(total, leaves) if not kept else ()
        if kept:
            total.backward()
            results = tuple(x.grad for x in leaves if x.grad is not None)
        expected = expected or results
        for ours, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, wanted, atol=2e-3, rtol=2e-3)
    with torch.autograd.graph.saved_tensors_hooks(copied, lambda x: x):
        o = call(*leaves)
    total = (o.float() * torch.sin(torch.arange(o.numel())).view(o.shape)).sum()
    assert expected is not None
    for ours, wanted in zip(torch.autograd.grad(total, leaves), expected, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", [*OPTIONS, "plain"])
def test_checkpoints_recompute_what_the_first_call_kept(name: str, layout: str) -> None:
    leaves, named = leaves_of(OPTIONS.get(name, {}))
    if layout == "bshd":
        three = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves[:3]]
        leaves = [*three, *leaves[3:]]
    checkpointed(lambda q, k, v, *_: flash_attn_func(q, k, v, layout=layout, **named), leaves)


@pytest.mark.parametrize("name", PACKED)
def test_checkpoints_recompute_what_the_first_packed_call_kept(name: str) -> None:
    leaves, named = packed_leaves(PACKED[name])
    checkpointed(lambda q, k, v, *_: varlen_func(q, k, v, ENDS, ENDS, 11, 11, **named), leaves)


def test_keys_that_are_the_values_are_those_of_two_tensors() -> None:
    q, k, v = leaves_of({})[0]
    for options in (OPTIONS["window"], OPTIONS["sinks"], {}):
        flash_attn_func(q, k, v, **options)
        for _ in range(2):
            torch.testing.assert_close(
                flash_attn_func(q, k, k, **options), flash_attn_func(q, k, k.clone(), **options)
            )
