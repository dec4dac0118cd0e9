"""Documents and prefixes: the function against dense masks, its checks, problems, candidates and costs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.arch import A100, H100
from attention_autotuner.core import spans
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError
from attention_autotuner.kernels.cost_model import estimate
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.shared.schedule import tiles_of
from attention_autotuner.operations.attention.modified import Modifiers
from attention_autotuner.operations.attention.modified_inputs import ways
from attention_autotuner.tuning.class_pools import small_problem
from attention_autotuner.tuning.lookup import distance
from tests.fake_kernels import params_of_launches, serve_fakes
from tests.numerics.spans import BASE, KINDS, dense_mask

SEQLEN = 17
IDS = torch.tensor([[-3] * 4 + [0] + [7] * 12, [5] * 9 + [6, 7] + [9] * 6], dtype=torch.int32)
PREFIXES = torch.tensor([3, 11], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.0, 1.0])
VALUES: dict[str, dict[str, Any]] = {
    "documents": {"document_ids": IDS},
    "causal documents": {"document_ids": IDS, "causal": True},
    "documents in windows": {"document_ids": IDS, "window_size": (3, 2)},
    "prefix": {"prefix_lens": PREFIXES, "causal": True},
    "top left": {"prefix_lens": PREFIXES, "causal": True, "causal_alignment": "top_left"},
    "all": {
        "prefix_lens": PREFIXES,
        "document_ids": IDS,
        "causal": True,
        "window_size": (5, -1),
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
        "sinks": torch.tensor([-1.0, 3.0, 0.0, -9.0]),
    },
}


def make(seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, seqlen_q, 16), (2, 2, seqlen_k, 16), (2, 2, seqlen_k, 24))
    return [torch.randn(s, generator=generator).half().requires_grad_() for s in shapes]


def by_mask(options: dict[str, Any], seqlen_q: int = SEQLEN) -> dict[str, Any]:
    """The same options with the dense mask of the same meaning."""
    kept = {n: x for n, x in options.items() if n in ("softcap", "alibi_slopes", "sinks")}
    return {**kept, "attn_mask": dense_mask(seqlen_q, SEQLEN, **options)[:, None]}


@pytest.mark.parametrize(
    ("name", "seqlen_q"),
    [*product(VALUES, [SEQLEN]), ("prefix", 9), ("prefix", 23), ("top left", 9)],
)
def test_results_and_gradients_are_those_of_the_dense_mask(name: str, seqlen_q: int) -> None:
    leaves, options = make(seqlen_q), VALUES[name]
    results = [
        flash_attn_func(*leaves, return_lse=True, **of)
        for of in (options, by_mask(options, seqlen_q))
    ]
    torch.manual_seed(0)
    of_o, of_lse = (torch.randn_like(x) for x in results[0])
    seen = results[1][1].isfinite()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)
    losses = [(o * of_o).sum() + (lse * of_lse)[seen].sum() for o, lse in results]
    gradients = [torch.autograd.grad(loss, leaves, create_graph=True) for loss in losses]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=5e-3)
    seconds = [torch.autograd.grad(of[0].float().square().sum(), leaves[1]) for of in gradients]
    torch.testing.assert_close(*(x[0] for x in seconds), atol=0.1, rtol=0.05)


def test_layouts_compilation_and_key_bounds() -> None:
    q, k, v = (x.detach() for x in make())
    options = VALUES["all"]
    expected = flash_attn_func(q, k, v, **options)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned, layout="bshd", **options).transpose(1, 2), expected)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, **options), expected)
    leaves = make()
    for x in torch.autograd.grad(compiled(*leaves, **options).sum(), leaves):
        assert x.any()
    ends = torch.tensor([17, 9], dtype=torch.int32)
    bounded = flash_attn_func(q, k, v, document_ids=IDS, seqlens_k=ends)
    mask = dense_mask(SEQLEN, SEQLEN, document_ids=IDS) & (
        torch.arange(SEQLEN) < ends[:, None, None]
    )
    torch.testing.assert_close(bounded, flash_attn_func(q, k, v, attn_mask=mask[:, None]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"document_ids": IDS.long()}, "document_ids must be torch.int32, got torch.int64"),
    ({"document_ids": IDS[:1]}, r"document_ids must have the shape \(2, 17\), got \(1, 17\)"),
    ({"document_ids": IDS.T.contiguous().T}, "document_ids must be contiguous"),
    (
        {"document_ids": IDS.flip(1).contiguous()},
        r"document_ids must never decrease .* \[\[0, 11\]\]",
    ),
    ({"document_ids": [1]}, "arrays of one library"),
    ({"prefix_lens": PREFIXES}, "prefix_lens is for causal attention, got causal=False"),
    ({"prefix_lens": PREFIXES[:1], "causal": True}, r"prefix_lens must have the shape \(2,\)"),
    (
        {"prefix_lens": PREFIXES, "causal": True, "window_size": (3, 0)},
        r"prefix_lens needs a window without a right bound, got window_size=\(3, 0\)",
    ),
    ({"prefix_lens": PREFIXES.to("meta"), "causal": True}, "must be on q's device cpu, got meta"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_typed_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedArgumentError, UnsupportedProblemError), match=message):
        flash_attn_func(*make(), **change)


def test_documents_need_as_many_queries_as_keys() -> None:
    with pytest.raises(UnsupportedProblemError, match="as many queries as keys, got 9 and 17"):
        flash_attn_func(*make(9), document_ids=IDS)


# --- problems, candidates and costs ------------------------------------------------------------------


def test_problems_of_documents_and_prefixes() -> None:
    problem = replace(BASE, **KINDS["both"])
    assert Problem(**json.loads(json.dumps(values_of(problem)))) == problem
    assert problem.compiled_modifications[-1] == "spans"
    assert problem.describe().endswith("sinks prefix-lens document-ids 3 documents")
    assert "documents" not in values_of(Problem())
    bucket = problem.bucketed()
    assert (bucket.documents, bucket.seqlen_k) == (4, 256)
    assert distance(bucket, replace(bucket, documents=9)) == pytest.approx(1)
    assert distance(bucket, replace(bucket, modifications=(), documents=0)) is None
    for bad, message in (
        ({"seqlen_q": 9}, "document_ids need as many queries as keys, got 9 and 203"),
        ({"causal": False}, "prefix_lens is for causal attention, got causal=False"),
        (
            {"window_size": (40, 0)},
            r"prefix_lens needs a window without a right bound, got window_size=\(40, 0\)",
        ),
        ({"modifications": ()}, "documents is a number of documents .*, got 3"),
        ({"packed_rows": (9, 9)}, "packed sequences take no prefix_lens"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            replace(problem, **bad)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("policy", [A100(), H100()], ids=lambda policy: policy.name)
def test_one_kernel_serves_all_spans(policy: Any, direction: Any) -> None:
    problems = [
        replace(BASE, direction=direction, **{**KINDS["documents"], **change})
        for change in ({}, {"documents": 1}, {"documents": 0, **KINDS["prefix"]}, {"causal": True})
    ]
    chosen = {policy.default(problem).name.replace("_lpt", "_raster") for problem in problems}
    assert len(chosen) == 1
    candidate = policy.default(problems[0])
    native = policy.name == "H100"
    assert candidate.kernel == (
        f"{'attention' if native else 'scores'}_{direction}_sm{90 if native else 80}"
    )
    assert "_spans_" in candidate.name
    assert small_problem(candidate).compiled_modifications == candidate.modifications
    families = {x.family for x in policy.legal(problems[0])}
    assert families == ({"sm80", "sm90"} if native else {"sm80"})


def test_the_verifier_knows_them() -> None:
    problem = replace(BASE, **KINDS["both"])
    odd = problem.semantics.verified_with(problem, seqlen_q=37, seqlen_k=53, fewer_keys=9)
    assert {(x.seqlen_q == x.seqlen_k, x.causal) for x in odd} == {(True, True)}
    ordinary, ragged = (
        way.inputs(problem, seed=0, device=torch.device("cpu")).tensors for way in ways(problem)
    )
    assert ordinary["document_ids"].unique().numel() == 3
    assert ragged["document_ids"].diff(dim=1).min() == 0
    assert ragged["document_ids"].min() < 0
    assert not torch.equal(ordinary["prefix_lens"], ragged["prefix_lens"])


@pytest.mark.parametrize(("kind", "window"), product(KINDS, [(-1, -1), (20, -1)]))
def test_costs_and_flops_count_what_spans_leave(kind: str, window: tuple[int, int]) -> None:
    problem = replace(BASE, **{**KINDS[kind], "window_size": window})
    if kind == "prefix":
        problem = replace(problem, seqlen_q=150)
    ends = spans.document_ends(problem)
    ids = torch.bucketize(torch.arange(problem.seqlen_q), torch.tensor(ends[1:-1]), right=True)
    options: dict[str, Any] = {"causal": problem.causal, "window_size": window}
    if "document_ids" in problem.modifications:
        options["document_ids"] = ids[None].int()
    if "prefix_lens" in problem.modifications:
        options["prefix_lens"] = torch.tensor([spans.prefix_of(problem)])
    (seen,) = dense_mask(problem.seqlen_q, problem.seqlen_k, **options)
    plain = replace(problem, causal=False, modifications=(), documents=0, window_size=(-1, -1))
    pairs = problem.seqlen_q * problem.seqlen_k
    assert problem.flops == plain.flops * int(seen.sum()) // pairs
    for by_queries, mask in ((True, seen), (False, seen.T)):
        tiles = [sum(bool(part.any()) for part in rows.split(16, dim=1)) for rows in mask.split(32)]
        expected = tiles[::-1] if by_queries and problem.causal else tiles
        assert tiles_of(problem, block=32, step=16, by_queries=by_queries) == tuple(expected)


@pytest.mark.parametrize(
    "kernel", [name for name in KERNELS if name.startswith(("scores_", "att"))]
)
def test_documents_are_estimated_faster(kernel: str) -> None:
    family = KERNELS[kernel]
    full = Problem(
        direction=next(iter(family.serves))[1], causal=True, seqlen_q=8192, seqlen_k=8192
    )
    problem = replace(full, modifications=("document_ids",))
    knobs: Any = family.default(problem, H100().spec) if family.serves_problem(problem) else None
    if knobs is None:
        pytest.skip(f"{kernel} takes no softmax")
    times = [
        estimate(x, H100().default(x).of(x, knobs), H100().spec).us
        for x in (problem, replace(problem, documents=1))
    ]
    assert times[1] / times[0] > 3.0


# --- launch plans, over a kernel that runs on the host -----------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_ids_and_prefixes_reach_the_params(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        seen = params_of_launches(monkeypatch)
        for ids in (IDS, IDS + 1):  # values build and choose nothing
            modifiers = Modifiers(prefix_lens=PREFIXES, document_ids=ids)
            q, k, v = (x.detach() for x in make())
            attention_plan.attention_forward(
                q, k, v, (None, True, False, ""), True, modifiers=modifiers
            )
        problems = [problem for problem, *_ in fake.asked]
    assert [problem.modifications for problem in problems] == [("prefix_lens", "document_ids")]
    assert all(params.document_ids and params.prefix_lens for params in seen)


@pytest.mark.parametrize(
    ("direction", "dim", "words"),
    [
        ("forward", 128, "g3n64_scores_first_optimistic_turns"),
        ("forward", 64, "g4n64_scores_first_optimistic_turns"),
        ("backward", 128, "t3x2_keys1stored_raster_persistent_early_gathered_dynamic"),
        ("backward", 64, "own1stored_raster_persistent_early_gathered_dynamic"),
    ],
)
def test_documents_have_defaults_for_few_steps(direction: Any, dim: int, words: str) -> None:
    # As raced on an H200, at 16 documents of 16k and 4 of 4k.
    for length in (4096, 16384):
        sizes: Any = {"seqlen_q": length, "seqlen_k": length, "dim_qk": dim, "dim_v": dim}
        problem = Problem(
            direction=direction, causal=True, modifications=("document_ids",), **sizes
        )
        assert words in H100().default(problem).name
