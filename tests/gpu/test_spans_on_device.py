"""Documents and prefixes on a GPU: kernels of both families, the dense mask of the same meaning, graphs, time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func, settings
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.shared.schedule import tiles_of
from attention_autotuner.reference import check
from tests.gpu.quiet import nothing_built_or_waited_for
from tests.gpu.test_packed_sequences import D64, D128, D256, PASSES, Packed
from tests.gpu.timing import least_milliseconds
from tests.gpu.verifying import verify_all
from tests.numerics.kernel_pool import KernelPool
from tests.numerics.score_modifications import formula
from tests.numerics.spans import BASE, KINDS, dense_mask

pytestmark = pytest.mark.gpu

FAMILIES: Any = (
    *(("sm90", kind, D64) for kind in KINDS),
    ("sm90", "documents", D128),
    ("sm90", "both", D128),
    ("sm90", "prefix", {"dim_qk": 192, "dim_v": 128}),
    ("sm90", "documents", D256),
    ("sm90", "both", D256),
    *(("sm80", kind, D128) for kind in KINDS),
    ("sm80", "both", {"dim_qk": 72, "dim_v": 80, "alignment_bytes": 2}),
    ("sm80", "documents", D256),
)
CHECKED = [
    Packed(family, replace(BASE, **{**KINDS[kind], **named, **dims}))
    for family, kind, dims in FAMILIES
    for named in PASSES
    if kind != "bounded" or named["direction"] == "forward"
]
LENGTHS: tuple[dict[str, Any], ...] = (
    {},
    {"seqlen_q": 515, "seqlen_k": 515, "batch": 7},
    {"seqlen_q": 4096, "seqlen_k": 4096, "batch": 1, "causal": True},
)
SEQLEN, BATCH = 1021, 3
CALLS: dict[str, dict[str, Any]] = {
    "documents": {"ids": True},
    "causal documents": {"ids": True, "causal": True},
    "documents in a window": {"ids": True, "window_size": (100, -1), "causal": True},
    "prefix": {"prefix": True, "causal": True},
    "both": {"ids": True, "prefix": True, "causal": True, "window_size": (300, -1)},
}
TIMED = Problem(batch=1, seqlen_q=16384, seqlen_k=16384, causal=True)
# What the calls below ask for: their default kernels are built ahead.
NAMES: dict[str, Any] = {"modifications": ("document_ids",)}
DIRECTIONS: tuple[Any, ...] = ("forward", "backward")
PROBLEMS: list[Problem] = [
    replace(TIMED, direction=direction, **named)
    for direction in DIRECTIONS
    for named in (
        {},
        *(
            {**NAMES, "window_size": (left, -1), "dtype": dtype}
            for left, dtype in product((-1, 100), ("fp16", "bf16"))
        ),
    )
]


@pytest.fixture(autouse=True)
def _defaults(pool: KernelPool) -> Iterator[None]:
    """Serve default kernels, all of which are built."""
    with settings.override(mode="off"):
        yield


@pytest.mark.parametrize("spanned", CHECKED, ids=str)
def test_the_default_kernel(pool: KernelPool, spanned: Packed, device: torch.device) -> None:
    if spanned.family not in pool.present.families:
        pytest.skip(f"{pool.present.name} has no family {spanned.family}")
    made = spanned.candidate(pool.present)
    kernel = pool.kernel(made)
    problems = (replace(spanned.problem, **shape) for shape in LENGTHS)
    verify_all(problems, kernel, deterministic=made.deterministic, device=device)


def make(seqlen: int, dtype: torch.dtype, device: torch.device, heads: int = 8) -> list[Any]:
    generator = torch.Generator(device=device).manual_seed(seqlen)
    shapes = [(BATCH, n, seqlen, 128) for n in (heads, heads // 4, heads // 4)]
    named: Any = {"dtype": dtype, "device": device, "generator": generator}
    return [torch.randn(shape, **named).requires_grad_() for shape in shapes]


def spans_of(call: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The options of a call: one document, ordinary ones, and one for nearly each row; a prefix of each kind."""
    options = {name: x for name, x in call.items() if name not in ("ids", "prefix")}
    if "ids" in call:
        often = torch.tensor([[0.0], [0.004], [0.9]])
        torch.manual_seed(0)
        ids = (torch.rand(BATCH, SEQLEN) < often).cumsum(1, dtype=torch.int32)
        options["document_ids"] = ids.to(device)
    if "prefix" in call:
        prefixes = torch.tensor([0, 333, 2000], dtype=torch.int32)
        options["prefix_lens"] = prefixes.to(device)
    return options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_the_dense_mask(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    leaves, options = make(SEQLEN, dtype, device), spans_of(CALLS[name], device)
    seen = dense_mask(SEQLEN, SEQLEN, **options)[:, None]
    results = [flash_attn_func(*leaves, return_lse=True, **options)]
    leaves_of = [leaves]
    for of in (torch.float64, dtype):
        leaves_of.append([x.detach().to(of).requires_grad_() for x in leaves])
        results.append(formula(*leaves_of[-1], attn_mask=seen, dtype=of))
    grads = [torch.randn_like(x).double() for x in results[0]]
    sides = [
        [
            *(x.detach().double() for x in of),
            *torch.autograd.grad(
                sum((x.double() * g).sum() for x, g in zip(of, grads, strict=True)), by
            ),
        ]
        for of, by in zip(results, leaves_of, strict=True)
    ]
    for ours, exact, low in zip(*([x.double() for x in side] for side in sides), strict=True):
        comparison = check(ours, exact, low)
        assert comparison, comparison.reason


def test_a_graph_follows_documents_and_nothing_is_built_or_waited_for(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    q, k, v = (x.detach() for x in make(SEQLEN, torch.float16, device))
    ids = spans_of({"ids": True}, device)["document_ids"]

    def call() -> torch.Tensor:
        o: torch.Tensor = flash_attn_func(q, k, v, document_ids=ids, causal=True)
        return o

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    for other in (
        torch.zeros_like(ids),
        torch.arange(SEQLEN, device=device).int().expand(BATCH, -1),
    ):
        ids.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        with nothing_built_or_waited_for(monkeypatch):
            expected = call()
        assert torch.equal(o, expected)


@pytest.mark.parametrize("backward", [False, True])
def test_documents_pay(backward: bool, device: torch.device) -> None:
    leaves: list[Any] = [
        torch.randn(1, 16, 16384, 128, device=device, dtype=torch.float16).requires_grad_()
        for _ in range(3)
    ]

    def call_of(documents: int) -> Callable[[], Any]:
        ids = (torch.arange(16384, device=device) * documents // 16384).int()[None]
        call: Callable[[], Any] = partial(flash_attn_func, *leaves, causal=True, document_ids=ids)
        if backward:
            o = call()
            grad = torch.randn_like(o)
            call = partial(torch.autograd.grad, o, leaves, grad, retain_graph=True)
        return call

    whole, apart = least_milliseconds(call_of(1), call_of(16), repeats=10, warm_ups=3)
    whole, apart = whole / 10, apart / 10
    visited, tiles = (
        sum(tiles_of(replace(TIMED, **NAMES, documents=n), block=128, step=64, by_queries=True))
        for n in (16, 1)
    )
    assert apart <= 1.10 * whole * visited / tiles + 0.005
