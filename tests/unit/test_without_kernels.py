"""Calls where nothing can be built, which the reference serves, and calls that name their kernel."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attention_autotuner import flash_attn_func, retention_func, retnet_attn_func, settings
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.attention.autograd import differentiable_attention
from attention_autotuner.api.retention import plan as retention_plan
from attention_autotuner.api.retention.autograd import RetentionFunction
from attention_autotuner.api.retention.checks import Forward
from attention_autotuner.api.retnet.autograd import RetNetFunction
from attention_autotuner.api.retnet.checks import Rules
from attention_autotuner.api.shared import launch, planning
from attention_autotuner.arch import A100, naming
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    BuildError,
    NoCandidateError,
    ToolchainError,
    UnknownCandidateError,
    UnsupportedArgumentError,
)
from attention_autotuner.operations.attention.modified import Modifiers
from attention_autotuner.serving import dispatch, pinning, runtime
from tests import gradients

SHAPE = {"batch": 2, "heads_q": 4, "heads_kv": 2, "dim_qk": 16, "dim_v": 24}
PROBLEM = Problem(seqlen_q=7, seqlen_k=7, **SHAPE)  # type: ignore[arg-type]  # names of fields
BACKWARD = Problem(seqlen_q=7, seqlen_k=7, direction="backward", **SHAPE)  # type: ignore[arg-type]
POLICY = A100()
FORWARD_NAME = POLICY.legal(PROBLEM.bucketed())[3].name
BACKWARD_NAME = POLICY.legal(BACKWARD.bucketed())[3].name
PLAIN = (None, False, False, "")
Tensors = list[torch.Tensor]


class Machine:
    """A machine whose dispatch fails; CPU tensors count as a GPU's."""

    def __init__(self) -> None:
        self.error: Exception = ToolchainError("there is no nvcc")
        self.asked: list[Problem] = []
        self.pinned: list[str] = []

    def kernel_for(self, problem: Problem, *_: Any, **__: Any) -> Any:
        self.asked.append(problem)
        raise self.error

    def pinned_kernel(self, candidate: Any, *_: Any, **__: Any) -> Any:
        self.pinned.append(candidate.name)
        raise self.error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(naming, "policy_named", lambda name, device: POLICY)
    monkeypatch.setattr(dispatch, "running_on", lambda policy, device: policy)
    monkeypatch.setattr(dispatch, "kernel_for", made.kernel_for)
    monkeypatch.setattr(dispatch, "pinned_kernel", made.pinned_kernel)
    with runtime.fresh():
        yield made


def tensors(*, state: bool = False) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    made = list(gradients.make(PROBLEM, requires_grad=True))
    if state:
        made.append(torch.randn(2, 4, 16, 24, generator=generator).requires_grad_())
    return made


MASK = torch.rand((4, 7, 7), generator=torch.Generator().manual_seed(5)).half()
GAMMA = (0.9, 0.5, 0.99, 1.0)
LOG2 = torch.tensor(GAMMA).log2()


def by_mask(q: Any, k: Any, v: Any, mask: Any, log2: Any, gamma: Any) -> Any:
    rules = Rules(1.0, False, True, None, False)
    return RetNetFunction.apply(q, k, v, mask, log2, gamma, *rules, "", False, False)


# What plain GPU tensors run, and what CPU tensors do.
CALLS: dict[str, tuple[bool, Callable[..., Any], Callable[..., Any]]] = {
    "attention": (
        False,
        lambda q, k, v: differentiable_attention(q, k, v, PLAIN, True, False),
        lambda *x: flash_attn_func(*x, return_lse=True),
    ),
    "attention, o alone": (
        False,
        lambda q, k, v: differentiable_attention(q, k, v, PLAIN, False, True),
        flash_attn_func,
    ),
    "retnet": (
        False,
        lambda q, k, v: by_mask(q, k, v, MASK.clone().requires_grad_(), None, None),
        lambda q, k, v: retnet_attn_func(q, k, v, MASK),
    ),
    "retention": (
        True,
        lambda q, k, v, s: RetentionFunction.apply(
            q, k, v, LOG2.clone().requires_grad_(), None, s, None, "auto", "", True
        ),
        lambda q, k, v, s: retention_func(q, k, v, torch.tensor(GAMMA), initial_state=s),
    ),
    "retention, o alone": (
        False,
        lambda *x: RetentionFunction.apply(*x, None, None, None, None, "auto", "", False),
        lambda *x: retention_func(*x, output_final_state=False)[0],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_reference_serves_with_one_warning(
    machine: Machine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, on_gpu, on_cpu = CALLS[name]
    answers = []
    for call in (on_gpu, on_gpu, on_cpu):
        inputs = tensors(state=state)
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        sum(x.float().square().sum() for x in results).backward()
        answers.append([*results, *(x.grad for x in inputs)])
    for first, again, expected in zip(*answers, strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, expected)
    assert [problem.direction for problem in machine.asked] == ["forward", "backward"]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (warning,) = [message for message in said if message.startswith("no kernel for")]
    assert "there is no nvcc" in warning


@pytest.mark.parametrize("name", [*CALLS, "window and sinks", "mask", "packed", "packed retention"])
def test_no_plan_of_the_reference_holds_a_callers_tensor(machine: Machine, name: str) -> None:
    def modified(**values: Any) -> Callable[..., Any]:
        return lambda q, k, v: attention_plan.attention_forward(
            *(q, k, v, PLAIN, True), modifiers=Modifiers(**values)
        )

    ends, four = torch.tensor([0, 3, 7], dtype=torch.int32), cast("Any", 4)
    calls: dict[str, Callable[..., Any]] = {
        "window and sinks": modified(window_size=(2, 2), sinks=torch.ones(4)),
        "mask": modified(attn_mask=torch.ones(2, 4, 7, 7)),
        "packed": modified(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlens=(4, 4)),
        "packed retention": lambda q, k, v, ends=ends: retention_plan.retention_forward(
            Forward(q, k, v, None, None, None, None, "chunkwise", "", False, ends.clone(), four)
        ),
    }
    state, call, _ = CALLS.get(name, (False, calls.get(name), None))
    assert call is not None
    inputs = [x[:1] if "packed" in name else x for x in tensors(state=state)]
    results = call(*inputs)
    if name in CALLS:
        results = results if isinstance(results, tuple) else (results,)
        sum(x.float().square().sum() for x in results).backward()
    alive = [weakref.ref(x) for x in (*inputs, *results) if x is not None]
    del call, calls, inputs, results, ends
    machine.error.with_traceback(None)  # the frames of calls
    gc.collect()
    assert [seen() for seen in alive] == [None] * len(alive)


def test_the_reference_overwrites_a_state_in_place(machine: Machine) -> None:
    q, k, v, state = (x.detach() for x in tensors(state=True))
    expected_o, expected = retention_func(q, k, v, initial_state=state.clone())
    o, rest = retention_plan.retention_forward(
        Forward(q, k, v, None, None, state, None, "auto", "", False), in_place=True
    )
    assert rest is None
    assert torch.equal(o, expected_o)
    assert torch.equal(state, expected)


@pytest.mark.parametrize("error", [BuildError("ptxas"), NoCandidateError("neither")], ids=str)
def test_strict_kernels_and_other_errors_raise(machine: Machine, error: Exception) -> None:
    _, call, _ = CALLS["attention"]
    with settings.override(strict_kernels=True), pytest.raises(ToolchainError, match="no nvcc"):
        call(*tensors())
    machine.error = error
    call(*tensors())
    machine.error = MemoryError("full")
    runtime.forget("plans")
    with pytest.raises(MemoryError):
        call(*tensors())


# --- calls that name their kernel -----------------------------------------------------------------


def call_pinned(*configs: Any) -> Any:
    options = (None, False, False, pinning.pinned_name("A100", configs))
    q, k, v = tensors()
    return differentiable_attention(q, k, v, options, False, False)


def test_a_pinned_candidate_or_an_error_serves(machine: Machine) -> None:
    by_config = POLICY.legal(PROBLEM.bucketed())[3].config
    for config in (FORWARD_NAME, by_config):
        with pytest.raises(ToolchainError):
            call_pinned(config, BACKWARD_NAME)
    assert machine.pinned == [FORWARD_NAME] * 2
    assert machine.asked == []


def test_a_name_of_the_other_direction_waits_for_it(machine: Machine) -> None:
    policy_name = pinning.pinned_name(None, BACKWARD_NAME)
    with pytest.raises(ToolchainError):
        planning.kernel_of(PROBLEM, policy_name, -1)
    assert (machine.asked, machine.pinned) == ([PROBLEM], [])
    with pytest.raises(ToolchainError):
        planning.kernel_of(BACKWARD, policy_name, -1)
    assert machine.pinned == [BACKWARD_NAME]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([FORWARD_NAME[:-3] + "c1"], f"near it: .*{FORWARD_NAME[:40]}"),
        (["a kernel"], "is none of the .* candidates for attention forward"),
        ([FORWARD_NAME, POLICY.legal(PROBLEM.bucketed())[4].name], "names 2 candidates"),
        ([{"kernel": "scores"}], "config must be a candidate's name or its config, got"),
    ],
)
def test_a_wrong_name_is_an_error_that_lists_those_near_it(
    machine: Machine, configs: list[Any], message: str
) -> None:
    with pytest.raises(UnknownCandidateError, match=message):
        call_pinned(*configs)
    assert machine.pinned == []


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: flash_attn_func(q, k, v, "A100", config=FORWARD_NAME),
        lambda q, k, v: retnet_attn_func(q, k, v, MASK, config=FORWARD_NAME),
        lambda q, k, v: retention_func(q, k, v, config=FORWARD_NAME, layout="bhsd"),
    ],
    ids=["attention", "retnet", "retention"],
)
def test_every_function_carries_a_name_to_its_op(
    call: Callable[..., Any], *, compiled: bool
) -> None:
    function = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    with pytest.raises(UnsupportedArgumentError, match="config names a kernel"):
        function(*(x.detach() for x in tensors()))


def test_dispatch_serves_what_is_pinned_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.devices import A100_80GB

    candidate = POLICY.legal(PROBLEM.bucketed())[3]
    built: list[str] = []

    def obtain(asked: Any, arch: str, *, settings: Any) -> Any:
        built.append(asked.name)
        raise BuildError("ptxas said no")

    monkeypatch.setattr(dispatch, "probe", lambda device: A100_80GB)
    monkeypatch.setattr(dispatch, "obtain", obtain)
    with runtime.fresh():
        with pytest.raises(BuildError, match="ptxas said no"):
            dispatch.pinned_kernel(candidate, POLICY, device=0)
        assert built == [candidate.name]
        info = SimpleNamespace(name=candidate.compiled.name)
        kernel: Any = SimpleNamespace(info=info, path="", prepare=lambda device: None)
        monkeypatch.setattr(dispatch, "obtain", lambda *_, **__: None)
        monkeypatch.setattr(dispatch, "load", lambda artifact: kernel)
        assert dispatch.pinned_kernel(candidate, POLICY, device=0) is kernel
