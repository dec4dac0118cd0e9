"""Attention and its gradients under torch.compile: one graph, any length, and no more work than eagerly."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_compiler

from attention_autotuner import flash_attn_func
from attention_autotuner.api.attention import autograd
from attention_autotuner.api.attention import torch_op as library
from attention_autotuner.api.shared.torch_library import twin_of
from attention_autotuner.core.problem import Problem
from tests import gradients
from tests.fake_kernels import serve_fakes

PROBLEM = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=7, seqlen_k=5, dim_qk=16, dim_v=24)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A compiler that keeps the graphs it is given, forward and backward, and runs them as they are."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.modules.append(module)
        return make_boxed_compiler(lambda module, _: module.forward)(module, inputs)

    def calls(self, op: Any) -> list[tuple[Any, ...]]:
        """The arguments of every call of an op."""
        return [
            node.args for module in self.modules for node in module.graph.nodes if node.target is op
        ]


def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    o: torch.Tensor = flash_attn_func(q * 2, k, v, causal=True)
    return o.float().square().sum(-1)


def assert_gradients_agree(compiled: Callable[..., torch.Tensor], tensors: gradients.Three) -> None:
    results, expected = compiled(*tensors), layer(*tensors)
    torch.testing.assert_close(results, expected)
    for mine, theirs in zip(
        torch.autograd.grad(results.sum(), tensors),
        torch.autograd.grad(expected.sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_a_training_graph_computes_lse_once_and_an_inference_graph_never() -> None:
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs.backend)
    assert_gradients_agree(compiled, gradients.make(PROBLEM))
    (forward,) = graphs.calls(twin_of(library.FORWARD_OP))
    (backward,) = graphs.calls(twin_of(library.BACKWARD_OP))
    assert graphs.calls(library.FORWARD_OP) == graphs.calls(library.BACKWARD_OP) == []
    assert forward[3:] == (None, True, False, "", True, False, None, None)
    assert backward[7:] == (None, True, False, "", False)
    plain = Graphs()
    torch.compile(layer, fullgraph=True, backend=plain.backend)(
        *gradients.make(PROBLEM, requires_grad=False)
    )
    (forward,) = plain.calls(twin_of(library.FORWARD_OP))
    assert forward[3:] == (None, True, False, "", False, False, None, None)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=plain.backend)(*gradients.make(PROBLEM))
    assert plain.calls(twin_of(library.FORWARD_OP))[-1][7] is False


def test_the_graph_holds_no_scores() -> None:
    graphs = Graphs()
    problem = replace(PROBLEM, batch=1, heads_q=1, heads_kv=1, seqlen_q=97, seqlen_k=101)
    tensors = gradients.make(problem)
    torch.autograd.grad(
        torch.compile(layer, fullgraph=True, backend=graphs.backend)(*tensors).sum(), tensors
    )
    assert len(graphs.modules) == 2
    for module in graphs.modules:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                assert value.numel() < 97 * 101, node


@contextlib.contextmanager
def deterministic_algorithms(setting: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(setting)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_compiled_function_follows_torchs_setting() -> None:
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs.backend)
    tensors = gradients.make(PROBLEM)
    for setting in (False, True, False):
        with deterministic_algorithms(setting):
            torch.autograd.grad(compiled(*tensors).sum(), tensors)
    assert [call[11] for call in graphs.calls(twin_of(library.BACKWARD_OP))] == [False, True]


def test_new_lengths_recompile_nothing() -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 8, 13, 21):
        problem = replace(PROBLEM, seqlen_q=length, seqlen_k=length + 3)
        assert_gradients_agree(compiled, gradients.make(problem))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_transposed_inputs_and_a_gradient_of_their_own() -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    tensors = tuple(
        gradients.transposed(x.detach()).requires_grad_() for x in gradients.make(PROBLEM)
    )
    assert_gradients_agree(compiled, (tensors[0], tensors[1], tensors[2]))


def test_a_compiled_block_trains_as_the_block_itself() -> None:
    x = torch.randn(2, 9, 4 * 64, generator=torch.Generator().manual_seed(1)).half()

    def train(block: gradients.Block, run: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        optimizer = torch.optim.SGD(block.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = gradients.loss_of(run, x)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    eager, other = (gradients.make_block(device="cpu", dtype=torch.float16) for _ in range(2))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(train(eager, eager), train(other, compiled), rtol=1e-3, atol=0.0)


def beside_dispatcher(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The layer as it runs for plain tensors on a GPU."""
    o: torch.Tensor = autograd.differentiable_attention(
        q * 2, k, v, (None, True, False, ""), False, False
    )
    return o.float().square().sum(-1)


@pytest.mark.parametrize("function", [layer, beside_dispatcher])
def test_compiled_autograd_takes_the_backward_too(
    function: Callable[..., torch.Tensor],
    fake_kernel: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    tensors = gradients.make(PROBLEM)
    expected = torch.autograd.grad(layer(*tensors).sum(), tensors)
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        loss = function(*tensors).sum()
        with torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="aot_eager", fullgraph=True)
        ):
            results = torch.autograd.grad(loss, tensors)
        assert fake.read("launch_count", direction="backward") == 0  # the op was traced, not run
    for mine, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("error")
def test_gradients_of_key_bounds_compile_without_a_warning() -> None:
    def call(*tensors: torch.Tensor) -> Any:
        q, k, v, ends = tensors
        return flash_attn_func(q, k, v, seqlens_k=ends, causal=True)

    three = [torch.randn(2, 2, 6, 16).half().requires_grad_() for _ in range(3)]
    ends = torch.tensor([3, 6], dtype=torch.int32)
    o = torch.compile(call, backend="eager", fullgraph=True)(*three, ends)
    assert torch.equal(o, call(*three, ends))
    assert all(x.any() for x in torch.autograd.grad(o.sum(), three))
