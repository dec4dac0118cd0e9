"""The GPU tests' lists of cases, and their sample of candidates."""

from __future__ import annotations

from collections import Counter

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import DIRECTIONS, Direction
from attention_autotuner.kernels.legality import check
from tests.numerics import cases, sampling

# One object of each policy: samples are remembered by it.
POLICIES = {name: resolve(name) for name in ("A100", "RTX4090", "H100", "H200")}
NAMED_PAIRS = {
    (8, 8), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256),
    (128, 256), (192, 128), (256, 64), (256, 512),
}  # fmt: skip
PROMISED = {"forward": 300, "backward": 200}

pytestmark = pytest.mark.parametrize("direction", DIRECTIONS)


def test_the_list_is_as_long_and_as_varied_as_promised(direction: Direction) -> None:
    listed = cases.make_cases(direction)
    dims = {(case.problem.dim_qk, case.problem.dim_v) for case in listed}
    assert len({case.problem for case in listed if not case.policy}) >= PROMISED[direction]
    assert {case.problem.direction for case in listed} == {direction}
    assert len({cases.padded(pair) for pair in dims}) >= 20
    assert dims >= NAMED_PAIRS
    assert len({case.name for case in listed}) == len(listed)
    lengths = {n for case in listed for n in (case.problem.seqlen_q, case.problem.seqlen_k)}
    assert {min(lengths), max(lengths)} == {1, 4099}
    assert len([n for n in lengths if n % 2]) >= 20
    groups = Counter(case.problem.heads_q // case.problem.heads_kv for case in listed)
    assert {1, 2, 4, 6} <= set(groups)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_mask_scale_and_layout_is_there_for_each_dtype(
    direction: Direction, dtype: str
) -> None:
    listed = [case for case in cases.make_cases(direction) if case.problem.dtype == dtype]
    backward = direction == "backward"
    masks = {(case.problem.causal, case.problem.causal_alignment) for case in listed}
    assert masks == {(False, "bottom_right"), (True, "bottom_right"), (True, "top_left")}
    large = {cases.LARGE_SCALE} if backward else set()
    assert {case.scale for case in listed} == {*cases.SCALES, *large}
    assert {case.inputs for case in listed} == {*cases.LAYOUTS, "unaligned"}
    gradients = {*cases.GRADIENTS, "unaligned"} if backward else {"dense"}
    assert {case.gradient for case in listed} == gradients
    assert {case.lse for case in listed} == {True, False}


def test_rows_that_see_no_key_are_in_the_list(direction: Direction) -> None:
    listed = cases.make_cases(direction)
    blind = [c for c in listed if c.problem.causal and c.problem.causal_offset < 0]
    assert len(blind) >= 20


def test_the_list_is_the_same_every_time(direction: Direction) -> None:
    listed = cases.make_cases(direction)
    assert cases.make_cases(direction) == listed
    assert cases.make_cases(direction, seed=1) != listed


@pytest.mark.parametrize("policy", POLICIES)
def test_the_list_needs_few_builds(direction: Direction, policy: str) -> None:
    present = POLICIES[policy]
    listed = cases.make_cases(direction)
    wanted = cases.builds(listed, present)
    assert len(wanted) <= cases.MAX_BUILDS
    # Both raster orders, or both schedules.
    orders = {getattr(candidate.knobs, "cta_order", None) for candidate in wanted} - {None}
    assert orders == {"raster", "longest_first"}
    schedules = {getattr(candidate.knobs, "schedule", None) for candidate in wanted} - {None}
    has_sm90 = direction == "forward" and "H" in policy
    assert schedules == ({"static", "dynamic"} if has_sm90 else set())
    plans = {getattr(candidate.knobs, "plan", None) for candidate in wanted} - {None}
    passes = {getattr(candidate.knobs, "decomposition", None) for candidate in wanted} - {None}
    if direction == "backward":
        assert plans == {"one_pass", "two_kernels", "three_kernels"}
        assert passes == ({"fused", "two_pass", "three_pass"} if "H" in policy else set())
    for case in listed:
        candidate = case.candidate(present)
        assert (candidate.padded_dim_qk, candidate.padded_dim_v) == (
            case.problem.padded_dim_qk,
            case.problem.padded_dim_v,
        )
        assert (candidate.dtype, candidate.copy_bytes) == (
            case.problem.dtype,
            case.problem.alignment_bytes,
        )
        assert candidate.deterministic or not case.problem.deterministic


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sample_holds_every_value_of_every_knob(direction: Direction, policy: str) -> None:
    present = POLICIES[policy]
    candidates = sampling.sample(present, direction)
    assert len(set(candidates)) == sampling.SAMPLE
    assert not sampling.uncovered(present, direction)
    assert all(check(candidate, present.spec) is None for candidate in candidates)
    places = [sampling.Sampled(index=i, direction=direction) for i in range(len(candidates))]
    assert [place.candidate(present) for place in places] == list(candidates)


def test_the_shapes_of_the_sample_fit_their_candidate(direction: Direction) -> None:
    for candidate in sampling.sample(POLICIES["H200"], direction):
        for case in sampling.cases_of(candidate):
            assert (case.problem.padded_dim_qk, case.problem.padded_dim_v) == (
                candidate.padded_dim_qk,
                candidate.padded_dim_v,
            )
            assert case.problem.alignment_bytes == candidate.copy_bytes
            assert case.problem.direction == direction
