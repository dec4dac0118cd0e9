"""Kernels made ready ahead of time, from a file and from a model's own calls."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.api.attention.autograd import differentiable_attention
from attention_autotuner.api.shared import launch, planning, warming
from attention_autotuner.arch import A100, naming
from attention_autotuner.codegen import obtain
from attention_autotuner.codegen.build import BuildTarget
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import (
    ToolchainError,
    UnsupportedArchitectureError,
    UnsupportedArgumentError,
    UnsupportedProblemError,
    UntunedError,
)
from attention_autotuner.serving import dispatch, runtime
from attention_autotuner.tuning import search
from tests.fake_kernels import CPU, serve_fakes
from tests.fake_world import PROBLEM, World, other_candidate

BACKWARD = replace(PROBLEM, direction="backward")
POLICY = A100()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with settings.override(mode="cached", cache_dir=tmp_path), runtime.fresh():
        world = World(monkeypatch, tmp_path)
        monkeypatch.setattr(warming, "probe", lambda device: world.gpu)
        monkeypatch.setattr(launch, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(naming, "policy_named", lambda name, device: POLICY)
        yield world


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[list[Candidate]]:
    batches: list[list[Candidate]] = []
    monkeypatch.setattr(
        warming, "build_ahead", lambda candidates, *_, **__: batches.append(list(candidates))
    )
    return batches


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = [json.dumps(values_of(problem)) for problem in (PROBLEM, BACKWARD, PROBLEM)]
    path.write_text("\n".join(lines))
    return path


def test_the_problems_of_a_file_are_built_together_and_loaded(
    world: World, ahead: list[list[Candidate]], file: Path
) -> None:
    tuned = other_candidate(POLICY)
    world.shipped.answer = None
    expected = [POLICY.default(problem.bucketed()) for problem in (PROBLEM, BACKWARD)]
    assert attention_autotuner.warmup(file) == (PROBLEM, BACKWARD)
    assert ahead == [expected]
    for problem in (PROBLEM, BACKWARD):
        dispatch.kernel_for(problem, POLICY, device=0, must_be_warm=True)
    assert [name for name, _ in world.obtained] == [c.name for c in expected]
    world.shipped.answer = world.hit(tuned, "shipped")
    with settings.override(jobs=1):
        attention_autotuner.warmup(str(file))
    assert ahead[1][0] == tuned


def test_what_is_to_be_tuned_is_not_built_ahead(
    world: World, ahead: list[list[Candidate]], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[Problem] = []
    monkeypatch.setattr(search, "tune", lambda problem, policy: tuned.append(problem))
    with settings.mode("tune", backward="cached"):
        warming.warmup(file)
    assert tuned == [PROBLEM]
    assert [c.direction for batch in ahead for c in batch] == ["backward"]
    with settings.override(strict_picks=True), pytest.raises(UntunedError):
        warming.warmup(file)


def test_arguments_that_say_nothing_are_refused(file: Path) -> None:
    with pytest.raises(TypeError, match="neither inputs nor backward"):
        warming.warmup(file, 1)
    with pytest.raises(TypeError, match="device_type is of a file"):
        warming.warmup(lambda: None, device_type="A100")


def test_what_is_missing_is_built_in_one_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, other = POLICY.default(PROBLEM), POLICY.default(BACKWARD)
    built: list[Any] = []
    monkeypatch.setattr(obtain, "at_hand", lambda c, arch, settings: c if c == mine else None)
    monkeypatch.setattr(obtain, "find_toolchain", lambda settings: "nvcc")
    monkeypatch.setattr(
        obtain, "build", lambda kernels, target, **_: built.append((kernels, target))
    )
    obtain.build_ahead([mine, other], "80")
    ((kernels, target),) = built
    assert ([kernel.name for kernel in kernels], target) == ([other.name], BuildTarget(arch="80"))
    obtain.build_ahead([mine], "80")

    def gone(settings: Any) -> None:
        raise ToolchainError("no nvcc")

    monkeypatch.setattr(obtain, "find_toolchain", gone)
    obtain.build_ahead([other], "80")
    assert len(built) == 1


# --- a callable -----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Attention on CPU tensors as on a GPU's, with a parameter before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        options = (None, False, False, "")
        return {"o": differentiable_attention(x * self.scale, x, x, options, False, False), "n": 3}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("backward", [False, True])
def test_the_calls_of_a_model_are_noted_and_not_computed(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    batches: list[list[planning.Asked]] = []
    monkeypatch.setattr(warming, "_build_together", batches.append)
    layer, x = Layer(), torch.randn(1, 2, 7, 16, dtype=torch.float16)
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        problems = warming.warmup(layer, x, backward=backward)
        directions = ["forward", "backward"][: 1 + backward]
        assert [problem.direction for problem in problems] == directions
        assert [(asked.problem, asked.device) for asked in batches[0]] == [
            (p, CPU) for p in problems
        ]
        assert [problem for problem, *_ in fake.asked] == list(problems)
        assert fake.read("launch_count") == 0
        assert layer.scale.grad is None
        layer(x)  # a call afterwards has a kernel
        assert fake.read("launch_count") == 1
    assert not planning._RECORDED


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_parameters_that_a_callable_finds_by_itself_are_differentiated(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "_build_together", lambda wanted: None)
    layer, x = Layer(), torch.randn(1, 2, 7, 16, dtype=torch.float16)
    before = torch.ones((), requires_grad=True)
    between = before.exp()  # its graph is the caller's, and stays
    with serve_fakes(fake_kernel, monkeypatch):
        problems = warming.warmup(lambda x, y: (layer(x), y.half()), x, between, backward=True)
    assert [problem.direction for problem in problems] == ["forward", "backward"]
    assert layer.scale.grad is None
    between.backward()
    assert before.grad is not None


def test_a_backward_pass_needs_something_to_differentiate() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert warming.warmup(lambda: weight, backward=True) == ()
    assert weight.grad is None
    for result, words in (
        (torch.ones(3), r"got Tensor \[3\]"),
        (None, "got None"),
        ([], r"got \["),
    ):
        with pytest.raises(UnsupportedArgumentError, match=f"backward=True needs .*{words}"):
            warming.warmup(lambda result=result: result, backward=True)


@pytest.mark.parametrize("of_torch", [AssertionError("no CUDA"), RuntimeError("no driver")])
def test_a_file_is_read_first_and_then_wants_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, of_torch: Exception
) -> None:
    def current_device() -> int:
        raise of_torch

    monkeypatch.setattr(launch, "current_device", current_device)
    with pytest.raises(UnsupportedArchitectureError, match=r"warmup loads kernels.* no "):
        warming.warmup(file)
    with pytest.raises(FileNotFoundError, match="absent"):
        warming.warmup(tmp_path / "absent.jsonl")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("{")
    with pytest.raises(UnsupportedProblemError, match=r"damaged\.jsonl:1: it must be JSON"):
        warming.warmup(damaged)
