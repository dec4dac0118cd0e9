"""The cost model of backward candidates of family sm80."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100, RTX4090
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.arch.occupancy import registers_per_thread
from attention_autotuner.codegen.render import render
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.core.report import KernelReport
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.cost_model import estimate, rank, refine
from attention_autotuner.kernels.scores_backward_sm80.cost import (
    key_step,
    row_step,
    work_of,
)
from attention_autotuner.kernels.scores_backward_sm80.resources import (
    ENOUGH_CTAS,
    KeyShape,
    RowShape,
    shapes,
    shares_of_group,
)
from attention_autotuner.tuning.shortlist import shape_of, shortlist
from tests.candidates import KEYS, ROWS, backward
from tests.compiler_reports import compiler_report, kernel_report
from tests.pass_names import pass_named

SPEC = H100().spec
SM80 = (8, 0)  # a capability that runs no other family
PROBLEM = Problem(direction="backward")
# Kernel names as nvcc 13.0 mangles them.
CONFIG = "IN37_GLOBAL__N__7a84b705_5_k1_cu_7e424e306ConfigE"
ARGUMENTS = "vNS_17BackwardArgumentsE"
MANGLED = {
    "keys": f"_ZN19attention_autotuner23attention_backward_keys{CONFIG}Lb0EE{ARGUMENTS}NS_8TileListE",
    **{
        name: f"_ZN19attention_autotuner23attention_backward_rowsINS_13RowPassTraits{CONFIG}"
        f"NS3_2D{name[1]}ELNS_6ResultE{number}EEELb0EE{ARGUMENTS}NS_8TileListE"
        for number, name in enumerate(("dq", "dk", "dv"))
    },
}
PREPARE = f"_ZN19attention_autotuner26attention_backward_prepare{CONFIG}E{ARGUMENTS}l"


FUSED, PAIR, SPLIT = backward("one_pass"), backward("two_kernels"), backward("three_kernels")


def keys_of(candidate: Candidate) -> KeyShape:
    shape = shapes(candidate)[0]
    assert isinstance(shape, KeyShape)
    return shape


def products(candidate: Candidate) -> float:
    """FLOPs of all passes on the unmasked problem, with the padding of tiles in them."""
    total = 0.0
    for shape in shapes(candidate):
        work = work_of(PROBLEM, shape, 16, SPEC, longest_first=False)
        total += work.counts.flops * sum(work.steps) * work.heads * work.slices
    return total


def test_products_add_up_to_the_problems_and_what_plans_repeat() -> None:
    assert products(FUSED) == PROBLEM.flops
    # S and dP again for dQ; and then for dK, and S for dV.
    unit = PROBLEM.flops / 5
    assert products(PAIR) == 7 * unit
    assert products(SPLIT) == 8 * unit
    sliced = backward("three_kernels", dv=replace(ROWS, slices=2))
    assert products(sliced) == 9 * unit


def test_grouped_heads_walk_the_queries_of_their_group() -> None:
    grouped = replace(PROBLEM, heads_kv=4)
    for shape in shapes(PAIR):
        selected, many = (
            work_of(p, shape, 16, SPEC, longest_first=False) for p in (PROBLEM, grouped)
        )
        assert sum(many.steps) * many.heads == sum(selected.steps) * selected.heads
        assert many.heads == (64 if shape.name == "dq" else 16)
        assert many.streams == 16


def test_more_rows_a_warp_read_less_shared_memory() -> None:
    thin, thick = (
        keys_of(backward("one_pass", keys=replace(KEYS, warp_pairs=pairs))) for pairs in (8, 4)
    )
    assert key_step(thick, 16, SPEC).reads < key_step(thin, 16, SPEC).reads
    few, many = (
        RowShape(name="dq", knobs=replace(ROWS, warps=warps), padded_dim_qk=128, padded_dim_v=128)
        for warps in (4, 8)
    )
    assert row_step(few, 16).reads < row_step(many, 16).reads


def test_parts_read_the_keys_again() -> None:
    whole, halves = (
        key_step(keys_of(backward("one_pass", keys=replace(KEYS, query_subtiles=p))), 16, SPEC)
        for p in (1, 2)
    )
    assert halves.reads - whole.reads == KEYS.block_n * (128 + 128) * 2


def test_sums_go_four_at_a_time_where_the_gpu_can() -> None:
    shape = keys_of(FUSED)
    new, old = key_step(shape, 16, SPEC), key_step(shape, 16, A100().spec)
    assert new.sum_bytes == old.sum_bytes == 64 * 128 * 4
    assert old.other_instructions - new.other_instructions == new.sum_bytes / 128 * 3 / 4


def test_an_estimate_is_the_sum_of_kernels_and_edges() -> None:
    prediction = estimate(PROBLEM, FUSED, SPEC)
    rows = 4 * 16 * 4096
    # O and dO in 16 bits, statistics, and the fp32 sums cleared and read; dQ written.
    auxiliary_bytes = rows * (2 * 2 * 128 + 16 + 2 * 4 * 128 + 2 * 128)
    assert prediction.terms["auxiliary_us"] == pytest.approx(
        auxiliary_bytes * 1e6 / SPEC.hbm_bytes_per_second
    )
    assert prediction.terms["launch_us"] == 3 * SPEC.launch_overhead_us
    assert prediction.terms[f"{prediction.limiter}_us"] == max(prediction.terms.values())
    pair = estimate(PROBLEM, PAIR, SPEC)
    assert pair.terms["launch_us"] == 3 * SPEC.launch_overhead_us
    assert pair.terms["auxiliary_us"] < prediction.terms["auxiliary_us"]
    assert estimate(PROBLEM, SPLIT, SPEC).terms["launch_us"] == 4 * SPEC.launch_overhead_us


@pytest.mark.parametrize("policy", [A100(), H100(), RTX4090()])
def test_no_prediction_beats_the_tensor_cores(policy: A100 | H100 | RTX4090) -> None:
    spec = policy.spec
    rate = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz
    for selected in policy.on(SM80).legal(PROBLEM)[::29]:
        assert estimate(PROBLEM, selected, spec).us >= products(selected) / rate * 0.999


def test_levels_are_of_the_kernels_speed() -> None:
    # FlashAttention-2's published backward runs at about half of the tensor cores' rate on these GPUs.
    for spec in (SPEC, H200_SPEC, A100().spec):
        best = rank(PROBLEM, H100(spec).on(SM80).legal(PROBLEM), spec)[0][1]
        peak = spec.mma_flops_per_clk_per_sm * spec.num_sms * spec.sm_clock_mhz
        assert 0.5 <= PROBLEM.flops / best.us / peak <= 0.9


def test_fused_leads_and_splitting_comes_last() -> None:
    for causal in (False, True):
        problem = replace(PROBLEM, causal=causal)
        ranked = rank(problem, H100().on(SM80).legal(problem), SPEC)
        best = {
            plan: next(
                prediction.us for selected, prediction in ranked if selected.knobs.plan == plan
            )
            for plan in ("one_pass", "two_kernels", "three_kernels")
        }
        assert best["one_pass"] < best["two_kernels"] < best["three_kernels"]


def test_causal_costs_about_half_on_long_sequences() -> None:
    long = replace(PROBLEM, seqlen_q=8192, seqlen_k=8192)
    ordered = backward("one_pass", cta_order="longest_first")
    half = estimate(replace(long, causal=True), ordered, SPEC).us
    assert 0.45 <= half / estimate(long, FUSED, SPEC).us <= 0.6


def test_kernels_are_told_by_their_names() -> None:
    for name, mangled in MANGLED.items():
        assert pass_named(FUSED if name == "keys" else SPLIT, mangled) == name
    assert pass_named(FUSED, PREPARE) is pass_named(SPLIT, PREPARE) is None


def test_refining_with_what_was_assumed_changes_nothing() -> None:
    for selected in (FUSED, PAIR, SPLIT):
        kernels = tuple(
            kernel_report(MANGLED[kernel.name], registers=registers_per_thread(kernel, SPEC))
            for kernel in resources.kernels(selected)
        )
        report = compiler_report(*kernels, registers=255)
        assert refine(PROBLEM, selected, SPEC, report) == estimate(PROBLEM, selected, SPEC)


def test_a_report_speaks_of_each_pass() -> None:
    clean = {name: kernel_report(mangled, registers=200) for name, mangled in MANGLED.items()}
    spills: dict[str, Any] = {"spill_store_bytes": 400, "spill_load_bytes": 400}

    def refined(**changed: KernelReport) -> float:
        kernels = (clean | changed).values()
        return refine(PROBLEM, PAIR, SPEC, compiler_report(*kernels, registers=200)).us

    spilled = refined(dq=replace(clean["dq"], **spills))
    assert spilled > refined()
    # dK's pass is not of this plan, and spills before the loops hardly cost.
    assert refined(dk=replace(clean["dk"], **spills)) == refined()
    outside = refined(dq=replace(clean["dq"], **spills, loop_spills=False))
    assert refined() < outside < spilled
    # Where kernels are not told apart, the worst of all counts for each.
    worst = refine(PROBLEM, PAIR, SPEC, compiler_report(registers=200, **spills)).us
    assert worst > spilled
    assert refined(keys=replace(clean["keys"], static_smem_bytes=200 * 1024)) == inf


def test_thousands_of_candidates_are_ranked_in_a_second_or_two() -> None:
    problem = replace(PROBLEM, causal=True, dim_qk=64, dim_v=64, seqlen_q=5000, seqlen_k=5000)
    candidates = H100().on(SM80).legal(problem)
    start = time.process_time()
    rank(problem, candidates, SPEC)
    assert time.process_time() - start < 0.8 * max(1.0, len(candidates) / 1000)


def test_a_shortlist_does_not_spend_itself_on_one_main_pass() -> None:
    for deterministic in (False, True):
        problem = replace(PROBLEM, deterministic=deterministic)
        ranked = rank(problem, H100().on(SM80).legal(problem), SPEC)
        default = H100().on(SM80).default(problem)
        chosen = [selected for selected, _ in shortlist(ranked, default, 8)]
        assert chosen[0] == default
        assert len(chosen) == len(set(chosen)) == 9
        assert len({shape_of(selected) for selected in chosen}) >= 6


@pytest.mark.parametrize(
    ("heads", "heads_kv", "batch", "seqlen_k", "shares"),
    [
        (32, 32, 1, 128, 1),
        (32, 8, 4, 8192, 1),
        (8, 1, 1, 8192, 4),
        (12, 1, 1, 4096, 12),
        (6, 2, 1, 64, 3),
    ],
)
def test_groups_are_shared_where_blocks_of_keys_are_few(
    heads: int, heads_kv: int, batch: int, seqlen_k: int, shares: int
) -> None:
    problem = replace(
        PROBLEM,
        heads_q=heads,
        heads_kv=heads_kv,
        batch=batch,
        seqlen_q=seqlen_k,
        seqlen_k=seqlen_k,
    )
    assert shares_of_group(problem, FUSED) == shares
    whole, shared = (
        work_of(problem, keys_of(FUSED), 16, SPEC, longest_first=False, shares=n)
        for n in (1, shares)
    )
    assert shared.heads == shares * whole.heads
    assert sum(shared.steps) * shares == sum(whole.steps)


def test_enough_ctas_are_as_many_as_the_launch_wants() -> None:
    (prediction,) = re.findall(r"kEnoughCtas = (\d+);", render(FUSED).text)
    assert int(prediction) == ENOUGH_CTAS
