"""Calls of kinds that were seen before: what is recognised, and what goes another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.attention.torch_op import FORWARD_OP
from attention_autotuner.api.shared import launch, planning
from attention_autotuner.api.shared.plain import addresses
from attention_autotuner.api.shared.replay import KINDS, Replays, key_of
from attention_autotuner.api.shared.torch_library import twin_of
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.serving import dispatch
from tests import gradients

SHAPE = (2, 3, 16, 8)
OPTIONS = (None, False, False, "")


@pytest.fixture
def plan() -> launch.Plan:
    inputs = {"q": torch.randn(SHAPE)}
    return launch.Plan(None, None, inputs=inputs, outputs=(), in_force=settings.current())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """An empty memory that takes tensors of the CPU for those of a GPU."""
    monkeypatch.setattr(Replays, "takes", lambda *_: True)
    memory = attention_plan.FORWARD_REPLAYS
    memory._plans.clear()
    return memory


def misaligned() -> torch.Tensor:
    return torch.randn(2 * 3 * 16 * 8 + 1)[1:].view(SHAPE)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(2, 3, 17, 8),
        lambda: torch.randn(2, 16, 3, 8).transpose(1, 2),
        lambda: torch.randn(SHAPE, dtype=torch.float64),
        lambda: torch.randn(SHAPE, requires_grad=True),
        lambda: torch.nn.Parameter(torch.randn(SHAPE), requires_grad=False),
        lambda: torch._neg_view(torch.randn(SHAPE)),
        lambda: torch._efficientzerotensor(SHAPE),
        misaligned,
    ],
    ids=["shape", "strides", "dtype", "grad", "type", "negated", "zero", "alignment"],
)
def test_tensors_of_another_kind_are_not_recognised(
    replays: Replays, plan: launch.Plan, other: Callable[[], torch.Tensor]
) -> None:
    replays.remember(key_of("asked", torch.ones(1)), plan, torch.randn(SHAPE), torch.randn(SHAPE))
    assert replays.find("asked", torch.randn(SHAPE), torch.randn(SHAPE)) is plan
    assert replays.find("asked", torch.randn(SHAPE), other()) is None
    assert replays.find("else", torch.randn(SHAPE), torch.randn(SHAPE)) is None


def test_modes_and_transforms_are_not_passed_by(replays: Replays, plan: launch.Plan) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.randn(SHAPE)
    replays.remember(key_of("asked", x), plan, x)
    seen: list[launch.Plan | None] = []
    with Mode():
        seen.append(replays.find("asked", x))

    def look(one_of_two: torch.Tensor) -> torch.Tensor:
        seen.extend(replays.find("asked", y) for y in (x, one_of_two))
        return one_of_two

    torch.func.vmap(look)(torch.stack((x, x)))
    assert seen == [None, None, None]
    assert replays.find("asked", x) is plan


def test_plans_of_other_settings_or_before_new_records_are_not_found(
    replays: Replays, plan: launch.Plan
) -> None:
    x = torch.randn(SHAPE)
    replays.remember(key_of("asked", x), plan, x)
    with settings.override(strict_kernels=True):
        assert replays.find("asked", x) is None
    dispatch.invalidate()
    assert replays.find("asked", x) is None


def test_a_few_kinds_of_call_may_ask_the_same(replays: Replays, plan: launch.Plan) -> None:
    calls = [torch.randn(SHAPE[0], SHAPE[1], n, SHAPE[3]) for n in range(1, KINDS + 2)]
    for x in calls:
        replays.remember(key_of("asked", x), plan, x)
    assert [replays.find("asked", x) for x in calls] == [*[plan] * KINDS, None]
    elsewhere = torch.empty(SHAPE, device="meta")
    elsewhere.get_device = lambda: 1  # type: ignore[method-assign]  # of another GPU
    replays.remember(key_of("asked", elsewhere), plan, elsewhere)
    assert replays.find("asked", elsewhere) is plan


def test_every_run_of_a_compiled_graph_but_the_first_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes(_: Replays, *tensors: torch.Tensor) -> bool:
        return addresses(*tensors) is not None

    seen: list[bool] = []
    find = Replays.find

    def look(memory: Replays, *arguments: Any) -> launch.Plan | None:
        plan = find(memory, *arguments)
        seen.append(plan is not None)
        return plan

    def plan_of(*_: object, **named: Any) -> launch.Plan:
        inputs, outputs = named["inputs"], named["outputs"]
        return launch.Plan(None, None, inputs=inputs, outputs=outputs, in_force=settings.current())

    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(planning, "plan_of", plan_of)
    monkeypatch.setattr(Replays, "takes", takes)
    monkeypatch.setattr(Replays, "find", look)
    tables = (
        attention_plan.FORWARD_PLANS,
        attention_plan.BACKWARD_PLANS,
        attention_plan.FORWARD_REPLAYS._plans,
        attention_plan.BACKWARD_REPLAYS._plans,
    )
    for table in tables:
        table.clear()
    block = gradients.make_block(device="cpu")
    compiled = torch.compile(block, fullgraph=True)
    for _ in range(3):
        seen.clear()
        torch.autograd.backward(gradients.loss_of(compiled, torch.randn(2, 32, 256).bfloat16()))
    assert seen == [True, True]
    with torch.no_grad():
        for _ in range(3):
            seen.clear()
            assert compiled(torch.randn(2, 32, 256).bfloat16()).shape == (2, 32, 256)
    assert seen == [True]
    for table in tables:
        table.clear()


@pytest.mark.parametrize("differentiable", [False, True])
def test_an_eager_call_like_an_earlier_one_runs_its_plan_at_once(
    monkeypatch: pytest.MonkeyPatch, differentiable: bool
) -> None:
    attention_plan.FORWARD_REPLAYS._plans.clear()
    q, k, v = (torch.randn(SHAPE, dtype=torch.float16, requires_grad=differentiable) for _ in "qkv")
    outputs = [launch.output(q, v), launch.contiguous("lse", SHAPE[:3], torch.float32)]
    inputs = {"q": q, "k": k, "v": v}
    known = launch.Plan(None, None, inputs=inputs, outputs=outputs, in_force=settings.current())
    right = flash_attn_func(q, k, v).detach()
    asked = ("eager", q.shape, k.shape, differentiable, OPTIONS, differentiable, True)
    with monkeypatch.context() as patch:
        patch.setattr(Replays, "takes", lambda *_: True)
        attention_plan.FORWARD_REPLAYS.remember(key_of(asked, q), known, q, k, v)
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    o = flash_attn_func(q, k, v)
    assert not o.any()
    assert o.requires_grad is differentiable
    with torch.inference_mode(), torch.overrides.BaseTorchFunctionMode():
        torch.testing.assert_close(flash_attn_func(q, k, v), right)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True)[:, :, -1], right[:, :, -1])


def test_an_eager_call_of_a_new_kind_is_recognised_next_time(
    replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[launch.Plan] = []

    def plan_of(*_: object, **named: Any) -> launch.Plan:
        inputs, outputs = named["inputs"], named["outputs"]
        made.append(
            launch.Plan(None, None, inputs=inputs, outputs=outputs, in_force=settings.current())
        )
        return made[-1]

    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(planning, "plan_of", plan_of)
    attention_plan.FORWARD_PLANS.clear()
    q, k, v = (torch.randn(SHAPE, dtype=torch.float16) for _ in "qkv")
    for _ in range(2):
        assert not flash_attn_func(q, k, v).any()
        assert len(made) == 1
    asked = ("eager", q.shape, k.shape, False, OPTIONS, False, True)
    assert replays.find(asked, q, k, v) is made[0]
    attention_plan.FORWARD_PLANS.clear()


def test_tensors_on_the_cpu_are_never_replayed(plan: launch.Plan) -> None:
    memory, x = attention_plan.FORWARD_REPLAYS, torch.randn(SHAPE)
    assert not memory.takes(x)
    memory.remember(key_of("on the CPU", x), plan, x)
    assert memory.find("on the CPU", x) is None


def test_compiled_calls_look_beside_the_dispatcher_first(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = twin_of(FORWARD_OP)
    q, k, v = (torch.randn(SHAPE, dtype=torch.float16) for _ in range(3))
    arguments = (q, k, v, *OPTIONS, True, False, None, None)
    right = twin(*arguments)
    mark = (torch.zeros(1), torch.zeros(1))
    seen: list[tuple[object, ...]] = []

    def replay(*fields: object) -> object:
        seen.append(fields)
        return mark if len(seen) == 1 else None

    monkeypatch.setattr(twin, "replay", replay)
    assert twin(*arguments) is mark
    assert seen[0] == arguments
    torch.testing.assert_close(twin(*arguments), right)
    assert len(seen) == 2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.testing.assert_close(twin(*arguments), right)
    assert len(seen) == 2
    assert any(event.key == twin.name() for event in profile.key_averages())


as_untyped: Any = flash_attn_func
BENT: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, -1), "causal": True},
    "softcap": {"softcap": 2.0},
    "sinks and slopes": {"sinks": torch.ones(3), "alibi_slopes": torch.ones(3)},
    "mask": {"attn_mask": torch.ones(16, 16, dtype=torch.bool)},
    "table": {"bias": torch.ones(3, 9)},
    "documents": {"document_ids": torch.zeros(2, 16, dtype=torch.int32)},
}


def halves(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(SHAPE).half() for _ in range(count)]


class Recognition:
    """Says of calls whether one like them was seen before."""

    def __init__(self, memory: Replays) -> None:
        self.memory = memory
        self.answers: list[bool] = []

    def __call__(self, *tensors: torch.Tensor, **options: Any) -> bool:
        """Call ``flash_attn_func``."""
        self.answers.clear()
        o = as_untyped(*tensors, **options)
        assert not o.any()  # the plans of these tests leave zeros
        return self.answers == [True]


@pytest.fixture
def recognised(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> Recognition:
    seen, find = Recognition(replays), Replays.find

    def plan_of(*_: object, **named: Any) -> launch.Plan:
        inputs, outputs = named["inputs"], named["outputs"]
        return launch.Plan(None, None, inputs=inputs, outputs=outputs, in_force=settings.current())

    def look(memory: Replays, *arguments: Any) -> launch.Plan | None:
        plan = find(memory, *arguments)
        seen.answers.append(plan is not None)
        return plan

    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(planning, "plan_of", plan_of)
    monkeypatch.setattr(Replays, "find", look)
    attention_plan.FORWARD_PLANS.clear()
    return seen


@pytest.mark.parametrize("name", BENT)
def test_modified_calls_are_recognised(recognised: Recognition, name: str) -> None:
    options = BENT[name]
    assert not recognised(*halves(), **options)
    o, lse = as_untyped(*halves(), return_lse=True, **options)
    assert recognised.answers == [False, True]
    assert o.shape == SHAPE
    assert lse.shape == SHAPE[:3]
    again = {key: x.clone() if torch.is_tensor(x) else x for key, x in options.items()}
    assert recognised(*halves(), **again)
    with settings.override(budget_seconds=1.0):
        assert not recognised(*halves(), **options)


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": (4, -1)},
        {"softcap": 1.0},
        {"causal": False},
        {"softmax_scale": 0.5},
        {"sinks": torch.ones(3)},
        {"attn_mask": torch.ones(16, 16, dtype=torch.bool)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_modifications_are_not_recognised(
    recognised: Recognition, change: dict[str, Any]
) -> None:
    options = BENT["window"]
    assert [recognised(*halves(), **options) for _ in range(2)] == [False, True]
    assert not recognised(*halves(), **{**options, **change})


def test_a_window_that_is_no_tuple_goes_through_the_dispatcher(recognised: Recognition) -> None:
    for _ in range(2):
        assert as_untyped(*halves(), window_size=[3, -1], causal=True).any()
    assert not recognised.answers


def test_masks_of_other_shapes_and_gradients_are_not_recognised(recognised: Recognition) -> None:
    mask = torch.zeros(16, 16)
    assert [recognised(*halves(), attn_mask=mask) for _ in range(2)] == [False, True]
    for other in (mask[:1], mask.half(), mask[None].expand(3, -1, -1), mask.T):
        assert not recognised(*halves(), attn_mask=other)
    learned = mask.clone().requires_grad_()
    assert not recognised(*halves(), attn_mask=learned)
    q, k, v = halves()
    assert not recognised(q.requires_grad_(), k, v, attn_mask=mask)
    with torch.no_grad():
        assert recognised(q.detach(), k, v, attn_mask=mask)


@pytest.mark.parametrize(
    ("options", "causal"),
    [({"window_size": (15, -1)}, False), ({"window_size": (100, 0)}, True), ({}, True)],
)
def test_windows_that_hide_nothing_are_ordinary_calls(
    recognised: Recognition, options: dict[str, Any], causal: bool
) -> None:
    assert not recognised(*halves(), causal=causal and not options, **options)
    keys = [asked for (asked, *_) in recognised.memory._plans]
    assert [key[0] for key in keys] == ["eager"]
    assert keys[0][4][1] is causal


def test_windows_that_there_cannot_be_are_refused_each_time(recognised: Recognition) -> None:
    for window in ((-2, 3), (2**30 + 1, -1), (3, 2.0), (3,)):
        for _ in range(2):
            with pytest.raises(UnsupportedProblemError, match="two integers from -1 to"):
                as_untyped(*halves(), window_size=window)
    assert not recognised.answers


def test_a_call_that_takes_a_tensor_twice_is_computed_each_time(recognised: Recognition) -> None:
    q, k, v = halves()
    slopes = torch.linspace(0.1, 0.3, 3)
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ((q, k, k), {"window_size": (3, -1)}),
        ((q, k, k), {}),
        ((q, q, q), {"layout": "bshd", "softcap": 2.0}),
        ((q, k, v), {"alibi_slopes": slopes, "sinks": slopes}),
    ]
    for tensors, options in calls:
        for _ in range(KINDS + 1):
            assert not recognised(*tensors, **options)
    # They keep nobody else out.
    for options in ({"window_size": (3, -1)}, {}, {"alibi_slopes": slopes, "sinks": slopes + 1}):
        assert [recognised(q, k, v, **options) for _ in range(2)] == [False, True]


def test_a_plan_that_is_outdated_once_it_is_made_is_not_kept(
    recognised: Recognition, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_plan = attention_plan.forward_plan

    def overtaken(*arguments: Any) -> Any:
        plan = forward_plan(*arguments)
        dispatch.invalidate()  # as by tune() in another thread
        return plan

    three = halves()
    for options in ({}, BENT["window"]):
        with monkeypatch.context() as patch:
            patch.setattr(attention_plan, "forward_plan", overtaken)
            recognised(*three, **options)
        assert [recognised(*three, **options) for _ in range(2)] == [False, True]
