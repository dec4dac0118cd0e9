"""Training on a GPU: whole steps compiled, captured and replayed, each compared with the same eager step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.api.shared.replay import Replays
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import NotWarmError
from tests import gradients
from tests.numerics.kernel_pool import KernelPool

pytestmark = pytest.mark.gpu

BLOCK = Problem(
    dtype="bf16",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=192,
    seqlen_k=192,
    dim_qk=64,
    dim_v=64,
    causal=True,
)
# Problems whose default kernels these tests run.
PROBLEMS = (BLOCK, replace(BLOCK, direction="backward"))
COLD = replace(BLOCK, dtype="fp16", dim_qk=24, dim_v=24)  # of a class that no other test trains
LENGTHS = (192, 97, 256, 333)
Run = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    torch.compiler.reset()
    gc.collect()  # a CUDA graph of an earlier test that is freed during a capture would end the capture
    with settings.override(mode="off"):
        yield
    torch.compiler.reset()


def make_input(length: int = 192, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, length, 4 * 64)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def backward_of(block: gradients.Block, run: Run, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every parameter's gradient."""
    block.zero_grad()
    loss = gradients.loss_of(run, x)
    torch.autograd.backward(loss)
    return [
        loss.detach().clone(),
        *(p.grad.clone() for p in block.parameters() if p.grad is not None),
    ]


def assert_alike(computed: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal up to the order of sums and to fusion by a compiler: a few units in bf16's last place."""
    assert len(computed) == len(expected) == 5
    for mine, theirs in zip(computed, expected, strict=True):
        largest = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=2e-2 * largest)


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_block_compiles_into_one_graph(backend: str) -> None:
    block = gradients.make_block(device="cuda")
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = make_input()
    assert_alike(backward_of(block, compiled, x), backward_of(block, block, x))


def test_later_steps_of_a_graph_go_beside_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    block = gradients.make_block(device="cuda")
    compiled = torch.compile(block, fullgraph=True)
    for _ in range(3):
        first = backward_of(block, compiled, make_input())
    seen: list[object] = []
    find = Replays.find

    def look(replays: Replays, *arguments: Any) -> object:
        seen.append(find(replays, *arguments))
        return seen[-1]

    monkeypatch.setattr(Replays, "find", look)
    assert_alike(backward_of(block, compiled, make_input()), first)
    assert len(seen) == 2
    assert None not in seen


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_output_and_lse_both_carry_gradients_in_a_graph(backend: str) -> None:
    tensors = gradients.make(BLOCK, device="cuda")

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o, lse = flash_attn_func(q, k, v, causal=True, softmax_scale=0.2, return_lse=True)
        return o.float().sum() + lse.exp().sum()

    computed = torch.compile(model, fullgraph=True, backend=backend)(*tensors)
    expected = model(*tensors)
    torch.testing.assert_close(computed, expected, rtol=1e-5, atol=0.0)
    for mine, theirs in zip(
        torch.autograd.grad(computed, tensors), torch.autograd.grad(expected, tensors), strict=True
    ):
        # Sums in another order differ in the last bits, which is much for gradients near zero.
        largest = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2 * largest)


def test_new_lengths_recompile_nothing() -> None:
    block = gradients.make_block(device="cuda")
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for length in LENGTHS:
        x = make_input(length)
        assert_alike(backward_of(block, compiled, x), backward_of(block, block, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_reduced_overhead() -> None:
    block = gradients.make_block(device="cuda")
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):  # warmed up, captured, and then replayed
        torch.compiler.cudagraph_mark_step_begin()
        x = make_input(seed=seed)
        assert_alike(backward_of(block, compiled, x), backward_of(block, block, x))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


# --- CUDA graphs ----------------------------------------------------------------------------------


class Trainer:
    """Training steps of one block with AdamW, on an input at a fixed address."""

    def __init__(self, block: gradients.Block) -> None:
        self.block = block
        self.optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3, capturable=True)
        self.x = make_input()

    def step(self) -> torch.Tensor:
        """Forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = gradients.loss_of(self.block, self.x)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss.detach()


def test_a_whole_step_is_captured() -> None:
    trainer = Trainer(gradients.make_block(device="cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            trainer.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager = Trainer(copy.deepcopy(trainer.block))
    eager.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    graph = torch.cuda.CUDAGraph()
    trainer.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = trainer.step()
    for seed in range(4):
        x = make_input(seed=seed)
        trainer.x.copy_(x)
        eager.x.copy_(x)
        graph.replay()
        torch.testing.assert_close(loss, eager.step(), rtol=1e-2, atol=0.0)
    for mine, theirs in zip(trainer.block.parameters(), eager.block.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=1e-2)


def test_graphed_callables_train() -> None:
    block = gradients.make_block(device="cuda")
    eager = copy.deepcopy(block)
    sample = make_input().requires_grad_()
    graphed = cast("Run", torch.cuda.make_graphed_callables(block, (sample,)))
    for seed in range(3):
        x = make_input(seed=seed).requires_grad_()
        assert_alike(backward_of(block, graphed, x), backward_of(eager, eager, x))


def test_a_cold_backward_under_capture_is_refused_and_leaves_the_capture_alone() -> None:
    cold = gradients.make(COLD, device="cuda")
    warm = gradients.make(BLOCK, device="cuda")
    flash_attn_func(*cold, causal=True)  # the forward alone
    expected = torch.autograd.grad(flash_attn_func(*warm, causal=True).sum(), warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attn_func(*cold, causal=True)
        with pytest.raises(NotWarmError, match="outside graph capture"):
            torch.autograd.grad(o, cold, torch.ones_like(o))
        computed = torch.autograd.grad(flash_attn_func(*warm, causal=True).sum(), warm)
    graph.replay()
    torch.cuda.synchronize()
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_a_deterministic_backward_is_captured_and_gives_the_same_bits(causal: bool) -> None:
    """Without a mask CTAs wait in a ring on Hopper, in a cooperative launch; with one they claim blocks of keys."""
    problem = replace(BLOCK, seqlen_q=330, seqlen_k=1100, dim_qk=128, dim_v=128)
    tensors = gradients.make(problem, device="cuda")

    def gradient() -> tuple[torch.Tensor, ...]:
        o = flash_attn_func(*tensors, causal=causal, deterministic=True)
        return torch.autograd.grad(o, tensors, torch.ones_like(o))

    expected = gradient()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        computed = gradient()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, computed, expected))


def test_a_graph_may_hold_a_new_shape_of_a_warm_backward() -> None:
    first = gradients.make(BLOCK, device="cuda")
    torch.autograd.grad(flash_attn_func(*first, causal=True).sum(), first)
    problem = replace(BLOCK, batch=1, seqlen_q=77, seqlen_k=170)
    tensors = gradients.make(problem, device="cuda")
    ones = torch.ones((1, 4, 77, 64), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        computed = torch.autograd.grad(flash_attn_func(*tensors, causal=True), tensors, ones)
    graph.replay()
    torch.cuda.synchronize()
    assert not gradients.errors_of(computed, ones, None, tensors, causal=True)
