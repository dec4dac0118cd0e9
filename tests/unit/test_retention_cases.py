"""The lists of cases that retention's GPU tests run, and their samples of candidates."""

from __future__ import annotations

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.problem import DIRECTIONS, Direction
from attention_autotuner.kernels.legality import check
from tests.numerics import retention_cases, retention_sampling, retnet_cases

# One object of each policy: samples are remembered by it.
POLICIES = {name: resolve(name) for name in ("A100", "RTX4090", "H100", "H200")}
CASES = retention_cases.make_cases()
BACKWARD = ("retnet-backward", "retention-backward")


def test_retentions_list_is_as_long_and_as_varied_as_promised() -> None:
    assert len({case.problem for case in CASES if not case.policy}) >= 150
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.gammas for case in CASES} == {"default", "mixed", *retention_cases.GAMMAS}
    dims = {n for case in CASES for n in (case.problem.dim_qk, case.problem.dim_v)}
    assert dims >= {16, 40, 64, 72, 80, 96, 112, 128, 192, 256, 512}
    assert {case.problem.seqlen_q for case in CASES} >= set(retention_cases.LENGTHS)
    assert {case.problem.dtype for case in CASES} == {"fp16", "bf16"}
    groups = {case.problem.heads_q // case.problem.heads_kv for case in CASES}
    assert groups >= {1, 2, 3, 4, 6}
    for flag in ("initial", "final", "dgamma"):
        assert {getattr(case, flag) for case in CASES} == {True, False}
    assert sum(any(case.bias) for case in CASES) >= 8
    assert retention_cases.make_cases() == CASES
    assert retention_cases.make_cases(seed=1) != CASES


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_retnets_list_is_as_varied_as_promised(direction: Direction) -> None:
    cases = retnet_cases.make_cases(direction)
    explicit = [case for case in cases if case.explicit]
    assert len(cases) >= 120
    assert {case.values for case in explicit} == set(retnet_cases.VALUES)
    assert {case.shared for case in explicit} == {True, False}
    assert {case.problem.causal for case in explicit} == {True, False}
    assert any(case.problem.seqlen_k % 2 for case in explicit)
    assert {case.gamma for case in cases if not case.explicit} == {None, *retention_cases.GAMMAS}
    assert {case.scale for case in cases} >= {None, 0.0, -0.125, 8.0}
    for flag in ("normalize", "r_grad", "dmask", "r"):
        assert {getattr(case, flag) for case in cases} == {True, False}
    longer = {(c.problem.seqlen_q > c.problem.seqlen_k) for c in cases}
    assert longer == {True, False}
    assert {case.problem.dtype for case in cases} == {"fp16", "bf16"}
    for case in cases:
        p = case.problem
        assert case.explicit <= (p.alignment_bytes == 2 or p.seqlen_k % 8 == 0)
        assert case.normalize or not (case.r_grad or case.r_clamp_max)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lists_need_few_builds(policy: str) -> None:
    present = POLICIES[policy]
    wanted = retention_cases.builds(CASES, present)
    assert len(wanted) <= 4 * len(retention_cases.GROUPS)
    assert {candidate.form for candidate in wanted} == {*retention_cases.RETENTION_FORMS, "auto"}
    masked = retnet_cases.builds(list(retnet_cases.every_case()), present)
    assert len(masked) <= 4 * len(retnet_cases.GROUPS)
    for case in CASES:
        for candidate in case.kernels_of(present):
            assert (candidate.padded_dim_qk, candidate.padded_dim_v) == (
                case.problem.padded_dim_qk,
                case.problem.padded_dim_v,
            )
            assert (candidate.dtype, candidate.copy_bytes) == (
                case.problem.dtype,
                case.problem.alignment_bytes,
            )


@pytest.mark.parametrize("kind", retention_sampling.KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_samples_hold_every_value_of_every_knob(policy: str, kind: str) -> None:
    present = POLICIES[policy]
    candidates = retention_sampling.sample(present, kind)
    assert len(set(candidates)) == len(candidates) >= 2
    assert not retention_sampling.uncovered(present, kind)
    assert all(check(candidate, present.spec) is None for candidate in candidates)
    for candidate in candidates:
        for case in retention_sampling.cases_of(candidate):
            p = case.problem
            assert (p.padded_dim_qk, p.padded_dim_v) == (
                candidate.padded_dim_qk,
                candidate.padded_dim_v,
            )
            assert (p.op, p.direction, p.mask) == (
                candidate.op,
                candidate.direction,
                candidate.mask,
            )
            assert p.alignment_bytes == candidate.copy_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_kernels_of_several_stages_and_of_narrow_tiles_are_in_the_samples(
    policy: str,
) -> None:
    """Both were wrong in an earlier implementation."""
    for kind in BACKWARD:
        shown = {
            (name.rpartition(".")[2], value)
            for candidate in retention_sampling.sample(POLICIES[policy], kind)
            for name, value in retention_sampling.values(candidate)
        }
        assert ("num_stages", 2) in shown
        widths = ("block_m", "block_n", "block_rows", "block_columns", "chunk")
        assert any((name, 32) in shown for name in widths)
