"""Score modifications: the reference and the function, problems and candidates, costs, launch plans."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attention_autotuner import flash_attn_func
from attention_autotuner.api.attention import plan as attention_plan
from attention_autotuner.api.attention.checks import check_window
from attention_autotuner.arch import A100, H100
from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate, Rejection
from attention_autotuner.core.identity import digest16, values_of
from attention_autotuner.core.problem import Problem
from attention_autotuner.errors import UnsupportedProblemError
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.shared.schedule import tiles_of
from attention_autotuner.operations.attention.modified import Modifiers, attention_modified
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.serving.exports import choose_picks
from attention_autotuner.tuning.class_pools import class_of, small_problem
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.lookup import distance
from benchmarks import calls
from benchmarks.baselines import BASELINES
from benchmarks.suites import shape
from tests.fake_kernels import params_of_launches, serve_fakes
from tests.gpu import test_score_modifications as on_device
from tests.numerics.score_modifications import KINDS, formula

HEADS = 4
PLAIN = Problem(causal=True)
SLOPES = torch.tensor([0.5, 0.25, 0.0, 1.0])
TABLE = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(0))  # distances to 3
LEARNED = ("sinks", "bias")
VALUES: dict[str, dict[str, Any]] = {
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (2, -1), "causal": True},
    "right": {"window_size": (-1, 1), "causal_alignment": "top_left"},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi of each entry": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])},
    "boolean mask": {"attn_mask": torch.tensor([[True], [False], [True], [True]])[:, :, None]},
    "added mask": {"attn_mask": 2 * SLOPES.half()[:, None, None], "window_size": (3, 3)},
    "sinks": {"sinks": torch.tensor([-1.0, 3.0, 0.0, -9.0]), "causal": True},
    "bias": {"bias": TABLE},
    "one bias": {"bias": TABLE[:, :1], "causal": True, "causal_alignment": "top_left"},
    "all": {
        "softcap": 2.0,
        "alibi_slopes": SLOPES,
        "bias": TABLE,
        "sinks": 2 * SLOPES,
        "window_size": (1, 4),
    },
}


def make(seqlen_q: int = 7, seqlen_k: int = 9, dtype: torch.dtype = torch.float16) -> list[Any]:
    generator = torch.Generator().manual_seed(seqlen_k)
    shapes = ((2, HEADS, seqlen_q, 16), (2, 2, seqlen_k, 16), (2, 2, seqlen_k, 24))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


# --- the reference and the function ------------------------------------------------------------------


@pytest.mark.parametrize("seqlens", [(7, 9), (9, 4)])
@pytest.mark.parametrize("name", VALUES)
def test_results_and_gradients_are_those_of_a_mask_of_every_pair(
    name: str, seqlens: tuple[int, int]
) -> None:
    options = dict(VALUES[name])
    leaves = [x.requires_grad_() for x in make(*seqlens)]
    for learned in LEARNED:
        if learned in options:
            options[learned] = options[learned].clone().requires_grad_()
            leaves.append(options[learned])
    results = flash_attn_func(*leaves[:3], return_lse=True, **options)
    exact = formula(*leaves[:3], **options)
    for out, ref, tolerance in zip(results, exact, (2e-3, 1e-5), strict=True):
        torch.testing.assert_close(out.double(), ref, atol=tolerance, rtol=tolerance)
    o, lse = (torch.randn_like(x, dtype=torch.float64) for x in results)
    rows = exact[1].isfinite()
    losses = [(x.double() * o).sum() + (y.double() * lse)[rows].sum() for x, y in (results, exact)]
    for gradient, ref in zip(*(torch.autograd.grad(x, leaves) for x in losses), strict=True):
        torch.testing.assert_close(gradient.double(), ref.double(), atol=2e-2, rtol=1e-2)
        assert gradient.dtype == ref.dtype


def test_derivatives_of_both_orders_by_gradcheck() -> None:
    from attention_autotuner.operations.attention.modified import attention_modified_backward

    q, k, v = (x.double().requires_grad_() for x in make(3, 4))
    sinks = torch.tensor([-1.0, 0.5, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    table = TABLE[:, 2:5].double().contiguous().requires_grad_()
    values: dict[str, Any] = {
        "softcap": 0.7,
        "alibi_slopes": SLOPES.double(),
        "window_size": (1, 1),
    }

    def function(q: Any, k: Any, v: Any, sinks: Any, table: Any) -> Any:
        modifiers = Modifiers(sinks=sinks, bias_table=table, **values)
        return attention_modified(q, k, v, modifiers=modifiers, dtype=torch.float64)

    leaves = (q, k, v, sinks, table)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    outputs = function(*leaves)
    grads = [torch.randn_like(x) for x in outputs]
    by_autograd = torch.autograd.grad(outputs, leaves, grads)
    modifiers = Modifiers(sinks=sinks, bias_table=table, **values)
    by_formula = attention_modified_backward(
        *(*grads, q, k, v), modifiers=modifiers, dtype=torch.float64
    )
    for ours, theirs in zip(by_formula, by_autograd, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_can_be_differentiated_again() -> None:
    leaves = [*(x.requires_grad_() for x in make()), TABLE.clone().requires_grad_()]
    options: dict[str, Any] = {"softcap": 2.0, "window_size": (3, 1), "bias": leaves[3]}
    seconds = []
    for function in (flash_attn_func, lambda *x, **named: formula(*x, **named)[0]):
        o = function(*leaves[:3], **options)
        first = torch.autograd.grad(o.double().square().sum(), leaves, create_graph=True)
        loss = torch.stack([x.double().square().sum() for x in first]).sum()
        seconds.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*seconds, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.1, rtol=0.05)


def test_what_hides_nothing_is_an_ordinary_call() -> None:
    q, k, v = make()
    expected = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(8, 6)), expected)
    causal = flash_attn_func(q, k, v, causal=True)
    for options in ({"window_size": (-1, 0)}, {"window_size": [9, 5], "causal": True}):
        assert torch.equal(flash_attn_func(q, k, v, **options), causal)


def test_layouts_compilation_and_no_keys() -> None:
    q, k, v = make()
    options = VALUES["all"]
    expected = flash_attn_func(q, k, v, **options)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(flash_attn_func(*turned, layout="bshd", **options).transpose(1, 2), expected)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    for left in (4, 3, 2):  # from the second on the window is a variable of the compiled code
        options = {**options, "window_size": (left, 1), "softcap": float(left)}  # the cap, too
        expected = flash_attn_func(q, k, v, **options)
        assert torch.equal(compiled(q, k, v, **options), expected)
    o, lse = flash_attn_func(q, k[:, :, :0], v[:, :, :0], sinks=SLOPES, return_lse=True)
    assert not o.any()
    assert torch.equal(lse, SLOPES[:, None].expand(2, HEADS, 7))


def test_key_bounds_and_modifications_hold_together() -> None:
    q, k, v = make(3, 9)
    ends, starts = (torch.tensor(x, dtype=torch.int32) for x in ([9, 5], [2, 0]))
    options = {n: x for n, x in VALUES["all"].items() if n != "causal"}
    o = flash_attn_func(q, k, v, seqlens_k=ends, starts_k=starts, **options)
    for b in range(2):
        keys = slice(int(starts[b]), int(ends[b]))
        few = [q[b : b + 1], k[b : b + 1, :, keys], v[b : b + 1, :, keys]]
        torch.testing.assert_close(o[b : b + 1], flash_attn_func(*few, **options))


# --- problems, candidates and costs ------------------------------------------------------------------


def test_identities_from_before_there_were_modifications_hold() -> None:
    assert digest16(Problem()) == "1e2378a2b5cb5f7d"
    candidate = A100().default(Problem())
    assert "modifications" not in values_of(Problem()) | candidate.config
    assert "window_size" not in values_of(Problem())
    assert "Modifications" not in render(candidate).text
    bent = A100().default(Problem(**KINDS["all"]))
    names = ("softcap", "alibi_slopes", "bias_table", "attn_mask", "sinks", "window")
    assert bent.modifications == names
    assert "_softcap_alibi_slopes_bias_table_attn_mask_sinks_window_" in bent.name
    assert candidate_from_config(json.loads(json.dumps(bent.config))) == bent
    problem = Problem(**KINDS["all"], causal=True)
    assert Problem(**json.loads(json.dumps(values_of(problem)))) == problem
    assert problem.describe().endswith(
        "causal window 31:-1 softcap alibi-slopes bias-table attn-mask sinks"
    )
    assert small_problem(bent).compiled_modifications == bent.modifications
    assert class_of(problem) != class_of(Problem(causal=True))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_masks_are_for_both_families(direction: Any) -> None:
    problem = Problem(direction=direction, **KINDS["mask"])
    kernels = [f"attention_{direction}_sm90", f"scores_{direction}_sm80"]
    for policy, offered in ((A100(), kernels[1:]), (H100(), kernels)):
        assert {candidate.kernel for candidate in policy.legal(problem)} == set(offered)
        assert policy.default(problem).kernel == offered[0]


def test_the_backward_of_masks_under_a_softcap_is_left_to_the_other_family() -> None:
    problem = Problem(direction="backward", **KINDS["all"])
    assert H100().default(problem).kernel == "scores_backward_sm80"
    assert {candidate.family for candidate in H100().legal(problem)} == {"sm80"}
    said = [x.reason for x in H100().candidates(problem) if isinstance(x, Rejection)]
    assert any("derivative of a softcap" in reason for reason in said)


# Where searches on an H200 have chosen others than for the plain problem, at head dim 128 and causal.
OWN_TILES = {
    "alibi": "g3n80_scores_first_optimistic_turns",
    "bias": "g3n64_scores_first_optimistic_turns",
}
OWN_PASSES = {
    "alibi": "g2c64t3x2_keys1stored",
    "bias": "g2c64a3x2_keys1stored",
    "softcap": "g2c64a3x2_keys2bulk",
    "window": "g2c64t2x2_keys2stored",
    "bent": "g2c64a3x2_keys2bulk",
}
# Of few blocks, which are not claimed.
SHORT: dict[str, Any] = {"seqlen_q": 1920, "seqlen_k": 1920}
OF_FEW_BLOCKS = {
    "alibi": "fused_keys_g2c64a3x2_keys2bulk_lpt_early_gathered",
    "bias": "fused_keys_g2c64a3x2_keys1bulk_lpt_early_gathered",
    "softcap": "fused_keys_g2c64a3x2_keys1bulk_lpt_early_gathered",
    "sinks": "fused_keys_g2c64t3x2_keys1bulk_lpt_early_gathered",
    "window": "fused_keys_g2c64t2x2_keys2bulk_lpt_early_gathered",
    "bent": "fused_keys_g2c64a3x2_keys1bulk_lpt_early_gathered",
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["window", "softcap", "alibi", "bias", "sinks", "bent"])
def test_wgmma_kernels_have_the_others_and_are_their_defaults(kind: str, direction: Any) -> None:
    problem = Problem(direction=direction, causal=True, **KINDS[kind])
    chosen, plain = H100().default(problem), H100().default(replace(PLAIN, direction=direction))
    assert chosen.kernel == f"attention_{direction}_sm90"
    assert chosen in H100().legal(problem)
    if direction == "backward":
        claimed = "_raster_persistent_early_gathered_dynamic"  # as plain ones
        if kind == "sinks":
            assert chosen.knobs == plain.knobs
        else:
            assert chosen.knobs.label == f"fused_keys_{OWN_PASSES[kind]}{claimed}"
        few = H100().default(replace(problem, batch=2, heads_kv=4, **SHORT)).knobs
        assert few.label == OF_FEW_BLOCKS[kind]
    elif kind in OWN_TILES:
        assert OWN_TILES[kind] in chosen.name
    else:
        assert chosen.knobs == plain.knobs
    assert {c.family for c in H100().legal(problem)} == {"sm80", "sm90"}


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((64, 4096, False), "g4n64_scores_first_optimistic_turns"),
        ((64, 8192, False), "g3n128_serial_optimistic_free"),
        ((64, 2048, True), "g4n64_serial_optimistic_free"),
        ((64, 16384, True), "g3n128_serial_optimistic_free"),
        ((128, 512, False), "g2n64_overlap_optimistic_free"),
        ((128, 2048, False), "g3n64_scores_first_optimistic_turns"),
        ((128, 8192, False), "g3n80_scores_first_optimistic_turns"),
        ((128, 512, True), "g2n64_overlap_optimistic_free"),
        ((128, 2048, True), "g3n64_scores_first_optimistic_turns"),
        ((128, 16384, True), "g3n80_scores_first_optimistic_turns"),
    ],
)
def test_forward_defaults_follow_lengths(shape: tuple[int, int, bool], tile: str) -> None:
    dim, length, causal = shape
    sizes: dict[str, Any] = {"seqlen_q": length, "seqlen_k": length, "dim_qk": dim, "dim_v": dim}
    assert tile in H100().default(Problem(batch=4, causal=causal, **sizes)).name


@pytest.mark.parametrize(
    ("dim", "length", "tile"),
    [
        (64, 4096, "g4n64_serial_optimistic_turns"),
        (128, 8191, "g3n64_scores_first_optimistic_turns"),
        (128, 8192, "g3n80_scores_first_optimistic_turns"),
    ],
)
def test_forward_defaults_under_a_softcap_follow_lengths(dim: int, length: int, tile: str) -> None:
    sizes: dict[str, Any] = {"seqlen_q": length, "seqlen_k": length, "dim_qk": dim, "dim_v": dim}
    problem = Problem(batch=4, causal=True, modifications=("softcap",), **sizes)
    assert tile in H100().default(problem).name


def test_variants_that_a_gpu_verifies_are_offered() -> None:
    variants = [case for case in on_device.cases() if case.pattern]
    small = [case for case in variants if case.problem.dim_qk == on_device.SMALL["dim_qk"]]
    assert len(variants) == 2 * len(on_device.VARIANTS) + len(small)
    assert len(small) == 10
    for case in variants:
        assert re.search(case.pattern, case.candidate(H100()).name), case


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wgmma_kernels_serve_tables_with_others(direction: Any) -> None:
    problem = Problem(direction=direction, causal=True, **KINDS["biased"])
    assert H100().default(problem).kernel == f"attention_{direction}_sm90"
    offered = {c.kernel for c in H100().legal(problem)}
    assert offered == {f"scores_{direction}_sm80", f"attention_{direction}_sm90"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_costs_of_wgmma_kernels_follow_windows_and_modifications(direction: Any) -> None:
    knobs = H100().default(replace(PLAIN, direction=direction)).knobs

    def time_of(**named: Any) -> float:
        problem = replace(PLAIN, direction=direction, **named)
        return estimate(problem, Candidate.of(problem, knobs), H100().spec).us

    full = {"batch": 1, "seqlen_q": 16384, "seqlen_k": 16384}
    assert time_of(**full) / time_of(**full, window_size=(1023, -1)) > 4.0
    times = [time_of(**KINDS[kind]) for kind in ("sinks", "alibi", "softcap")]
    assert times == sorted(times)
    assert times[0] == time_of()


def test_few_queries_split_the_keys_of_their_windows() -> None:
    problem = Problem(batch=1, heads_q=8, heads_kv=1, seqlen_q=1, seqlen_k=131072, causal=True)
    whole, near = (H100().default(replace(problem, window_size=(x, -1))) for x in (-1, 1023))
    assert whole.knobs.splits > 64
    assert 1 < near.knobs.splits <= 1024 // near.knobs.block_n


def test_values_build_nothing() -> None:
    problem = Problem(causal=True, window_size=(1023, -1))
    others = [replace(problem, window_size=(left, -1)) for left in (15, 500, 2000)]
    assert {A100().default(other).name for other in others} == {A100().default(problem).name}


def test_a_record_of_a_near_window_stands_in_and_none_of_another_kind() -> None:
    problem = Problem(window_size=(1023, 0)).bucketed()
    assert problem.window_size == (1024, 0)
    assert distance(problem, problem) == 0
    assert distance(problem, replace(problem, window_size=(512, 0))) == pytest.approx(1, abs=0.01)
    for other in (Problem(), Problem(window_size=(1024, 0), **KINDS["sinks"])):
        assert distance(problem, other.bucketed()) is None


def test_bundles_refuse_them() -> None:
    hierarchy: Any = None
    with pytest.raises(UnsupportedProblemError, match=r"bundles hold no .*, got \('softcap',\)"):
        choose_picks([Problem(**KINDS["softcap"])], A100(), hierarchy, Environment())


def test_only_attention_has_modifications() -> None:
    with pytest.raises(UnsupportedProblemError, match="score modifications are for attention"):
        Problem(op="retnet", mask="explicit", window_size=(3, 3))
    with pytest.raises(UnsupportedProblemError, match=r"modifications must be of .*, got 'tanh'"):
        Problem(modifications=("tanh",))
    with pytest.raises(UnsupportedProblemError, match="window_size must be two integers"):
        Problem(window_size=(-2, 0))


def test_a_symbolic_window_is_refused() -> None:
    shapes = ShapeEnv()
    symbol = shapes.create_symbol(8, ConstantSource("window"))
    with pytest.raises(UnsupportedProblemError, match="window_size must be two integers"):
        check_window((shapes.create_symintnode(symbol, hint=8), 0))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(13, 11), (7, 11), (11, 1)])
def test_costs_and_flops_count_what_windows_leave(seqlen_q: int, seqlen_k: int) -> None:
    base = Problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    sides = (-1, 0, 3, 20)
    windows = [(x, y) for x in sides for y in sides if max(x, y) >= 0]
    alignments: Any = ("bottom_right", "top_left")
    for window, causal, alignment in product(windows, (False, True), alignments):
        problem = replace(base, window_size=window, causal=causal, causal_alignment=alignment)
        rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        past = keys - rows - problem.causal_offset
        left, right = problem.window
        seen = (past >= -left) & (past <= right)
        pairs = seqlen_q * seqlen_k
        assert problem.flops == replace(base, causal=False).flops * int(seen.sum()) // pairs
        for by_queries, mask in ((True, seen), (False, seen.T)):
            padded = torch.zeros(16, 16, dtype=torch.bool)
            padded[: mask.shape[0], : mask.shape[1]] = mask
            tiles = padded.view(4, 4, 8, 2).any(3).any(1).sum(1)[: -(-mask.shape[0] // 4)].tolist()
            expected = tiles[::-1] if by_queries and causal else tiles
            assert tiles_of(problem, block=4, step=2, by_queries=by_queries) == tuple(expected)


def test_a_window_is_estimated_faster() -> None:
    full = Problem(causal=True, seqlen_q=16384, seqlen_k=16384)
    times = []
    for problem in (full, replace(full, window_size=(1023, -1))):
        candidate = A100().default(problem)
        times.append(rank(problem, [candidate], A100().spec)[0][1].us)
    assert times[0] / times[1] > 5.5


# --- launch plans, over a kernel that runs on the host -----------------------------------------------


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_values_reach_the_params(
    fake_kernel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_fakes(fake_kernel, monkeypatch) as fake:
        seen = params_of_launches(monkeypatch)
        for window, softcap in (((3, -1), 2.5), ((4, -1), 1.5)):
            modifiers = Modifiers(window_size=window, softcap=softcap, sinks=SLOPES)
            q, k, v = make()
            attention_plan.attention_forward(
                q, k, v, (None, True, False, ""), True, modifiers=modifiers
            )
        problems = [problem for problem, *_ in fake.asked]
    assert [problem.window_size for problem in problems] == [(3, -1), (4, -1)]
    assert {problem.modifications for problem in problems} == {("softcap", "sinks")}
    values = [(p.window_left, p.window_right, p.softcap, bool(p.sinks)) for p in seen]
    assert values == [(3, -1, 2.5, True), (4, -1, 1.5, True)]


# --- benchmarks ---------------------------------------------------------------------------------------


def test_flex_and_ours_bend_scores_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    make: Any = flex_attention.create_block_mask
    monkeypatch.setattr(
        flex_attention, "create_block_mask", lambda *sizes, **_: make(*sizes[:5], device="cpu")
    )
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = shape("b2 h4/2 s40x50 d16 causal window 7:-1 softcap alibi-slopes bias-table")
    inputs = make_inputs(problem, seed=1, device="cpu")
    names = calls.others_of(problem)
    values: list[Any] = [inputs.q, inputs.k, inputs.v, *map(inputs.tensors.__getitem__, names)]
    expected = calls.ours(problem, None)(*values)
    o = BASELINES["flex"].function(problem)(*values)
    torch.testing.assert_close(o, expected, atol=2e-3, rtol=1e-2)
    plain = BASELINES["plain"].function(problem)(*values)
    assert torch.equal(plain, flash_attn_func(*values[:3], causal=True))
    assert not torch.equal(plain, expected)
