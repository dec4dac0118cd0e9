from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100, RTX4090
from attention_autotuner.arch.h100 import H200_SPEC
from attention_autotuner.arch.occupancy import registers_per_thread
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.cost_model import Usage, estimate, predict, rank, refine
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.shared.calibration import Sample, calibrate, loss
from attention_autotuner.kernels.shared.coefficients import (
    BOUNDS,
    FITTED,
    Coefficients,
)
from attention_autotuner.kernels.shared.schedule import (
    makespan,
    tiles_of,
)
from attention_autotuner.tuning.model_card import correlation
from tests.candidates import forward
from tests.compiler_reports import compiler_report
from tests.recorded_searches import BY_HAND, Log, read_logs

SPEC = H100().spec


# --- the recorded searches ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs() -> list[Log]:
    return read_logs()


def best_share(log: Log, coefficients: Coefficients, picks: int) -> float:
    """Best time of the log over the best of the model's first picks: 1.0 means nothing was lost."""
    ranked = log.ranked(coefficients)
    best = min(run.measured_us for run in ranked)
    return best / min(run.measured_us for run in ranked[:picks])


def test_logs_are_read_whole(logs: list[Log]) -> None:
    assert [(log.name, len(log.runs)) for log in logs] == [
        ("A100 256/256", 42),
        ("RTX4090 128/128", 49),
        ("RTX4090 256/128", 34),
        ("RTX4090 256/256", 24),
        ("RTX4090 64/64", 42),
    ]


@pytest.mark.parametrize(
    ("picks", "average", "worst"), [(1, 0.93, 0.9), (3, 0.97, 0.95), (10, 0.99, 0.98)]
)
def test_first_picks_of_the_model_come_near_the_best_of_each_log(
    logs: list[Log], picks: int, average: float, worst: float
) -> None:
    shares = [best_share(log, FITTED, picks) for log in logs]
    assert fmean(shares) >= average
    assert min(shares) >= worst


def test_predictions_correlate_with_the_measurements_of_each_log(logs: list[Log]) -> None:
    # All candidates of a log do the same work, so any correlation is the model's own.
    correlations = []
    for log in logs:
        predicted = [log.predict_us(run, FITTED) for run in log.runs]
        measured = [run.measured_us for run in log.runs]
        correlations.append(correlation(predicted, measured))
    assert fmean(correlations) >= 0.7
    assert min(correlations) >= 0.5


# Of the tables as their source prints them.
FIGURES = {
    "A100 256/256": (1.0, 1.0, 0.7867, 1.0591),
    "RTX4090 128/128": (0.9721, 0.9900, 0.7923, 1.1309),
    "RTX4090 256/128": (0.9548, 0.9976, 0.8849, 1.1106),
    "RTX4090 256/256": (1.0, 1.0, 0.7836, 1.1053),
    "RTX4090 64/64": (0.9229, 0.9959, 0.6215, 1.1313),
}


def test_the_columns_give_the_figures_of_their_source(logs: list[Log]) -> None:
    samples = []
    for log in logs:
        predicted = [log.predict_us(run, FITTED) for run in log.runs]
        measured = [run.measured_us for run in log.runs]
        figures = (
            best_share(log, FITTED, 1),
            best_share(log, FITTED, 3),
            correlation(predicted, measured),
            log.predict_us(log.ranked(FITTED)[0], FITTED) / min(measured),
        )
        assert figures == pytest.approx(FIGURES[log.name], abs=6e-5), log.name
        samples += [
            Sample(
                group=log.name, measured_us=run.measured_us, predict=partial(log.predict_us, run)
            )
            for run in log.runs
        ]
    assert loss(samples, FITTED) == pytest.approx(0.01512, abs=1e-6)
    assert loss(samples, BY_HAND) == pytest.approx(0.019244, abs=1e-6)


def test_the_rtx_4090s_default_at_head_dim_128_has_the_tile_that_the_search_sides_with(
    logs: list[Log],
) -> None:
    log = next(log for log in logs if log.name == "RTX4090 128/128")

    def measured_us(knobs: ForwardKnobs) -> float:
        names = ("block_m", "block_n", "warps_m", "warps_n", "num_stages", "k_slice")
        tile = [getattr(knobs, name) for name in names]
        alike = [
            run
            for run in log.runs
            if [getattr(run.candidate.knobs, name) for name in names] == tile
        ]
        return min(run.measured_us for run in alike)

    general, specific = (policy.default(log.problem).knobs for policy in (A100(), RTX4090()))
    assert measured_us(general) > 1.08 * measured_us(specific)
    masked = replace(log.problem, op="retnet", mask="explicit")
    for problem in (replace(log.problem, dim_qk=96, dim_v=96), masked):  # not looked at there
        assert A100().default(problem).knobs == RTX4090().default(problem).knobs


def test_level_of_the_prediction_is_within_a_quarter(logs: list[Log]) -> None:
    for log in logs:
        ranked = log.ranked(FITTED)
        best = min(run.measured_us for run in ranked)
        assert 0.75 <= log.predict_us(ranked[0], FITTED) / best <= 1.25, log.name


# Version 4 of docs/kernel_log.md: TFLOP/s on an H200, 16k tokens of hidden size 2048, fp16, for the tile it used.
H200_RATES = [
    (64, 4096, False, 363),
    (64, 4096, True, 341),
    (64, 512, False, 303),
    (128, 4096, False, 376),
    (128, 4096, True, 377),
    (128, 512, False, 333),
    (256, 4096, False, 315),
    (256, 4096, True, 326),
    (256, 512, False, 256),
]
H200_TILES = {64: (128, 128, 4), 128: (128, 48, 4), 256: (128, 64, 8)}


@pytest.mark.parametrize(("dim", "seqlen", "causal", "tflops"), H200_RATES)
def test_level_of_these_kernels_on_an_h200_is_within_a_fifth(
    dim: int, seqlen: int, causal: bool, tflops: float
) -> None:
    heads = 2048 // dim
    problem = Problem(
        batch=16384 // seqlen,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        dim_qk=dim,
        dim_v=dim,
        causal=causal,
    )
    block_m, block_n, warps = H200_TILES[dim]
    candidate = forward(
        padded_dim_qk=dim,
        padded_dim_v=dim,
        k_slice=dim,
        block_m=block_m,
        block_n=block_n,
        warps_m=warps,
        cta_order="longest_first" if causal else "raster",
    )
    predicted = problem.flops / estimate(problem, candidate, H200_SPEC).us * 1e-6
    assert predicted == pytest.approx(tflops, rel=0.2)


# --- calibration ----------------------------------------------------------------------------------


def predicted_us(problem: Problem, candidate: Candidate, fit: Coefficients) -> float:
    return estimate(problem, candidate, SPEC, fit).us


def simulated_samples(coefficients: Coefficients) -> list[Sample]:
    problem = Problem(seqlen_q=2048, seqlen_k=2048, causal=True)
    candidates = [
        forward(block_m=m, block_n=n, warps_m=w, num_stages=s, ctas_per_sm=c)
        for m, n, w, s, c in itertools.product((64, 128), (32, 64, 128), (4,), (1, 2), (1, 2))
    ]
    return [
        Sample(
            group="one",
            measured_us=estimate(problem, c, SPEC, coefficients).us,
            predict=partial(predicted_us, problem, c),
        )
        for c in candidates
    ]


def test_calibration_moves_towards_the_coefficients_that_made_the_data() -> None:
    coefficients = replace(BY_HAND, load_latency_clk=900.0, smem_efficiency=0.75, cta_clk=4000.0)
    samples = simulated_samples(coefficients)
    fitted = calibrate(samples, BY_HAND)
    assert loss(samples, fitted) < 0.1 * loss(samples, BY_HAND)
    assert fitted == calibrate(samples, BY_HAND)
    assert all(low <= getattr(fitted, name) <= high for name, (low, high) in BOUNDS.items())


def test_calibration_of_perfect_data_stays() -> None:
    assert calibrate(simulated_samples(BY_HAND), BY_HAND) == BY_HAND


def test_calibration_refuses_too_little_data_and_unknown_names() -> None:
    samples = simulated_samples(BY_HAND)
    with pytest.raises(ValueError, match="at least 2 samples"):
        calibrate(samples[:1], BY_HAND)
    with pytest.raises(ValueError, match="speed_of_light"):
        calibrate(samples, BY_HAND, bounds={"speed_of_light": (0.0, 1.0)})


def test_shipped_coefficients_are_as_good_as_a_fresh_fit_to_the_logs(logs: list[Log]) -> None:
    samples = [
        Sample(
            group=log.name,
            measured_us=run.measured_us,
            predict=partial(log.predict_us, run),
        )
        for log in logs
        for run in log.runs
        if run.measured_us < 5000.0  # four runs spilled; only a compiler's report could tell
    ]
    assert loss(samples, FITTED) <= 1.25 * loss(samples, calibrate(samples, BY_HAND))


# --- the schedule, against simulations one tile at a time -----------------------------------------


def tile_list(costs: tuple[int, ...], heads: int, slices: int, longest_first: bool) -> list[int]:
    if longest_first:
        return [cost for cost in costs for _ in range(heads * slices)]
    return [cost for _ in range(heads) for cost in costs for _ in range(slices)]


def simulate(tiles: list[int], slots: int, persistent: bool) -> int:
    if persistent:
        return max(sum(tiles[slot::slots]) for slot in range(min(slots, len(tiles))))
    free = [0] * slots
    for tile in tiles:
        slot = free.index(min(free))
        free[slot] += tile
    return max(free)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "slices", "slots"),
    [(1, 1, 1, 4), (5, 3, 1, 4), (8, 6, 2, 7), (16, 5, 1, 16), (3, 40, 4, 11), (12, 9, 1, 8)],
)
def test_makespan_equals_a_simulation_tile_by_tile(
    rows: int, heads: int, slices: int, slots: int, longest_first: bool, persistent: bool
) -> None:
    costs = tuple(3 + 2 * row for row in reversed(range(rows)))
    predicted = makespan(
        costs,
        heads=heads,
        value_slices=slices,
        longest_first=longest_first,
        persistent=persistent,
        slots=slots,
    )
    assert predicted == simulate(tile_list(costs, heads, slices, longest_first), slots, persistent)


def test_the_tail_heads_of_a_list_may_be_side_by_side() -> None:
    costs = (8, 5, 2)
    order = [*costs * 4, *(cost for cost in costs for _ in range(3))]
    predicted = makespan(
        costs,
        heads=7,
        value_slices=1,
        longest_first=False,
        persistent=False,
        slots=4,
        tail_heads=3,
    )
    assert predicted == simulate(order, 4, False)
    assert predicted < simulate(tile_list(costs, 7, 1, False), 4, False)


def test_long_greedy_lists_are_within_one_percent_of_the_simulation() -> None:
    costs = tuple(range(40, 0, -1))
    predicted = makespan(
        costs, heads=300, value_slices=1, longest_first=False, persistent=False, slots=96
    )
    exact = simulate(tile_list(costs, 300, 1, False), 96, False)
    assert predicted == pytest.approx(exact, rel=0.01)


@dataclass(frozen=True, kw_only=True)
class Shifted(Problem):
    """A problem of 300 queries and 500 keys whose diagonal lies anywhere."""

    seqlen_q: int = 300
    seqlen_k: int = 500
    offset: int = 0

    def offset_of(self, rows: int, keys: int) -> int:
        """The offset of its own."""
        return self.offset


def test_tiles_of_queries_follow_the_mask() -> None:
    def tiles(**mask: Any) -> tuple[int, ...]:
        return tiles_of(Shifted(**mask), block=128, step=64, by_queries=True)

    assert tiles(causal=False) == (8, 8, 8)
    # Last rows 127, 255, 299 see 328, 456 and 500 keys under bottom-right alignment.
    assert tiles(causal=True, offset=200) == (8, 8, 6)
    assert tiles(causal=True, offset=0) == (5, 4, 2)
    # Rows that see no key cost no tile.
    assert tiles(causal=True, offset=-256) == (1, 0, 0)


@pytest.mark.parametrize(("block", "step"), [(128, 64), (64, 128), (32, 16)])
@pytest.mark.parametrize("offset", [-256, -3, 0, 200])
def test_tiles_of_keys_are_those_of_queries_seen_from_the_other_side(
    block: int, step: int, offset: int
) -> None:
    seqlen_q, seqlen_k = 300, 500
    expected = []
    for first in range(0, seqlen_k, block):
        keys = range(first, min(first + block, seqlen_k))
        starts = range(0, seqlen_q, step)
        met = [
            start
            for start in starts
            if any(key <= row + offset for row in range(start, start + step) for key in keys)
        ]
        # From the first tile with a row that sees a key, or would if it existed, to the last of all.
        expected.append(len([start for start in starts if met and start >= met[0]]))
    problem = Shifted(causal=True, offset=offset)
    predicted = tiles_of(problem, block=block, step=step, by_queries=False)
    assert predicted == tuple(expected)
    full = tiles_of(Shifted(causal=False), block=block, step=step, by_queries=False)
    assert full == (-(-seqlen_q // step),) * -(-seqlen_k // block)


# --- properties of the model ----------------------------------------------------------------------


def test_a_candidate_that_fits_no_sm_takes_forever() -> None:
    usage = Usage(registers=128, smem_bytes=SPEC.smem_per_block_bytes + 1)
    predicted = predict(Problem(), forward(), SPEC, (usage,))
    assert predicted.us == inf
    assert predicted.limiter == "residency"
    assert predicted.occupancy == 0


def test_terms_have_units_and_the_limiter_is_the_largest() -> None:
    predicted = estimate(Problem(), forward(), SPEC)
    assert all(name.endswith("_us") and value >= 0.0 for name, value in predicted.terms.items())
    assert predicted.terms[f"{predicted.limiter}_us"] == max(predicted.terms.values())
    assert predicted.us >= max(
        predicted.terms[f"{unit}_us"] for unit in ("tensor", "smem", "exp", "hbm")
    )


def test_no_prediction_beats_the_tensor_cores_or_the_memory() -> None:
    for problem in (Problem(), Problem(seqlen_q=1, batch=64), Problem(causal=True, seqlen_k=8192)):
        predicted = estimate(problem, forward(), SPEC)
        assert predicted.us >= predicted.terms["hbm_us"]
        assert predicted.us >= predicted.terms["tensor_us"]
        rate = SPEC.mma_flops_per_clk_per_sm * SPEC.num_sms * SPEC.sm_clock_mhz
        visible = problem.flops if not problem.causal else 0
        assert predicted.us >= visible / rate


def test_time_grows_with_the_work() -> None:
    times = [
        estimate(Problem(seqlen_q=n, seqlen_k=n, causal=True), forward(), SPEC).us
        for n in (512, 1024, 2048, 4096, 8192)
    ]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(4.0, rel=0.25)


def test_causal_costs_about_half_on_long_sequences() -> None:
    full = estimate(Problem(seqlen_q=8192, seqlen_k=8192), forward(), SPEC).us
    ordered = forward(cta_order="longest_first")
    half = estimate(Problem(seqlen_q=8192, seqlen_k=8192, causal=True), ordered, SPEC).us
    assert 0.45 <= half / full <= 0.6


def test_sixteen_rows_a_warp_are_bound_by_shared_memory_and_thirty_two_are_not() -> None:
    spec = A100().spec
    thin = estimate(Problem(), forward(block_m=64, warps_m=4), spec)
    thick = estimate(Problem(), forward(block_m=128, warps_m=4), spec)
    assert thin.limiter == "smem"
    assert thick.limiter == "tensor"
    assert thick.us < thin.us


def test_a_lone_wave_prefers_smaller_tiles() -> None:
    # 1 batch, 4 heads, 1024 rows: 32 CTAs of 128 rows leave three quarters of the SMs idle.
    problem = Problem(batch=1, heads_q=4, heads_kv=4, seqlen_q=1024, seqlen_k=1024)
    large = estimate(problem, forward(block_m=128), SPEC)
    small = estimate(problem, forward(block_m=64), SPEC)
    assert small.us < large.us
    assert large.waves < 1.0


def test_an_order_that_starts_with_long_tiles_balances_causal_work_better() -> None:
    problem = Problem(batch=1, heads_q=16, heads_kv=16, causal=True)
    rows = estimate(problem, forward(cta_order="raster"), SPEC)
    heads = estimate(problem, forward(cta_order="longest_first"), SPEC)
    assert heads.terms["imbalance_us"] < rows.terms["imbalance_us"]


def test_narrow_copies_cost_instructions() -> None:
    problem = Problem(alignment_bytes=2)
    large = estimate(problem, forward(), SPEC)
    narrow = estimate(problem, forward(copy_bytes=2), SPEC)
    assert narrow.terms["issue_us"] > 1.2 * large.terms["issue_us"]


def test_refining_with_what_was_assumed_changes_nothing() -> None:
    candidate = forward()
    (kernel,) = resources.kernels(candidate)
    report = compiler_report(registers=registers_per_thread(kernel, SPEC))
    assert refine(Problem(), candidate, SPEC, report) == estimate(Problem(), candidate, SPEC)


def test_registers_of_the_report_decide_occupancy() -> None:
    candidate = forward(num_stages=1)
    few = refine(Problem(), candidate, SPEC, compiler_report(registers=128))
    many = refine(Problem(), candidate, SPEC, compiler_report(registers=255))
    assert few.occupancy > many.occupancy


def test_spills_cost_time_and_less_so_outside_loops() -> None:
    clean = refine(Problem(), forward(), SPEC, compiler_report())
    spills: dict[str, Any] = {"spill_store_bytes": 200, "spill_load_bytes": 200}
    outside = refine(Problem(), forward(), SPEC, compiler_report(**spills, loop_spills=False))
    inside = refine(Problem(), forward(), SPEC, compiler_report(**spills, loop_spills=True))
    assert clean.us < outside.us < inside.us
    assert outside.us < 1.02 * clean.us


def test_static_shared_memory_counts() -> None:
    predicted = refine(Problem(), forward(), SPEC, compiler_report(static_smem_bytes=200 * 1024))
    assert predicted.us == inf


def test_ranking_is_sorted_and_breaks_ties_by_name() -> None:
    # Without a mask the order of CTAs changes nothing, so these two tie.
    twins = [forward(cta_order=order) for order in ("raster", "longest_first")]
    problem = Problem(batch=1, heads_q=2, heads_kv=2)
    ranked = rank(problem, [*reversed(twins), forward(block_m=64)], SPEC)
    times = [predicted.us for _, predicted in ranked]
    assert times == sorted(times)
    names = [candidate.name for candidate, _ in ranked if candidate.knobs.block_m == 128]
    assert names == sorted(names)


def test_a_thousand_candidates_are_ranked_in_well_under_a_second() -> None:
    problem = Problem(causal=True, batch=3, heads_q=20, heads_kv=20, seqlen_q=5000, seqlen_k=5000)
    candidates = H100().legal(problem)
    assert len(candidates) >= 500
    start = time.process_time()
    rank(problem, candidates, SPEC)
    seconds = time.process_time() - start
    assert seconds < 0.8 * max(1.0, len(candidates) / 1000)
