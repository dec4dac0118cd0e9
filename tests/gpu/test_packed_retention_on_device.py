"""Packed retention on a GPU: kernels, calls, graphs, and what a change of lengths builds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.registry import KERNELS
from tests.gpu.quiet import nothing_built_or_waited_for
from tests.gpu.timing import milliseconds
from tests.launchers import verify
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.packed_sequences import LENGTHS, RETENTION, ends_of

pytestmark = pytest.mark.gpu

retention_func: Any = attention_autotuner.retention_func  # as an untyped caller sees it
DIMS: tuple[dict[str, Any], ...] = (
    {"dim_qk": 64, "dim_v": 64},
    {"dim_qk": 128, "dim_v": 128, "dtype": "bf16"},
    {"dim_qk": 72, "dim_v": 80, "alignment_bytes": 2},
    {"dim_qk": 256, "dim_v": 512, "dtype": "bf16"},
)
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 1, "packed_rows": (1021, 1021), "seqlen_q": 1021, "seqlen_k": 1021},
    {"batch": 300, "packed_rows": (6000, 6000), "seqlen_q": 3000, "seqlen_k": 3000},
)
CHECKED = [
    replace(RETENTION, direction=direction, **dims)
    for dims in DIMS
    for direction in ("forward", "backward")
]
CALLED = [
    replace(
        RETENTION,
        dtype="bf16",
        dim_qk=dim,
        dim_v=dim,
        direction=direction,
        packed_rows=(rows, rows),
    )
    for dim in (64, 128)
    for rows in (401, 0)
    for direction in ("forward", "backward")
]
PROBLEMS = CALLED


@dataclass(frozen=True)
class Cut:
    """The default kernel of family sm80 for a problem, with super-chunks of so many tokens."""

    problem: Problem
    super_chunk: int

    def candidate(self, present: Policy) -> Candidate:
        """The kernel."""
        knobs: Any = KERNELS["chunks_sm80"].default(self.problem, present.spec)
        return Candidate.of(self.problem, replace(knobs, super_chunk=self.super_chunk))

    def __str__(self) -> str:
        return f"{self.super_chunk} {self.problem.describe()}"


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("cut", [Cut(x, size) for x in CHECKED for size in (0, 256)], ids=str)
def test_kernels(pool: KernelPool, cut: Cut, device: torch.device) -> None:
    kernel, problem = pool.kernel(cut.candidate(pool.present)), cut.problem
    for shape in SHAPES:
        # Three ways: plainly, from states to gamma, and with sequences of length 0 and 1.
        outcome = verify(
            replace(problem, **shape), kernel, deterministic=True, seeds=(0, 1, 2), device=device
        )
        assert outcome.ok, outcome


def make(
    rows: int, count: int, device: torch.device, heads: int = 4, heads_kv: int = 2, dim: int = 64
) -> list[torch.Tensor]:
    """q, k, v, gamma and a state for each sequence."""
    generator = torch.Generator(device=device).manual_seed(rows)
    shapes = ((1, heads, rows, dim), (1, heads_kv, rows, dim), (1, heads_kv, rows, dim))
    named: Any = {"device": device, "generator": generator}
    three = [torch.randn(shape, dtype=torch.bfloat16, **named) for shape in shapes]
    gamma = 1 - 2.0 ** (-4 - torch.arange(heads, dtype=torch.float32, device=device))
    state = torch.randn((count, heads, dim, dim), **named)
    return [x.requires_grad_() for x in (*three, gamma, state)]


def test_a_batch_is_its_sequences(device: torch.device) -> None:
    lengths = [*LENGTHS[:6], 0, 1]
    ends, leaves = ends_of(lengths, device), make(sum(lengths), len(lengths), device)
    q, k, v, gamma, states = leaves
    named = {"cu_seqlens": ends, "max_seqlen": max(lengths)}
    results = retention_func(q, k, v, gamma, initial_state=states, **named)
    directions = [torch.randn_like(x) for x in results]
    gradients = torch.autograd.grad(results, leaves, directions)
    of_gamma = torch.zeros_like(gamma)
    for b, (begin, end) in enumerate(pairwise(ends.tolist())):
        rows = slice(begin, end)
        alone = [x[:, :, rows].detach().requires_grad_() for x in (q, k, v)]
        alone += [x.detach().requires_grad_() for x in (gamma, states[b, None])]
        o, state = retention_func(*alone[:4], initial_state=alone[4])
        torch.testing.assert_close(results[0][:, :, rows], o, atol=0.2, rtol=0.03)
        torch.testing.assert_close(results[1][b, None], state, atol=0.3, rtol=0.02)
        seen = [directions[0][:, :, rows], directions[1][b, None]]
        others = torch.autograd.grad((o, state), alone, seen)
        of_gamma += others[3]
        for ours, theirs in zip(gradients[:3], others, strict=False):
            atol = 0.03 * float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(ours[:, :, rows], theirs, atol=atol, rtol=0.03)
        atol = 0.02 * float(others[4].abs().max())
        torch.testing.assert_close(gradients[4][b, None], others[4], atol=atol, rtol=0.03)
    atol = 0.03 * float(of_gamma.abs().max())
    torch.testing.assert_close(gradients[3], of_gamma, atol=atol, rtol=0.05)


def test_sequences_can_be_cut_anywhere(device: torch.device) -> None:
    lengths, first = [700, 31, 0, 1300], [300, 31, 0, 77]
    ends = ends_of(lengths, device)
    q, k, v, gamma, state = (x.detach() for x in make(sum(lengths), len(lengths), device))
    whole, final = retention_func(q, k, v, gamma, initial_state=state, cu_seqlens=ends)
    rest = [n - m for n, m in zip(lengths, first, strict=True)]
    starts = ends[:-1].tolist()
    middles = [start + n for start, n in zip(starts, first, strict=True)]
    for sizes, begins in ((first, starts), (rest, middles)):
        pairs = zip(begins, sizes, strict=True)
        rows = torch.cat([torch.arange(begin, begin + n, device=device) for begin, n in pairs])
        three = (x[:, :, rows] for x in (q, k, v))
        cut = {"cu_seqlens": ends_of(sizes, device), "max_seqlen": max(sizes)}
        o, state = retention_func(*three, gamma, initial_state=state, **cut)
        torch.testing.assert_close(o, whole[:, :, rows], atol=0.2, rtol=0.03)
    torch.testing.assert_close(state, final, atol=0.3, rtol=0.02)


def test_a_graph_follows_the_lengths(device: torch.device) -> None:
    q, k, v, gamma, state = (x.detach() for x in make(2048, 4, device))
    ends = ends_of([1000, 24, 1024, 0], device)

    def call() -> Any:
        named = {"cu_seqlens": ends, "max_seqlen": 2048}
        return retention_func(q, k, v, gamma, initial_state=state, **named)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = call()
    for lengths in ([1, 1, 1, 1], [0, 2048, 0, 0], [500, 600, 7, 100]):
        ends.copy_(ends_of(lengths, device))
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip((o, final), call(), strict=True):
            assert torch.equal(ours, theirs)
        assert not o[:, :, sum(lengths) :].any()


def test_no_composition_builds_or_waits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    for index, lengths in enumerate(([300, 20], [1], [5] * 77, LENGTHS)):
        ends, leaves = ends_of(lengths, device), make(sum(lengths), len(lengths), device)
        q, k, v, gamma, state = leaves
        named = {"cu_seqlens": ends, "max_seqlen": max(lengths)}
        with nothing_built_or_waited_for(monkeypatch) if index > 0 else nullcontext():
            o, final = retention_func(q, k, v, gamma, initial_state=state, **named)
            (o.sum() + final.sum()).backward()
        torch.cuda.synchronize()


@pytest.mark.parametrize("backward", [False, True])
def test_uneven_lengths_are_balanced(backward: bool, device: torch.device) -> None:
    """One sequence of half the rows among a hundred others: its states go from CTA to CTA, which equal ones need not.

    On an H200 a row takes 2.7 times as long forward and 3.4 backward.
    """
    times = []
    for lengths in ([16384, *[164] * 100], [328] * 100):
        ends = ends_of(lengths, device)
        q, k, v, *_ = make(sum(lengths), len(lengths), device, 16, 16, dim=128)
        leaves, longest = [q, k, v], max(lengths)

        def forward(q: Any = q, ends: Any = ends, k: Any = k, v: Any = v, n: int = longest) -> Any:
            return retention_func(q, k, v, output_final_state=False, cu_seqlens=ends, max_seqlen=n)[
                0
            ]

        o = forward()
        grad = torch.randn_like(o)

        def gradients(o: Any = o, leaves: Any = leaves, grad: Any = grad) -> Any:
            return torch.autograd.grad(o, leaves, grad, retain_graph=True)

        with torch.set_grad_enabled(backward):
            time = milliseconds(gradients if backward else forward, repeats=20, warm_ups=5)
        times.append(time / sum(lengths))
    assert times[0] / times[1] < 4.5
