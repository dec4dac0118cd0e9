"""Packed sequences: the function against a loop, its checks, problems, costs, and what a change of lengths builds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attention_autotuner
from attention_autotuner import flash_attn_func, retention_func
from attention_autotuner.api.attention import modified
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.shared import launch
from attention_autotuner.arch import A100, H100
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.packing import typical_lengths
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedArgumentError, UnsupportedProblemError
from attention_autotuner.kernels.legality import check
from attention_autotuner.kernels.shared.schedule import tiles_of
from attention_autotuner.operations.attention.modified import Modifiers
from attention_autotuner.tuning.class_pools import small_problem
from attention_autotuner.tuning.lookup import distance
from attention_autotuner.tuning.verify import reduced
from tests.fake_kernels import serve_fakes
from tests.numerics.packed_sequences import BASE, each_sequence, ends_of

flash_attn_varlen_func: Any = attention_autotuner.flash_attn_varlen_func  # untyped callers'
LENGTHS_Q, LENGTHS_K = [5, 0, 7, 1, 3, 9], [6, 2, 0, 4, 9, 2]
ENDS = (ends_of(LENGTHS_Q), ends_of(LENGTHS_K))
HEADS, SPARE = 4, 3  # rows behind the last sequence
SLOPES = torch.tensor([0.5, 0.25, 0.0, 1.0])
VALUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": True, "causal_alignment": "top_left", "softmax_scale": -0.3},
    "window": {"window_size": (2, 1)},
    "last keys": {"window_size": (2, 0)},
    "softcap": {"softcap": 1.5},
    "alibi of each sequence": {"alibi_slopes": SLOPES * torch.arange(1, 7)[:, None]},
    "all": {
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
        "bias": torch.linspace(-1.0, 1.0, HEADS * 5).view(HEADS, 5),
        "sinks": torch.tensor([-1.0, 3.0, 0.0, -9.0]),
        "window_size": (3, -1),
        "causal": True,
    },
}


def make(dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows_q, rows_k = sum(LENGTHS_Q) + SPARE, sum(LENGTHS_K) + SPARE
    shapes = ((rows_q, HEADS, 16), (rows_k, 2, 16), (rows_k, 2, 24))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def packed(*three: Any, **options: Any) -> Any:
    """The function, of the lengths of these tests."""
    return flash_attn_varlen_func(*three, *ENDS, max(LENGTHS_Q), max(LENGTHS_K), **options)


def looped(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one sequence after the other."""
    slopes = options.pop("alibi_slopes", None)
    o, lse = q.new_zeros(len(q), HEADS, 24), torch.full((HEADS, len(q)), -torch.inf)
    if "sinks" in options:
        lse = options["sinks"][:, None].repeat(1, len(q))
    pieces = []
    for b, rows, keys in each_sequence(*ENDS):
        if slopes is not None:
            options["alibi_slopes"] = slopes[b] if slopes.dim() == 2 else slopes
        tensors = (q[rows][None], k[keys][None], v[keys][None])
        pieces.append(flash_attn_func(*tensors, layout="bshd", return_lse=True, **options))
    end = sum(LENGTHS_Q)
    return (
        torch.cat([*(x[0] for x, _ in pieces), o[end:]]),
        torch.cat([*(x[0] for _, x in pieces), lse[:, end:]], dim=1),
    )


@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients_are_those_of_a_loop(name: str) -> None:
    leaves = [x.requires_grad_() for x in make()]
    options = dict(VALUES[name])
    for learned in {"sinks", "bias"} & set(options):
        options[learned] = options[learned].clone().requires_grad_()
        leaves.append(options[learned])
    results = [packed(*leaves[:3], return_lse=True, **options), looped(*leaves[:3], **options)]
    torch.manual_seed(0)
    of_o, of_lse = (torch.randn_like(x) for x in results[0])
    seen = results[0][1].isfinite() & (torch.arange(len(of_o)) < sum(LENGTHS_Q))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    losses = [(o * of_o).sum() + (lse * of_lse)[seen].sum() for o, lse in results]
    gradients = [torch.autograd.grad(loss, leaves) for loss in losses]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    o = packed(*leaves[:3], **options)
    assert torch.equal(o, results[0][0])
    assert o.is_contiguous()


def test_arrays_with_a_bias_are_taken() -> None:
    named = {"bias": VALUES["all"]["bias"], "cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1]}
    tensors = dict(zip("qkv", make(), strict=True)) | named
    lengths = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    o = flash_attn_varlen_func(**{name: x.numpy() for name, x in tensors.items()}, **lengths)
    assert isinstance(o, np.ndarray)
    assert np.array_equal(o, flash_attn_varlen_func(**tensors, **lengths).numpy())


def test_the_ops_pass_opcheck_and_compile() -> None:
    q, k, v = (x.transpose(0, 1)[None].requires_grad_() for x in make())
    call = (q, k, v, None, True, False, "", False, 3, -1, 0.0, SLOPES, None, SLOPES, None, None)
    table = VALUES["all"]["bias"].clone().requires_grad_()
    torch.library.opcheck(modified.FORWARD_OP, (*call, *ENDS, 9, 9, table))
    three = make()
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*three, **VALUES["all"]), packed(*three, **VALUES["all"]))


def test_compiled_calls_follow_lengths_and_numbers() -> None:
    def call(q: torch.Tensor, ends: torch.Tensor, most: int, number: int) -> torch.Tensor:
        o = flash_attn_varlen_func(q, q, q, ends, ends, most, most, softcap=number, causal=True)
        return o + retention_func(q[None], q[None], q[None], scale=number)[0][0]

    q = torch.randn(9, 4, 8, generator=torch.Generator().manual_seed(1)).half()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for most, number in ((5, 10), (7, 20), (6, 30)):
        ends = torch.tensor([0, 9 - most, 9], dtype=torch.int32)
        assert torch.equal(compiled(q, ends, most, number), call(q, ends, most, number))


def test_gradients_can_be_differentiated_again() -> None:
    leaves = [x.requires_grad_() for x in make()]
    seconds = []
    for function in (packed, lambda *x, **named: looped(*x, **named)[0]):
        o = function(*leaves, causal=True, softcap=2.0)
        first = torch.autograd.grad(o.float().square().sum(), leaves, create_graph=True)
        loss = torch.stack([x.float().square().sum() for x in first]).sum()
        seconds.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_read(rows: int) -> None:
    q, k, v = torch.zeros(rows, 4, 16), torch.zeros(0, 2, 16), torch.zeros(0, 2, 24)
    ends = (ends_of([rows, 0]), ends_of([0, 0]))
    three = [x.half().requires_grad_() for x in (q, k, v)]
    o, lse = flash_attn_varlen_func(*three, *ends, rows, 0, sinks=SLOPES, return_lse=True)
    assert o.shape == (rows, 4, 24)
    assert not o.any()
    assert torch.equal(lse, SLOPES[:, None].expand(4, rows))
    o.sum().backward()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": ENDS[0].long()}, "cu_seqlens_q must be torch.int32, got torch.int64"),
    ({"cu_seqlens_k": ENDS[1][:-1]}, r"one shape \[sequences \+ 1\].* got Tensor \[6\] as cu_seq"),
    ({"cu_seqlens_k": ENDS[1][None]}, r"one shape .* got Tensor \[1, 7\] as cu_seqlens_k"),
    ({"cu_seqlens_q": ENDS[0][:1], "cu_seqlens_k": ENDS[1][:1]}, "at least one sequence"),
    ({"cu_seqlens_q": ENDS[0].to("meta")}, "must be on q's device cpu, got meta"),
    ({"cu_seqlens_q": torch.zeros(14, dtype=torch.int32)[::2]}, "cu_seqlens_q must be contiguous"),
    ({"cu_seqlens_q": [0, 3]}, "must be arrays of one library"),
    ({"max_seqlen_q": 3.0}, "max_seqlen_q must be an integer from 0 to .*, got 3.0"),
    ({"max_seqlen_k": -1}, "max_seqlen_k must be an integer from 0 to .*, got -1"),
    ({"q": torch.zeros(1, 4, 9, 16)}, r"q must have 3 dimensions \[rows of all sequences, heads"),
    ({"alibi_slopes": SLOPES.repeat(5, 1)}, r"alibi_slopes must have the shape \(6, 4\)"),
    ({"sinks": SLOPES[:2]}, r"sinks must have the shape \(4,\)"),
    ({"window_size": (-2, 0)}, "window_size must be two integers"),
    ({"attn_mask": torch.ones(1)}, "has no attn_mask"),
    ({"seqlens_k": torch.ones(1)}, "has no seqlens_k.*cu_seqlens_q"),
    ({"dropout_p": 0.1}, "has no dropout_p"),
    ({"device_type": 0.0}, "device_type must be .* the eighth argument of flash_attn's function"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_typed_errors(change: dict[str, Any], message: str) -> None:
    q, k, v = make()
    usual = {"q": q, "k": k, "v": v, "cu_seqlens_q": ENDS[0], "cu_seqlens_k": ENDS[1]}
    named = {**usual, "max_seqlen_q": 9, "max_seqlen_k": 9, **change}
    with pytest.raises((UnsupportedArgumentError, UnsupportedProblemError), match=message):
        flash_attn_varlen_func(**named)


def test_values_are_checked_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_plan, "attention_forward")
    q, k, v = (x.transpose(0, 1)[None] for x in make())
    call = (q, k, v, None, True, False, "", False, 3, -1, 0.0, SLOPES[:3], None, None, None, None)
    with pytest.raises(UnsupportedProblemError, match="alibi_slopes must have the shape"):
        modified._forward_cuda(modified.Forward(*call, *ENDS, 9, 9, None))  # type: ignore[arg-type]


# --- problems, candidates and costs ------------------------------------------------------------------


@pytest.mark.parametrize(("count", "total", "longest"), [(1, 7, 7), (8, 64, 8), (18, 17000, 2678)])
def test_typical_lengths_have_their_sum_and_their_greatest(
    count: int, total: int, longest: int
) -> None:
    lengths = typical_lengths(count, total, longest)
    assert (len(lengths), sum(lengths)) == (count, total)
    assert list(lengths) == sorted(lengths, reverse=True)
    assert lengths[0] == pytest.approx(longest, rel=0.1)


def test_problems_of_packed_sequences() -> None:
    problem = Problem(**values_of(BASE))
    assert problem == BASE
    assert Problem(**json.loads(json.dumps(values_of(BASE)))) == BASE
    assert "packed_rows" not in values_of(Problem())
    assert BASE.compiled_modifications == ("packed",)
    assert BASE.describe().endswith("packed 301x340")
    bucket = BASE.bucketed()
    assert (bucket.batch, bucket.packed_rows) == (8, (512, 512))
    assert distance(bucket, replace(bucket, packed_rows=(1024, 512))) == pytest.approx(1, abs=0.01)
    assert distance(bucket, replace(bucket, packed_rows=(0, 0))) is None
    for bad, message in (
        ({"packed_rows": (3, 0)}, "packed_rows must be two integers from 1"),
        ({"modifications": ("attn_mask",)}, "packed sequences take no attn_mask"),
        ({"key_bounds": True}, "packed sequences take no key_bounds"),
        ({"op": "retnet", "mask": "explicit"}, "score modifications are for attention"),
    ):
        with pytest.raises(UnsupportedProblemError, match=message):
            replace(BASE, **bad)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("policy", [A100(), H100()], ids=lambda policy: policy.name)
def test_kernels_that_pack_are_offered(policy: Any, direction: Any) -> None:
    problem = replace(BASE, direction=direction)
    candidate = policy.default(problem)
    native = policy.name == "H100"
    assert (
        candidate.kernel
        == f"{'attention' if native else 'scores'}_{direction}_sm{90 if native else 80}"
    )
    assert candidate.modifications == ("packed",)
    assert "_packed_" in candidate.name
    assert small_problem(candidate).packed
    assert reduced(replace(problem, packed_rows=(99999, 99999))).packed_rows == (8192, 8192)
    assert not getattr(candidate.knobs, "persistent", False)
    offered = [x for x in policy.legal(problem) if x.kernel == candidate.kernel]
    assert candidate in offered
    for x in offered:
        assert getattr(x.knobs, "persistent", False) == getattr(x.knobs, "dynamic", False)
    changes: list[tuple[str, dict[str, Any]]] = []
    if direction == "forward" and native:
        assert {x.knobs.schedule for x in offered} == {"dynamic", "grid"}
        changes = [
            ("packed_tiles_are_dispatched", {"schedule": "static"}),
            ("flat_holds_one_sequence", {"mainloop": "overlap_flat", "ping_pong": False}),
        ]
    elif direction == "forward" or native:
        changes = [("packed_tiles_are_dispatched", {"persistent": True})]
    for rule, changed in changes:
        other = replace(candidate, knobs=replace(candidate.knobs, **changed))
        assert getattr(check(other, policy.spec), "predicate", None) == rule


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_composition_of_a_batch_builds_another_kernel(direction: Any) -> None:
    problem = replace(BASE, direction=direction, causal=True)
    others = [
        replace(problem, batch=batch, seqlen_q=longest, seqlen_k=longest, packed_rows=(rows, rows))
        for batch, longest, rows in ((1, 9, 9), (500, 90, 4000), (18, 2678, 17000))
    ]
    for policy in (A100(), H100()):
        assert len({policy.default(x).name for x in (problem, *others)}) == 1


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_tokens_of_any_caches_take_one_kernel_and_another_beside_prompts(
    dims: tuple[int, int],
) -> None:
    sizes: dict[str, Any] = {"heads_q": 8, "dim_qk": dims[0], "dim_v": dims[1]}
    tokens = [
        replace(BASE, **sizes, batch=n, seqlen_q=1, seqlen_k=longest, packed_rows=(n, rows))
        for n, longest, rows in (
            (1, 99, 99),
            (500, 90, 4000),
            (16, 131072, 200000),
            (64, 8192, 2**19),
        )
    ]
    for policy in (A100(), H100()):
        made = [policy.default(x.rounded()) for x in tokens]
        assert len({x.compiled.name for x in made}) == 1
        assert made[0].knobs.split_kv
        assert made[0].knobs.pack_gqa
    prompts = [
        replace(x, seqlen_q=longest, packed_rows=(x.batch + longest, x.packed_rows[1]))
        for x in tokens[2:]
        for longest in (100, 500)
    ]
    (made_beside,) = {H100().default(x.rounded()).compiled for x in prompts}
    assert made_beside.knobs.warpgroups == 2
    assert made_beside.knobs.pack_gqa
    assert H100().default(replace(tokens[2], dim_v=512).rounded()).family == "sm80"
    # Many queries have tiles of their own.
    chunks = replace(prompts[0], batch=4, seqlen_q=512, packed_rows=(2048, 65536))
    assert not H100().default(chunks.rounded()).knobs.split_kv


def test_costs_and_flops_are_those_of_the_sequences() -> None:
    problem = replace(BASE, causal=True)
    alone = [
        replace(problem, batch=1, packed_rows=(0, 0), seqlen_q=rows, seqlen_k=keys)
        for rows, keys in problem.lengths
    ]
    assert problem.flops == pytest.approx(sum(x.flops for x in alone), rel=1e-3)
    for by_queries in (True, False):
        tiles = [tiles_of(x, block=32, step=16, by_queries=by_queries) for x in (problem, *alone)]
        assert tiles[0] == sum(tiles[1:], ())
    windowed = replace(problem, window_size=(15, -1))
    assert windowed.flops < problem.flops
    assert problem.bytes_moved == sum(x.bytes_moved for x in alone)


# --- launch plans, over a kernel that runs on the host -----------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_lengths_reach_the_params(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (x.transpose(0, 1)[None] for x in make())
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        seen: list[Any] = []

        def record(kernel: Any, params: Any, **named: Any) -> Any:
            seen.append(type(params).from_buffer_copy(bytes(params)))
            raise InterruptedError  # the fake would write batch entries

        monkeypatch.setattr(launch, "Launch", record)
        for longest in ((9, 9), (0, 99), (12, 16)):
            modifiers = Modifiers(cu_seqlens_q=ENDS[0], cu_seqlens_k=ENDS[1], max_seqlens=longest)
            options = (None, True, False, "")
            with pytest.raises(InterruptedError):
                attention_plan.attention_forward(q, k, v, options, True, modifiers=modifiers)
        problems = [problem for problem, *_ in fake.asked]
    assert [(p.batch, p.seqlen_q, p.seqlen_k) for p in problems] == [
        (6, 16, 16),
        (6, 16, 26),
        (6, 16, 16),
    ]
    assert {p.packed_rows for p in problems} == {(28, 26)}
    params = seen[0]
    assert (params.batch, params.total_q, params.total_k, params.causal_from_end) == (6, 28, 26, 1)
    assert params.cu_seqlens_q
    assert params.cu_seqlens_k
