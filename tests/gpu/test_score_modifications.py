"""Score modifications on a GPU: default kernels of both directions against the reference, gradients, graphs, time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.core.problem import Problem
from attention_autotuner.reference import check
from attention_autotuner.tuning.verify import verify
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.score_modifications import KINDS, SHAPES, formula

pytestmark = pytest.mark.gpu

DIMS: tuple[dict[str, Any], ...] = (
    {"dim_qk": 64, "dim_v": 64},
    {"dim_qk": 128, "dim_v": 128, "dtype": "bf16"},
    {"dim_qk": 192, "dim_v": 128},
    {"dim_qk": 256, "dim_v": 256, "dtype": "bf16"},
    {"dim_qk": 72, "dim_v": 80, "alignment_bytes": 2},
)
PASSES: tuple[dict[str, Any], ...] = (
    {"direction": "forward"},
    {"direction": "backward"},
    {"direction": "backward", "deterministic": True},
)
LENGTHS: tuple[dict[str, Any], ...] = (*SHAPES, {"seqlen_q": 515, "seqlen_k": 1021, "causal": True})
BASE = Problem(batch=2, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=333)


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("dims", DIMS, ids=lambda dims: f"d{dims['dim_qk']}")
@pytest.mark.parametrize("named", PASSES, ids=lambda named: "_".join(named))
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_kernel(
    pool: KernelPool, kind: str, named: dict[str, Any], dims: dict[str, Any], device: torch.device
) -> None:
    problem = replace(BASE, **KINDS[kind], **named, **dims)
    made = pool.present.default(problem)
    kernel = pool.kernel(made)
    for shape in LENGTHS:
        outcome = verify(
            replace(problem, **shape), kernel, deterministic=made.deterministic, device=device
        )
        assert outcome.ok, outcome


VALUES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (127, 0)},
    "softcap": {"softcap": 30.0},
    "softcap that bites": {"softcap": 0.5},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True, "window_size": (127, 0)},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients_against_fp64(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device, dtype=of)
        return x.requires_grad_()

    leaves = [normal(2, 8, 777, 128), normal(2, 2, 1021, 128), normal(2, 2, 1021, 128)]
    options: dict[str, Any] = dict(VALUES[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = 2.0 ** -torch.arange(1, 9, device=device).float()
    if "sinks" in options:
        leaves.append(normal(8, of=torch.float32))
        options["sinks"] = leaves[3]
    q, k, v = leaves[:3]
    results = flash_attn_func(q, k, v, causal=True, return_lse=True, **options)
    exact = formula(q, k, v, causal=True, **options)
    grads = [torch.randn_like(x) for x in results]
    losses = [
        [(x.double() * g.double()).sum() for x, g in zip(pair, grads, strict=True)]
        for pair in (results, exact)
    ]
    ours, refs = (torch.autograd.grad(loss[0] + loss[1], leaves) for loss in losses)
    pairs = [*zip(results, exact, strict=True), *zip(ours, refs, strict=True)]
    for out, ref in pairs:
        rounded = ref.to(dtype).double()  # one rounding, on top of what the comparison allows
        scale = float(ref.abs().max())
        low = rounded + torch.sign(rounded - ref) * 2e-3 * scale
        comparison = check(out.detach().double(), ref.detach().double(), low.detach())
        assert comparison, comparison.reason


def test_a_graph_follows_slopes_and_sinks(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 4, 256, 64, device=device, dtype=torch.float16) for _ in range(3))
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "causal": True}
    flash_attn_func(q, k, v, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attn_func(q, k, v, **options)
    slopes.mul_(2.0)
    sinks.add_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, flash_attn_func(q, k, v, **options))


def test_a_window_pays(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 16, 16384, 128, device=device, dtype=torch.float16) for _ in range(3))

    def time_of(**options: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            flash_attn_func(q, k, v, causal=True, **options)
        start.record()
        for _ in range(10):
            flash_attn_func(q, k, v, causal=True, **options)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    assert time_of() / time_of(window_size=(1023, 0)) > 4.0
