"""Key bounds: the reference, the public function, launch plans, verification, and identities from before them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_autotuner import flash_attn_func
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.arch import A100, H100
from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import digest16, values_of
from attention_autotuner.core.problem import CausalAlignment, Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.operations.attention.inputs import AttentionForward
from attention_autotuner.operations.bindings import ways_of
from attention_autotuner.operations.params import params_of
from attention_autotuner.reference import attention_bounded, check
from attention_autotuner.serving import loader
from attention_autotuner.serving.exports import kind_of
from attention_autotuner.tuning.class_pools import class_of, small_problem
from attention_autotuner.tuning.lookup import distance
from tests.fake_kernels import FakeDispatch, serve_fakes
from tests.launchers import verify
from tests.numerics.key_bounds import MASKS, formula, make_bounds, make_tensors

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
PROBLEM = Problem(
    batch=9, heads_q=4, heads_kv=2, seqlen_q=7, seqlen_k=13, dim_qk=16, dim_v=24, key_bounds=True
)
STARTS, ENDS = make_bounds(PROBLEM.seqlen_k)
masks = pytest.mark.parametrize(("causal", "alignment"), MASKS)


def assert_right(
    results: Any,
    tensors: tuple[Any, Any, Any],
    causal: bool,
    alignment: CausalAlignment,
    **bounds: Any,
) -> None:
    starts, ends = bounds.get("starts_k", STARTS * 0), bounds.get("seqlens_k", ENDS * 0 + 13)
    pairs = formula(*tensors, starts, ends, causal, alignment)
    for out, (exact, rounded) in zip(results, pairs, strict=True):
        comparison = check(out, exact, rounded)
        assert comparison, comparison.reason


# --- the reference and the function -----------------------------------------------------------------


@masks
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_function_reads_the_keys_within_the_bounds_alone(
    causal: bool, alignment: CausalAlignment, dtype: Any
) -> None:
    for names in (("starts_k", "seqlens_k"), ("starts_k",), ("seqlens_k",)):
        both = {"starts_k": STARTS, "seqlens_k": ENDS}
        bounds: dict[str, Any] = {name: both[name] for name in names}
        starts, ends = bounds.get("starts_k", STARTS * 0), bounds.get("seqlens_k", ENDS * 0 + 13)
        tensors = make_tensors(replace(PROBLEM, dtype=dtype), starts, ends)
        mask: dict[str, Any] = {"causal": causal, "causal_alignment": alignment}
        results = flash_attn_func(*tensors, return_lse=True, **mask | bounds)
        assert_right(results, tensors, causal, alignment, **bounds)
        assert all(not x.isnan().any() for x in results)
        absent: dict[str, Any] = {"starts_k": None, "seqlens_k": None}
        reference = attention_bounded(*tensors, **absent | mask | bounds)
        assert torch.equal(results[0], reference[0].to(results[0].dtype))
        assert torch.equal(results[1], reference[1])


def test_an_entry_without_keys_gives_zeros() -> None:
    tensors = make_tensors(PROBLEM, STARTS, ENDS)
    o, lse = flash_attn_func(*tensors, seqlens_k=ENDS, starts_k=STARTS, return_lse=True)
    for empty in (1, 7, 8):
        assert (o[empty] == 0).all()
        assert (lse[empty] == -math.inf).all()


def test_layouts_and_arrays() -> None:
    tensors = make_tensors(PROBLEM, STARTS, ENDS)
    bounds: dict[str, Any] = {"seqlens_k": ENDS, "starts_k": STARTS}
    o = flash_attn_func(*tensors, causal=True, **bounds)
    named = dict(zip("qkv", tensors, strict=True))
    views: dict[str, Any] = {name: x.transpose(1, 2) for name, x in named.items()}
    turned = flash_attn_func(**views, causal=True, layout="bshd", **bounds)
    assert torch.equal(turned.transpose(1, 2), o)
    arrays: dict[str, Any] = {name: x.numpy() for name, x in (named | bounds).items()}
    assert torch.equal(torch.from_numpy(flash_attn_func(**arrays, causal=True)), o)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (ENDS.long(), r"must be torch.int32, got torch.int64"),
        (ENDS[:4], r"must have the shape \(9,\), got \(4,\)"),
        (ENDS[:, None], r"must have the shape \(9,\), got \(9, 1\)"),
        (ENDS.to("meta"), r"must be on q's device cpu, got meta"),
        (torch.stack([ENDS, ENDS], dim=1)[:, 0], r"must be contiguous, got a stride of \(2,\)"),
        ([1, 2], r"must be arrays of one library, got Tensor, Tensor, Tensor, list"),
    ],
)
@pytest.mark.parametrize("name", ["seqlens_k", "starts_k"])
def test_what_is_no_bound_is_refused(name: str, bound: Any, message: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=rf"{name} {message}"):
        flash_attn_func(*make_tensors(PROBLEM, STARTS, ENDS), **{name: bound})


@pytest.mark.parametrize(
    "bent",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (5, 2), "layout": "bshd"},
        {"softcap": 3.0, "sinks": torch.linspace(-1.0, 1.0, 4)},
        {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, 16).view(4, 4)},
    ],
    ids=lambda bent: "-".join(bent) or "plain",
)
@pytest.mark.parametrize("names", [("seqlens_k",), ("starts_k",), ("seqlens_k", "starts_k")])
def test_gradients_are_those_of_every_entrys_own_keys(
    bent: dict[str, Any], names: tuple[str, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    turned = bent.get("layout") == "bshd"
    shapes = ((4, 4, 9, 16), (4, 2, 23, 16), (4, 2, 23, 8))
    leaves = [torch.randn(shape, generator=generator).half() for shape in shapes]
    leaves = [x.transpose(1, 2) if turned else x for x in leaves]
    bounds: dict[str, Any] = {
        "seqlens_k": torch.tensor([23, 11, 0, 5]),
        "starts_k": torch.tensor([-4, 3, 2, 7]),
    }
    bounds = {name: bounds[name].int() for name in names}
    firsts = bounds.get("starts_k", torch.zeros(4)).clamp(0, 23).int().tolist()
    ends = bounds.get("seqlens_k", torch.full((4,), 23)).tolist()

    def by_entry(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        pairs = []
        for b, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            seen = slice(first, max(first, end))
            k_seen, v_seen = (
                x[b : b + 1, seen] if turned else x[b : b + 1, :, seen] for x in (k, v)
            )
            mine = {n: x[b : b + 1] if n == "alibi_slopes" else x for n, x in bent.items()}
            pairs.append(flash_attn_func(q[b : b + 1], k_seen, v_seen, return_lse=True, **mine))
        return tuple(map(torch.cat, zip(*pairs, strict=True)))

    def all_at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attn_func(q, k, v, return_lse=True, **bounds, **bent)

    results = []
    for call in (all_at_once, by_entry):
        inputs = [x.clone().requires_grad_() for x in leaves]
        o, lse = call(*inputs)
        loss = o.float().square().sum() + lse[lse.isfinite()].sum()
        results.append((o, lse, *torch.autograd.grad(loss, inputs)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-3)
    with torch.no_grad():
        alone = all_at_once(*leaves)[0]
    assert alone.stride() == results[0][0].stride()
    torch.testing.assert_close(alone, results[0][0].detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(1)}, "no backward beside attn_mask"),
        ({"starts_k": STARTS, "causal_alignment": "top_left"}, "'top_left' has no backward"),
        ({"seqlens_k": ENDS.long()}, r"must be torch.int32, got torch.int64"),
    ],
)
def test_bounded_gradients_that_there_are_not_are_refused(
    options: dict[str, Any], message: str
) -> None:
    q, k, v = (x.requires_grad_() for x in make_tensors(PROBLEM, STARTS, ENDS))
    with pytest.raises(UnsupportedProblemError, match=message):
        flash_attn_func(q, k, v, causal=True, **{"seqlens_k": ENDS, **options})


def test_a_compiled_call_takes_other_bounds() -> None:
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    for ends in (ENDS, ENDS // 2):
        tensors = make_tensors(PROBLEM, STARTS * 0, ends)
        o = compiled(*tensors, seqlens_k=ends)
        assert torch.equal(o, flash_attn_func(*tensors, seqlens_k=ends))


# --- launch plans and verification, over a kernel that runs on the host -----------------------------


@pytest.fixture
def fake(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDispatch]:
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        yield fake


@needs_compiler
@masks
def test_bounds_reach_the_kernel_and_are_read_when_it_runs(
    fake: FakeDispatch, causal: bool, alignment: CausalAlignment
) -> None:
    starts, ends = STARTS.clone(), ENDS.clone()
    for _ in range(2):
        tensors = make_tensors(PROBLEM, starts, ends)
        bounds: dict[str, Any] = {"seqlens_k": ends, "starts_k": starts}
        results = attention_plan.attention_forward(
            *tensors, (None, causal, alignment == "top_left", ""), True, **bounds
        )
        assert_right(results, tensors, causal, alignment, **bounds)
        starts.copy_(STARTS.flip(0))
        ends.copy_(ENDS.flip(0))
    assert len(fake.asked) == 1
    assert fake.asked[0][0] == replace(PROBLEM, causal=causal, causal_alignment=alignment)


@needs_compiler
def test_calls_with_bounds_have_plans_of_their_own(fake: FakeDispatch) -> None:
    tensors = make_tensors(PROBLEM, STARTS * 0, ENDS * 0 + 13)
    call: tuple[Any, ...] = (*tensors, (None, False, False, ""), False)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"seqlens_k": ENDS},
        {"starts_k": ENDS},
        {"seqlens_k": ENDS, "starts_k": STARTS},
    )
    for bounds in kinds:
        before = len(attention_plan.FORWARD_PLANS)
        for _ in range(2):
            attention_plan.attention_forward(*call, **bounds)
        assert len(attention_plan.FORWARD_PLANS) == before + 1
    assert [problem.key_bounds for problem, _, _ in fake.asked] == [False, True, True, True]
    longer: dict[str, Any] = {"seqlens_k": ENDS.long()}
    with pytest.raises(UnsupportedProblemError, match="seqlens_k must be"):
        attention_plan.attention_forward(*call, **longer)


@needs_compiler
@masks
def test_verification_passes_a_right_kernel_and_fails_one_that_ignores_bounds(
    fake_kernel: Callable[..., Path], causal: bool, alignment: CausalAlignment
) -> None:
    problem = replace(PROBLEM, batch=5, causal=causal, causal_alignment=alignment)
    cpu = torch.device("cpu")
    right = loader.load(fake_kernel())
    assert verify(problem, right, deterministic=True, device=cpu).ok
    wrong = loader.load(fake_kernel("-DIGNORES_BOUNDS"))
    outcome = verify(problem, wrong, deterministic=True, device=cpu)
    assert outcome.kind == "wrong"
    assert "each batch entry with keys of its own" in outcome.reason


def test_all_kinds_of_bounds_are_among_the_inputs() -> None:
    inputs = AttentionForward(bounded=True).inputs(PROBLEM, seed=0, device=torch.device("cpu"))
    lengths = (inputs.tensors["seqlens_k"] - inputs.tensors["starts_k"]).tolist()
    assert min(lengths) < 0
    assert {0, 1} < set(lengths)
    assert max(lengths) > PROBLEM.seqlen_k
    (first, bounded, _) = ways_of(PROBLEM)
    timed = first.inputs(PROBLEM, seed=3, device=torch.device("cpu"))
    assert not timed.k.isnan().any()
    assert bounded.note == ", each batch entry with keys of its own"


# --- problems, candidates and records ----------------------------------------------------------------


def test_identities_from_before_there_were_bounds_hold() -> None:
    assert digest16(Problem()) == "1e2378a2b5cb5f7d"
    candidate = A100().default(Problem())
    assert "key_bounds" not in values_of(Problem()) | candidate.config
    old = json.loads(json.dumps(candidate.config))
    assert candidate_from_config(old) == candidate
    assert "kKeyBounds" not in render(candidate).text
    bounded = replace(candidate, key_bounds=True)
    assert Problem(**values_of(PROBLEM)) == PROBLEM == Problem(**asdict(PROBLEM))
    assert candidate_from_config(json.loads(json.dumps(bounded.config))) == bounded
    assert len({digest16(c) for c in (candidate, bounded)}) == 2


@pytest.mark.parametrize("kernel", ["scores_forward_sm80", "attention_forward_sm90"])
def test_both_families_have_bounded_candidates(kernel: str) -> None:
    problem = Problem(key_bounds=True)
    knobs: Any = KERNELS[kernel].default(problem, H100().spec)
    assert knobs == KERNELS[kernel].default(replace(problem, key_bounds=False), H100().spec)
    candidate = Candidate.of(problem, knobs)
    assert candidate.key_bounds
    assert "_bounds_" in candidate.name
    assert "static constexpr bool kKeyBounds = true;" in render(candidate).text
    assert small_problem(candidate).key_bounds


def test_picks_of_one_kind_do_not_serve_the_other() -> None:
    plain = replace(PROBLEM, key_bounds=False)
    assert distance(plain.bucketed(), PROBLEM.bucketed()) is None
    assert class_of(plain) != class_of(PROBLEM)
    assert kind_of(plain) != kind_of(PROBLEM)
    assert PROBLEM.describe() == f"{plain.describe()} key-bounds"
    assert all(candidate.key_bounds for candidate in A100().legal(PROBLEM))


def test_a_bottom_right_diagonal_hangs_at_the_end() -> None:
    for alignment, causal_from_end in (("bottom_right", 1), ("top_left", 0)):
        problem = replace(PROBLEM, causal=True, causal_alignment=alignment)  # type: ignore[arg-type]
        params: Any = params_of(problem)
        assert params.causal_from_end == causal_from_end
        plain: Any = params_of(replace(problem, key_bounds=False))
        assert plain.causal_from_end == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"direction": "backward"},
        {"op": "retnet", "mask": "explicit"},
        {"op": "retention", "causal": True},
    ],
)
def test_only_attention_forward_has_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedProblemError, match="key_bounds is for attention forward, got"):
        Problem(key_bounds=True, **fields)
    with pytest.raises(UnsupportedProblemError, match="key_bounds must be True or False"):
        Problem(key_bounds=1)  # type: ignore[arg-type]
