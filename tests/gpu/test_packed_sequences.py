"""Packed sequences on a GPU: kernels of both families, each sequence alone, graphs, builds, balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import attention_autotuner
from attention_autotuner import settings
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.attention import varlen
from attention_autotuner.arch import Policy
from attention_autotuner.core.candidate import Candidate, Family
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import registry
from tests.gpu.quiet import nothing_built_or_waited_for
from tests.gpu.timing import least_milliseconds
from tests.gpu.verifying import verify_all
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.packed_sequences import BASE, KINDS, LENGTHS, each_sequence, ends_of

pytestmark = pytest.mark.gpu

flash_attn_func: Any = attention_autotuner.flash_attn_func  # as an untyped caller sees it
flash_attn_varlen_func: Any = attention_autotuner.flash_attn_varlen_func
PASSES: tuple[dict[str, Any], ...] = (
    {"direction": "forward"},
    {"direction": "backward"},
    {"direction": "backward", "deterministic": True},
)
D64: dict[str, Any] = {"dim_qk": 64, "dim_v": 64}
D128: dict[str, Any] = {"dim_qk": 128, "dim_v": 128, "dtype": "bf16"}
D256: dict[str, Any] = {"dim_qk": 256, "dim_v": 256, "dtype": "bf16"}
FAMILIES: tuple[tuple[Family, str, dict[str, Any]], ...] = (
    ("sm90", "top_left", D64),
    ("sm90", "all", D64),
    ("sm90", "plain", D128),
    ("sm90", "causal", D128),
    ("sm90", "all", D128),
    ("sm90", "causal", {"dim_qk": 192, "dim_v": 128}),
    ("sm90", "all", {"dim_qk": 192, "dim_v": 192}),
    ("sm90", "causal", D256),
    ("sm80", "all", {"dim_qk": 72, "dim_v": 80, "alignment_bytes": 2}),
    ("sm80", "plain", D128),
    ("sm80", "causal", D256),
)
TOKENS: dict[str, Any] = {
    "batch": 7,
    "heads_q": 8,
    "seqlen_q": 4,
    "seqlen_k": 3000,
    "packed_rows": (17, 9000),
}
BESIDE_PROMPTS: dict[str, Any] = {**TOKENS, "seqlen_q": 200, "packed_rows": (216, 9000)}
OF_TOKENS: tuple[tuple[Family, str, dict[str, Any]], ...] = (
    ("sm90", "top_left", {**TOKENS, **D64}),
    ("sm90", "causal", {**TOKENS, **D128}),
    ("sm90", "all", {**TOKENS, **D128}),
    ("sm90", "causal", {**TOKENS, "dim_qk": 192, "dim_v": 128}),
    ("sm90", "all", {**TOKENS, **D256}),
    ("sm90", "causal", {**BESIDE_PROMPTS, **D128}),
    ("sm90", "all", {**BESIDE_PROMPTS, **D64}),
    ("sm80", "causal", {**TOKENS, **D128}),
    ("sm80", "all", {**TOKENS, "dim_qk": 72, "dim_v": 80, "alignment_bytes": 2}),
)
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 1, "packed_rows": (515, 1021), "seqlen_q": 515, "seqlen_k": 1021},
    {"batch": 300, "packed_rows": (4000, 3000), "seqlen_q": 1500, "seqlen_k": 30},
)
SHAPES_OF_TOKENS: tuple[dict[str, Any], ...] = (
    {},
    {"batch": 1, "packed_rows": (4, 20000), "seqlen_q": 4, "seqlen_k": 20000},
    {"batch": 2, "packed_rows": (4, 20100), "seqlen_q": 3, "seqlen_k": 20000, "heads_kv": 8},
    {"batch": 200, "packed_rows": (210, 3000), "seqlen_q": 4, "seqlen_k": 30},
    {"batch": 30, "packed_rows": (700, 8000), "seqlen_q": 500, "seqlen_k": 2000},
)


@dataclass(frozen=True)
class Packed:
    """A family's default kernel for a problem."""

    family: Family
    problem: Problem

    def candidate(self, present: Policy) -> Candidate:
        """The kernel; that of the policy where it has no such family."""
        families = (self.family,) if self.family in present.families else present.families
        defaults = (
            kernel.default(self.problem, present.spec)
            for kernel in registry.kernels_for(self.problem, families)
        )
        return Candidate.of(self.problem, next(filter(None, defaults)))

    def __str__(self) -> str:
        return f"{self.family} {self.problem.describe()}"


CHECKED = [
    Packed(family, replace(BASE, **KINDS[kind], **named, **dims))
    for family, kind, dims in FAMILIES
    for named in PASSES
]
CHECKED_TOKENS = [
    Packed(family, replace(BASE, **{**KINDS[kind], **sizes})) for family, kind, sizes in OF_TOKENS
]
# Of the calls, and of the sequences alone.
CHANGES: tuple[dict[str, Any], ...] = (
    *({"window_size": (left, -1), "packed_rows": n} for left in (-1, 99) for n in ((0, 0), (9, 9))),
    {"dim_qk": 128, "dim_v": 128},
)
CALLED = [
    replace(BASE, **{"causal": True, "dtype": "bf16", "dim_qk": 64, "dim_v": 64, **change, **named})
    for change in CHANGES
    for named in PASSES[:2]
]
PROBLEMS = CALLED


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("packed", [*CHECKED, *CHECKED_TOKENS], ids=str)
def test_the_default_kernel(pool: KernelPool, packed: Packed, device: torch.device) -> None:
    if packed.family not in pool.present.families:
        pytest.skip(f"{pool.present.name} has no family {packed.family}")
    made = packed.candidate(pool.present)
    kernel = pool.kernel(made)
    shapes = SHAPES_OF_TOKENS if packed in CHECKED_TOKENS else SHAPES
    problems = (replace(packed.problem, **shape) for shape in shapes)
    verify_all(problems, kernel, deterministic=made.deterministic, device=device)


def make(
    rows: int, device: torch.device, heads: int = 4, heads_kv: int = 2, dim: int = 64
) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(rows)
    shapes = ((rows, heads, dim), (rows, heads_kv, dim), (rows, heads_kv, dim))
    named: Any = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    return [torch.randn(shape, **named).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [(-1, -1), (99, 0)])
def test_a_batch_is_its_sequences(window: tuple[int, int], device: torch.device) -> None:
    lengths, options = [*LENGTHS[:6], 0, 1], {"causal": True, "window_size": window}
    ends, leaves = ends_of(lengths, device), make(sum(lengths), device)
    o, lse = flash_attn_varlen_func(
        *leaves, ends, ends, max(lengths), max(lengths), return_lse=True, **options
    )
    grad = torch.randn_like(o)
    gradients = torch.autograd.grad(o, leaves, grad)
    for _, rows, _ in each_sequence(ends, ends):
        alone = [x[rows][None].detach().requires_grad_() for x in leaves]
        o_alone, lse_alone = flash_attn_func(*alone, layout="bshd", return_lse=True, **options)
        torch.testing.assert_close(o[rows], o_alone[0], atol=0.02, rtol=0.02)
        torch.testing.assert_close(lse[:, rows], lse_alone[0], atol=1e-3, rtol=1e-3)
        others = torch.autograd.grad(o_alone, alone, grad[rows][None])
        for ours, theirs in zip(gradients, others, strict=True):
            torch.testing.assert_close(ours[rows], theirs[0], atol=0.06, rtol=0.03)


def test_warm_calls_are_replayed(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    ends, leaves = ends_of(LENGTHS[:6], device), make(sum(LENGTHS[:6]), device)
    longest = max(LENGTHS[:6])

    def call() -> list[torch.Tensor]:
        options = {"causal": True, "window_size": (99, 0), "return_lse": True}
        o, lse = flash_attn_varlen_func(*leaves, ends, ends, longest, longest, **options)
        return [o, lse, *torch.autograd.grad(o.float().square().sum(), leaves)]

    first = call()
    monkeypatch.setattr(varlen, "FORWARD_OP", None)  # the longer way
    for _ in range(2):
        for ours, theirs in zip(call(), first, strict=True):
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        monkeypatch.setattr(attention_plan, "backward_plan", None)  # nor one of its own any more


def test_a_graph_follows_the_lengths(device: torch.device) -> None:
    q, k, v = (x.detach() for x in make(2048, device))
    ends = ends_of([1000, 24, 1024, 0], device)

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn_varlen_func(q, k, v, ends, ends, 2048, 2048, causal=True)
        return out

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for lengths in ([1, 1, 1, 1], [0, 2048, 0, 0], [500, 600, 7, 100]):
        ends.copy_(ends_of(lengths, device))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, call())
        assert not o[sum(lengths) :].any()


def test_no_composition_builds_or_waits(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    for index, lengths in enumerate(([300, 20], [1], [5] * 77, LENGTHS)):
        ends, leaves = ends_of(lengths, device), make(sum(lengths), device)
        longest = max(lengths)
        with nothing_built_or_waited_for(monkeypatch) if index > 0 else nullcontext():
            o = flash_attn_varlen_func(*leaves, ends, ends, longest, longest, causal=True)
            o.sum().backward()
        torch.cuda.synchronize()


@pytest.mark.parametrize("backward", [False, True])
def test_uneven_lengths_are_balanced(backward: bool, device: torch.device) -> None:
    def call_of(lengths: list[int]) -> Callable[[], Any]:
        ends, longest = ends_of(lengths, device), max(lengths)
        # So many heads that a call takes the GPU longer than a busy host.
        leaves = make(sum(lengths), device, heads=64, heads_kv=64, dim=128)

        def forward() -> Any:
            return flash_attn_varlen_func(*leaves, ends, ends, longest, longest, causal=True)

        o = forward()
        grad = torch.randn_like(o)
        return (
            (lambda: torch.autograd.grad(o, leaves, grad, retain_graph=True))
            if backward
            else forward
        )

    batches = LENGTHS, [1664] * 9
    calls = [call_of(lengths) for lengths in batches]
    with torch.set_grad_enabled(backward):
        uneven, even = least_milliseconds(*calls, repeats=20, warm_ups=5)
    pairs = [sum(length * length for length in lengths) for lengths in batches]
    assert uneven / pairs[0] < 1.3 * even / pairs[1]
