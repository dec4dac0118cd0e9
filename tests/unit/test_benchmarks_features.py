"""The benchmarks' races of features: what peers are called with, what is compared, and which bars rows have to meet."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch.nn.attention import SDPBackend

from attention_autotuner.core.problem import Problem
from attention_autotuner.operations.attention.modified_inputs import SOFTCAP
from attention_autotuner.operations.bindings import make_inputs
from attention_autotuner.reference import attention
from attention_autotuner.serving import dispatch
from benchmarks import calls, comparison, results
from benchmarks.baselines import BASELINES, compile_ahead, compiled, flash_attn
from benchmarks.baselines.base import GuardedEntry
from benchmarks.baselines.compile_ahead import blank_inputs, run_ahead
from benchmarks.baselines.compiled import (
    Compiled,
    CompiledAutotuned,
    Eager,
    block_mask,
    score_mod,
)
from benchmarks.baselines.copy import Copy
from benchmarks.baselines.flash_attn import (
    KEEPS_KERNELS,
    FlashAttention2,
    FlashAttention4,
    FlashAttention4Deterministic,
)
from benchmarks.baselines.sdpa import make_sdpa
from benchmarks.calls import (
    BackwardCall,
    Call,
    DisagreementError,
    ForwardCall,
    Function,
    StepCall,
    check_results,
    inputs_of,
    others_of,
    ours,
)
from benchmarks.comparison import TILE, share_of_tiles
from benchmarks.suites import SUITES, trials
from tests.fake_benchmark import GPU, FakePipeline, session_of

LENGTHS = (5, 1, 14)
PACKED = Problem(
    batch=3, heads_q=2, heads_kv=2, seqlen_q=14, seqlen_k=14, dim_qk=16, dim_v=16, causal=True,
    packed_rows=(20, 20),
)  # fmt: skip
PLAIN = replace(PACKED, batch=2, packed_rows=(0, 0))
SINKS = replace(PACKED, batch=2, packed_rows=(0, 0), modifications=("sinks",))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "make_inputs", partial(make_inputs, device="cpu"))


# --- inputs and calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_packed_inputs_have_the_lengths_of_their_suite(direction: Any) -> None:
    problem = replace(PACKED, direction=direction)
    typical = inputs_of({}, problem, seed=1)
    made = inputs_of({problem: LENGTHS}, problem, seed=1)
    assert made.tensors["cu_seqlens_q"].tolist() == [0, 5, 6, 20]
    assert made.tensors["cu_seqlens_k"].tolist() == [0, 5, 6, 20]
    assert typical.tensors["cu_seqlens_q"].tolist() != [0, 5, 6, 20]
    torch.testing.assert_close(made.q, typical.q)
    if direction == "backward":
        torch.testing.assert_close(made.tensors["o"].float(), by_sequence(made), atol=2e-3, rtol=0)


def by_sequence(inputs: Any, *, causal: bool = True) -> torch.Tensor:
    """The output of packed sequences, each by itself."""
    ends = inputs.tensors["cu_seqlens_q"].tolist()
    qkv = [x.float() for x in (inputs.q, inputs.k, inputs.v)]
    outputs = [attention(*(x[:, :, a:b] for x in qkv), causal=causal)[0] for a, b in pairwise(ends)]
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("name", ["ours", "nested"])
def test_packed_sequences_are_called_without_padding(name: str) -> None:
    problem = replace(PACKED, causal=name == "ours")  # torch has no causal nested tensors on a CPU
    inputs = inputs_of({problem: LENGTHS}, problem, seed=0)
    function = ours(problem, "H100")
    layout = calls.as_given
    if name == "nested":
        function, layout = make_sdpa(SDPBackend.MATH, problem), calls.packed_rows
    call = calls.ForwardCall(name=name, function=function, others=others_of(problem), layout=layout)
    call.prepare([inputs], [])
    expected = by_sequence(inputs, causal=problem.causal)
    torch.testing.assert_close(call.results(0)[0].float(), expected, atol=3e-3, rtol=0)
    assert BASELINES["sdpa_cudnn"].available(PACKED) == ""


def test_a_forward_reads_nothing_that_could_have_a_gradient() -> None:
    seen: list[bool] = []

    def function(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        seen.extend(x.requires_grad for x in (q, *others))
        return q

    call = calls.ForwardCall(name="o", function=function, others=others_of(SINKS))
    call.prepare([make_inputs(SINKS, seed=0, device="cpu")], [])
    assert seen == [False] * (3 + len(others_of(SINKS)))


@pytest.mark.parametrize("kind", [BackwardCall, StepCall])
@pytest.mark.parametrize("reads", [True, False])
def test_what_is_learned_has_its_gradient_timed_too(kind: Any, reads: bool) -> None:
    problem = replace(SINKS, direction="backward")
    seen: list[torch.Tensor] = []

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Any:
        seen.append(sinks)
        return q * k + v + (sinks.view(1, -1, 1, 1) if reads else 0)

    call = kind(name="x", function=function, others=others_of(problem))
    call.prepare([make_inputs(problem, seed=0, device="cpu")], [])
    assert [result.shape for result in call.results(0)] == [(2, 2, 14, 16)] * 3
    assert seen[-1].requires_grad
    *_, of_sinks = call._runs[0]()
    assert (of_sinks is not None) == reads


def test_flash_attn_takes_its_own_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}

    def function(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        taken.update(keywords)
        return q, "lse"

    module = SimpleNamespace(flash_attn_func=function, flash_attn_varlen_func=function)
    monkeypatch.setattr("benchmarks.baselines.flash_attn.import_module", lambda name: module)
    packed = replace(PACKED, window_size=(3, -1))
    assert FlashAttention2().function(packed)("q", "k", "v", "ends", "others") == "q"
    assert taken == {
        "causal": True, "window_size": (3, -1), "max_seqlen_q": 14, "max_seqlen_k": 14,
        "cu_seqlens_q": "ends", "cu_seqlens_k": "others",
    }  # fmt: skip
    taken.clear()
    capped = replace(SINKS, modifications=("softcap", "sinks"))
    assert FlashAttention4().function(capped)("q", "k", "v", "sinks") == "q"
    assert taken == {"causal": True, "softcap": SOFTCAP, "learnable_sink": "sinks"}
    for name, reason in (("flash_attn_2", "sinks"), ("sdpa_flash", "softcap"), ("plain", "packed")):
        asked = replace(PACKED, modifications=("softcap", "sinks"))
        assert reason in BASELINES[name].available(asked)


def test_flash_attn_4_compiles_each_kind_of_problem_ahead_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(KEEPS_KERNELS, raising=False)
    ahead: list[tuple[Any, ...]] = []

    def run_all(function: Any, work: list[tuple[Any, ...]], processes: int) -> None:
        assert (function, processes, os.environ[KEEPS_KERNELS]) == (run_ahead, 16, "1")
        ahead.extend(arguments[1:] for arguments in work)

    monkeypatch.setattr(flash_attn, "in_processes", run_all)
    first = Problem(batch=4, heads_q=8, heads_kv=2, causal=True)
    same = replace(first, batch=2, heads_q=16, heads_kv=4)
    backward = replace(same, direction="backward")
    FlashAttention4().get_ready([first, same, backward, PACKED], 16)
    assert ahead == [(first, "forward"), (backward, "backward"), (PACKED, "forward")]
    ahead.clear()
    FlashAttention4Deterministic().get_ready([first, backward], 16)
    assert ahead == [(backward, "backward")]


# --- FlexAttention --------------------------------------------------------------------------------

VALUES = {
    "softcap": None,
    "alibi_slopes": torch.tensor([0.5, 0.1]),
    "bias_table": torch.randn(2, 7),
    "prefix_lens": torch.tensor([0, 9], dtype=torch.int32),
    "document_ids": torch.tensor([[0] * 4 + [1] * 12, [0] * 10 + [3] * 6], dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("names", "window"),
    [(("softcap", "alibi_slopes"), (-1, -1)), ((), (3, -1)), *((((x,), (-1, -1))) for x in VALUES)],
)
def test_flex_attention_bends_and_masks_as_we_do(
    names: tuple[str, ...], window: tuple[int, int]
) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    rows = 16
    problem: Any = SimpleNamespace(
        modifications=names, seqlen_q=rows, seqlen_k=rows, batch=2, causal=True, causal_offset=0,
        window_size=window, window=(window[0] if window[0] >= 0 else rows, 0),
    )  # fmt: skip
    named = {name: x for name in names if (x := VALUES[name]) is not None}
    q, k, v = torch.randn(3, 2, 2, rows, 8)
    mask = block_mask(problem, named, torch.device("cpu"))
    bent = flex_attention(q, k, v, score_mod(problem, named), mask)

    i, j = torch.arange(rows)[:, None], torch.arange(rows)
    s = q @ k.mT * 8**-0.5
    if "softcap" in names:
        s = SOFTCAP * torch.tanh(s / SOFTCAP)
    if "alibi_slopes" in names:
        s = s - named["alibi_slopes"].view(2, 1, 1) * (i - j).abs()
    if "bias_table" in names:
        s = s + named["bias_table"][:, (j - i).clamp(-3, 3) + 3]
    seen = (j <= i).expand(2, 1, rows, rows)
    if "prefix_lens" in names:
        seen = seen | (j < named["prefix_lens"].view(2, 1, 1, 1))
    if "document_ids" in names:
        ids = named["document_ids"]
        seen = seen & (ids[:, None, :, None] == ids[:, None, None])
    if window[0] >= 0:
        seen = seen & (j >= i - window[0])
    expected = s.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(bent, expected, atol=1e-5, rtol=1e-4)


MASKED = Problem(op="retnet", mask="explicit", dim_qk=16, dim_v=16, batch=1, seqlen_q=8, seqlen_k=8)


@pytest.mark.parametrize(
    ("baseline", "mode", "keeps"),
    [
        (Compiled(), "default", True),
        (CompiledAutotuned(), "max-autotune-no-cudagraphs", False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_torch_times_beside_others_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, baseline: Compiled, mode: str, keeps: bool
) -> None:
    before = inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_ahead, "run_ahead", lambda *called: ran.append(called))
    monkeypatch.setattr(
        compiled,
        "in_processes",
        lambda function, work, processes: [function(*arguments) for arguments in work],
    )
    backward = replace(MASKED, direction="backward")
    kept = {name: getattr(inductor_config, name) for name in ("fx_graph_cache", "compile_threads")}
    with (
        inductor_config.patch({"autotune_local_cache": True, **kept}),
        functorch_config.patch(enable_autograd_cache=before[1]),
    ):
        baseline.get_ready([MASKED, backward], 16)
        assert (inductor_config.compile_threads, inductor_config.autotune_local_cache) == (1, False)
        after = inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache
    assert after == (before if keeps else (False, False))
    assert ran == [(baseline, MASKED, "forward"), (baseline, backward, "backward")]
    modes: list[Any] = []

    def recorded(made: Any, **options: Any) -> Any:
        modes.append(options)
        return made

    monkeypatch.setattr(torch, "compile", recorded)
    assert baseline.available(MASKED) == ""
    q, k, v = (torch.ones(1, MASKED.heads_q, 8, 16) for _ in range(3))
    mask = torch.ones(MASKED.heads_q, 8, 8)
    assert torch.equal(
        baseline.function(MASKED)(q, k, v, mask), Eager().function(MASKED)(q, k, v, mask)
    )
    assert modes == [{"dynamic": False, "mode": mode}]


def test_what_is_compiled_ahead_has_the_values_of_a_race() -> None:
    problem = replace(SINKS, modifications=("softcap", "alibi_slopes", "sinks"))
    blank, made = blank_inputs(problem, "cpu"), inputs_of({}, problem, seed=3)
    for name in others_of(problem):
        assert blank.tensors[name].shape == made.tensors[name].shape == (2,)
    tokens = Problem(
        batch=7, heads_q=4, heads_kv=2, seqlen_q=2, seqlen_k=50, dim_qk=16, dim_v=16,
        packed_rows=(9, 200),
    )  # fmt: skip
    blank, made = blank_inputs(tokens, "cpu"), inputs_of({}, tokens, seed=3)
    for name, tensor in made.tensors.items():
        assert tensor.shape == blank.tensors[name].shape
    entry = Copy().entry(tokens, "forward", "copy")
    entry.prepare([made], [])
    entry.run(0)


# --- what a baseline computes ---------------------------------------------------------------------


def half_of_v(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that leaves the last columns zero, as kernels of fewer of them do."""
    o: torch.Tensor = make_sdpa(SDPBackend.MATH, PLAIN)(q, k, v)
    return torch.cat([o[..., :8], torch.zeros_like(o[..., 8:])], -1)


@pytest.mark.parametrize("kind", [ForwardCall, BackwardCall, StepCall])
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (make_sdpa(SDPBackend.MATH, PLAIN), ""),
        (half_of_v, r"differ from ours by (0\.[1-9]|1)"),
        (lambda q, k, v: attention(q, k, v, causal=True)[0] * math.nan, "by nan"),
    ],
)
def test_a_baseline_with_other_results_is_not_timed(
    kind: type[Call], function: Function, wrong: str
) -> None:
    problem = PLAIN if kind is ForwardCall else replace(PLAIN, direction="backward")
    entry = kind(name="x", function=function)
    check = partial(check_results, problem, None)
    guarded = GuardedEntry("x", lambda: entry, check)
    with pytest.raises(DisagreementError, match=wrong) if wrong else nullcontext():
        guarded.prepare([make_inputs(problem, seed=0, device="cpu")], [])


def test_a_single_gradient_that_is_not_a_number_is_seen() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o: torch.Tensor = make_sdpa(SDPBackend.MATH, PLAIN)(q, k, v + (v - v.detach()).sqrt())
        return o

    problem = replace(PLAIN, direction="backward")
    entry = BackwardCall(name="x", function=attend)
    entry.prepare([inputs := make_inputs(problem, seed=0, device="cpu")], [])
    with pytest.raises(DisagreementError, match=r"by 0, 0, (nan|inf) of their norm"):
        check_results(problem, None, entry, inputs)


def test_all_baselines_of_the_same_problem_are_compared_with_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {x.name for x in BASELINES.values() if not x.same} == {"copy", "plain", "equal_lengths"}
    checked: dict[str, bool] = {}

    class Guarded(GuardedEntry):
        def __init__(self, name: str, make: Any, check: Any = None) -> None:
            super().__init__(name, make, check)
            checked[name] = check is not None

    monkeypatch.setattr(comparison, "GuardedEntry", Guarded)
    wanted = trials(["score_modifications"], words=["alibi_4k"], modes=["forward"])
    session = session_of(wanted, lambda problem, name: 100.0, extra=("flash_attn_4",))
    list(session.rows())
    assert checked["flex forward"]
    assert not checked["plain forward"]


# --- suites, speeds and bars ----------------------------------------------------------------------


def test_the_named_cases_of_flex_attention_are_there() -> None:
    suite = SUITES["flex_attention"]
    shapes = {(c.shape.dim_qk, c.shape.seqlen_q) for c in suite.cases}
    assert shapes == {(64, 4096), (64, 16384), (128, 4096), (128, 16384)}
    kinds = {case.name.split("_")[0] for case in suite.cases}
    assert {"softcap", "alibi", "window"} <= kinds
    assert len(suite.cases) == 4 * len(kinds)
    for trial in trials([suite.name]):
        assert BASELINES["flex"].available(trial.problem) == ""
        assert BASELINES["plain"].available(trial.problem) == ""


@pytest.fixture
def rows_of_packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(dispatch, "environment_of", lambda device, in_force: GPU)
    yield lambda session: [row for _, row in session.rows()]
    dispatch.invalidate()


def test_packed_sequences_are_compared_with_equal_ones_by_work(rows_of_packing: Any) -> None:
    suite, pipeline = SUITES["packed_sequences"], FakePipeline()
    squares = sum(x * x for x in suite.lengths)
    assert (sum(suite.lengths), len(suite.lengths), squares) == (16384, 18, 27471084)
    names = ["equal_lengths"]
    session = session_of(
        trials([suite.name], modes=["forward"])[:1],
        lambda problem, name: 110.0 if name.startswith("equal") else 120.0,
        baselines=[BASELINES[name] for name in names],
        pipeline=pipeline,
    )
    (row,) = rows_of_packing(session)
    ratio = row["ratios"]["equal_lengths forward"]["ratio"]
    assert ratio == pytest.approx((squares / 120.0) / (9 * 1664**2 / 110.0))
    assert row["entries"]["call"]["tflops"] == pytest.approx(4 * 16 * 128 * squares / 2 / 120e6)
    equal = row["entries"]["equal_lengths forward"]["tflops"]
    assert equal == pytest.approx(4 * 16 * 128 * 9 * 1664**2 / 2 / 110e6)
    (batch,) = pipeline.batches
    assert {"packed" in name for name in batch} == {True, False}  # both are built, in one batch


def row_of(case: str, ratio: float, **fields: Any) -> dict[str, Any]:
    figures = {"plain forward": {"ratio": ratio, "error": 0.001}}
    entries = {"plain forward": {"median_us": 400.0}}
    row = {"key": f"{case} forward fp16", "case": case, "problem": {"causal": True}}
    return {**row, "ratios": figures, "entries": entries, **fields}


def test_a_case_has_bars_of_its_own() -> None:
    suite = replace(SUITES["score_modifications"], bars={})
    rows = [row_of("alibi_4k", 0.93), row_of("softcap_4k", 0.79), row_of("window_16k", 5.6)]
    assert results.summarise(suite, rows)["plain forward"]["missed"] == [
        "softcap_4k forward fp16 (0.8)"
    ]


def test_documents_are_held_to_their_share_of_tiles() -> None:
    # 1.1 * 0.25 * 400 us + 5 us are 115 us: 3.478 times as fast as on all tiles.
    suite = SUITES["flex_attention"]
    rows = [row_of("a", 3.47, share_of_tiles=0.25), row_of("b", 3.49, share_of_tiles=0.25)]
    summary = results.summarise(suite, [*rows, row_of("c", 1.0)])
    assert summary["plain forward"]["missed"] == ["a forward fp16 (3.48)"]


def test_the_share_of_tiles_is_that_of_pairs_seen() -> None:
    problem = Problem(causal=True, window_size=(300, -1), seqlen_q=1024, seqlen_k=1024)
    i, j = torch.arange(1024)[:, None], torch.arange(1024)

    def tiles(seen: torch.Tensor) -> int:
        return int(seen.view(1024 // TILE, TILE, -1, TILE).any(3).any(1).sum())

    assert share_of_tiles(problem) == tiles((j <= i) & (j >= i - 300)) / tiles(j <= i)
