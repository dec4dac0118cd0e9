"""The GPU tests' own lists of cases, and their sample of candidates."""

from __future__ import annotations

from collections import Counter

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import DIRECTIONS, Direction
from attention_autotuner.kernels.legality import check
from tests.numerics import cases, sampling

POLICIES = ("A100", "RTX4090", "H100", "H200")
NAMED_PAIRS = {
    (8, 8), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256),
    (128, 256), (192, 128), (256, 64), (256, 512),
}  # fmt: skip
PROMISED = {"forward": 300, "backward": 200}

pytestmark = pytest.mark.parametrize("direction", DIRECTIONS)


def test_the_list_is_as_long_and_as_varied_as_promised(direction: Direction) -> None:
    found = cases.make_cases(direction)
    dims = {(case.problem.dim_qk, case.problem.dim_v) for case in found}
    assert len({case.problem for case in found if not case.policy}) >= PROMISED[direction]
    assert {case.problem.direction for case in found} == {direction}
    assert len({cases.padded(pair) for pair in dims}) >= 20
    assert dims >= NAMED_PAIRS
    assert len({case.name for case in found}) == len(found)
    lengths = {n for case in found for n in (case.problem.seqlen_q, case.problem.seqlen_k)}
    assert {min(lengths), max(lengths)} == {1, 4099}
    assert len([n for n in lengths if n % 2]) >= 20
    groups = Counter(case.problem.heads_q // case.problem.heads_kv for case in found)
    assert {1, 2, 4, 6} <= set(groups)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_mask_scale_and_layout_is_there_for_each_dtype(
    direction: Direction, dtype: str
) -> None:
    found = [case for case in cases.make_cases(direction) if case.problem.dtype == dtype]
    backward = direction == "backward"
    masks = {(case.problem.causal, case.problem.causal_alignment) for case in found}
    assert masks == {(False, "bottom_right"), (True, "bottom_right"), (True, "top_left")}
    large = {cases.LARGE_SCALE} if backward else set()
    assert {case.scale for case in found} == {*cases.SCALES, *large}
    assert {case.inputs for case in found} == {*cases.LAYOUTS, "unaligned"}
    gradients = {*cases.GRADIENTS, "unaligned"} if backward else {"dense"}
    assert {case.gradient for case in found} == gradients
    assert {case.lse for case in found} == {True, False}


def test_rows_that_see_no_key_are_among_them(direction: Direction) -> None:
    found = cases.make_cases(direction)
    blind = [c for c in found if c.problem.causal and c.problem.causal_offset < 0]
    assert len(blind) >= 20


def test_the_list_is_the_same_every_time(direction: Direction) -> None:
    found = cases.make_cases(direction)
    assert cases.make_cases(direction) == found
    assert cases.make_cases(direction, seed=1) != found


@pytest.mark.parametrize("policy", POLICIES)
def test_the_list_needs_few_builds(direction: Direction, policy: str) -> None:
    present = resolve(policy)
    found = cases.make_cases(direction)
    wanted = cases.builds(found, present)
    assert len(wanted) <= cases.MAX_BUILDS
    # Nearly as many classes as builds, in both orders of CTAs.
    assert len({one.knobs.cta_order for one in wanted}) == 2
    if direction == "backward":
        assert {one.knobs.plan for one in wanted} == {"one_pass", "two_kernels", "three_kernels"}
    for case in found:
        one = case.candidate(present)
        assert (one.padded_dim_qk, one.padded_dim_v) == (
            case.problem.padded_dim_qk,
            case.problem.padded_dim_v,
        )
        assert (one.dtype, one.copy_bytes) == (case.problem.dtype, case.problem.alignment_bytes)
        assert one.deterministic or not case.problem.deterministic


@pytest.mark.parametrize("policy", POLICIES)
def test_the_sample_holds_every_value_of_every_knob(direction: Direction, policy: str) -> None:
    present = resolve(policy)
    found = sampling.sample(present, direction)
    assert len(set(found)) == sampling.SAMPLE
    assert not sampling.uncovered(present, direction)
    assert all(check(one, present.spec) is None for one in found)
    places = [sampling.Sampled(index=i, direction=direction) for i in range(len(found))]
    assert [place.candidate(present) for place in places] == list(found)


def test_the_shapes_of_the_sample_fit_their_candidate(direction: Direction) -> None:
    for one in sampling.sample(resolve("H200"), direction):
        for case in sampling.cases_of(one):
            assert (case.problem.padded_dim_qk, case.problem.padded_dim_v) == (
                one.padded_dim_qk,
                one.padded_dim_v,
            )
            assert case.problem.alignment_bytes == one.copy_bytes
            assert case.problem.direction == direction
