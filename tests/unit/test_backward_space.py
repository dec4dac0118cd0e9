"""The candidates of backward problems of family sm80, and the resources of their passes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest

from attention_autotuner.arch import Policy, Rejection, resolve
from attention_autotuner.arch.occupancy import least_registers, register_cap
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.legality import check
from attention_autotuner.kernels.scores_backward_sm80 import resources as backward_resources
from attention_autotuner.kernels.scores_backward_sm80.resources import (
    KeyShape,
    RowShape,
    dq_split,
    dq_tile,
)
from tests.candidates import KEYS, ROWS, backward

POLICIES = ("A100", "RTX4090", "H100")
DIMS = ((16, 16), (64, 64), (128, 128), (192, 128), (256, 256), (256, 512))


def problem(dim_qk: int, dim_v: int, *, deterministic: bool = False) -> Problem:
    return Problem(direction="backward", dim_qk=dim_qk, dim_v=dim_v, deterministic=deterministic)


def resolved(policy: str) -> Policy:
    """A policy with family sm80 alone."""
    return resolve(policy).on((8, 0))


@functools.cache
def offered(policy: str, dim_qk: int, dim_v: int) -> tuple[Candidate | Rejection, ...]:
    return tuple(resolved(policy).candidates(problem(dim_qk, dim_v)))


def legal(policy: str, dim_qk: int, dim_v: int) -> list[Candidate]:
    return [
        selected for selected in offered(policy, dim_qk, dim_v) if isinstance(selected, Candidate)
    ]


def repeated_work(candidate: Candidate) -> float:
    """Multiply-adds of all passes over those that the gradients need."""
    done = sum(backward_resources.flops_per_score(s) for s in backward_resources.shapes(candidate))
    return done / (3 * candidate.padded_dim_qk + 2 * candidate.padded_dim_v)


# --- every class has a candidate ------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_every_class_pair_has_a_legal_default(name: str, deterministic: bool) -> None:
    policy = resolved(name)
    for dim_qk, dim_v in itertools.product(range(16, 257, 16), range(16, 513, 16)):
        asked = problem(dim_qk, dim_v, deterministic=deterministic)
        chosen = policy.default(asked)
        assert check(chosen, policy.spec) is None, chosen.name
        assert (chosen.padded_dim_qk, chosen.padded_dim_v) == (dim_qk, dim_v)
        assert chosen.deterministic or not deterministic
        assert repeated_work(chosen) <= 2.0, chosen.name


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_are_among_what_is_offered(name: str) -> None:
    for dims in DIMS:
        for deterministic in (False, True):
            asked = problem(*dims, deterministic=deterministic)
            assert resolved(name).default(asked) in resolved(name).legal(asked)


def test_the_widest_heads_fit_99_kib_by_splitting() -> None:
    chosen = legal("RTX4090", 256, 512)
    assert {selected.knobs.plan for selected in chosen} == {"three_kernels"}
    for selected in chosen:
        assert resources.smem_bytes(selected) <= 99 * 1024
        assert repeated_work(selected) <= 2.0
        assert all(kernel.threads >= 128 for kernel in resources.kernels(selected))
    assert repeated_work(resolve("RTX4090").default(problem(256, 512))) < 1.75


def test_head_dims_that_no_slicing_divides_are_sliced_all_the_same() -> None:
    # 464 = 16 * 29 columns in two slices: 240, then 224.
    chosen = resolve("RTX4090").default(problem(256, 464))
    (dv,) = (s for s in backward_resources.shapes(chosen) if s.name == "dv")
    assert isinstance(dv, RowShape)
    assert (dv.knobs.slices, dv.result_columns) == (2, 240)


# --- the space ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dims", DIMS)
def test_candidates_are_legal_distinct_and_few_enough_to_rank(
    name: str, dims: tuple[int, int]
) -> None:
    chosen = legal(name, *dims)
    assert chosen
    assert len(chosen) <= 4500
    assert len({selected.name for selected in chosen}) == len(chosen)
    spec = resolve(name).spec
    assert all(check(selected, spec) is None for selected in chosen)
    assert offered(name, *dims) == tuple(resolved(name).candidates(problem(*dims)))


def test_all_plans_and_orders_are_offered_where_they_fit() -> None:
    for name, dims in itertools.product(POLICIES, ((64, 64), (128, 128))):
        chosen = [selected.knobs for selected in legal(name, *dims)]
        kinds = {(selected.plan, selected.cta_order) for selected in chosen}
        assert len(kinds) == 6
        kernels = {selected.keys for selected in chosen if selected.keys is not None}
        for knob in ("block_m", "block_n", "warp_pairs", "num_stages", "query_subtiles"):
            assert len({getattr(pass_knobs, knob) for pass_knobs in kernels}) > 1, knob


def test_a_deterministic_problem_has_the_deterministic_part_of_the_space() -> None:
    for dims in DIMS:
        asked = problem(*dims, deterministic=True)
        chosen = resolved("H100").legal(asked)
        assert chosen == [selected for selected in legal("H100", *dims) if selected.deterministic]


def test_passes_that_are_not_legal_say_why_once() -> None:
    rejections = [
        selected for selected in offered("RTX4090", 128, 128) if isinstance(selected, Rejection)
    ]
    assert {"smem_fits_block", "registers_fit"} <= {selected.predicate for selected in rejections}
    for selected in rejections:
        assert selected.config["padded_dim_qk"] == 128
        named = [key for key, value in selected.config["knobs"].items() if isinstance(value, dict)]
        assert len(named) == 1
        if selected.predicate == "smem_fits_block":
            assert selected.reason.startswith(f"{named[0]}: needs ")
    seen = [str(selected) for selected in rejections]
    assert len(seen) == len(set(seen))


def test_rows_are_shared_by_warps_only_where_they_are_few() -> None:
    for name, dims in itertools.product(POLICIES, DIMS):
        for selected in legal(name, *dims):
            for pass_knobs in selected.knobs.passes.values():
                shared = getattr(pass_knobs, "column_warps", 1) > 1
                assert not shared or dims == (256, 512)


# --- what a pass takes ----------------------------------------------------------------------------


def keys_shape(**changes: object) -> KeyShape:
    fused = bool(changes.pop("one_pass", True))
    knobs = replace(KEYS, **changes)  # type: ignore[arg-type]  # from tests
    return KeyShape(knobs=knobs, padded_dim_qk=128, padded_dim_v=64, one_pass=fused)


def test_shared_memory_of_a_key_pass_by_hand() -> None:
    # K and V, then Q, dO and two floats a query, P on its way, dS.
    held, streamed = 128 * (128 + 64) * 2, 64 * (128 + 64) * 2 + 64 * 8
    score = 128 * 64 * 2
    assert backward_resources.needs(keys_shape()).smem_bytes == held + streamed + 2 * score
    pair = backward_resources.needs(keys_shape(one_pass=False)).smem_bytes
    assert pair == held + streamed + score
    two = backward_resources.needs(keys_shape(num_stages=2)).smem_bytes
    assert two == held + 2 * streamed + 3 * score
    # The third stage is Q's alone; dK then takes dS from shared memory, fused or not.
    three = backward_resources.needs(keys_shape(num_stages=3)).smem_bytes
    assert three == two + 64 * 128 * 2
    alike = backward_resources.needs(keys_shape(num_stages=3, one_pass=False)).smem_bytes
    assert alike == three


def test_shared_memory_of_row_passes_by_hand() -> None:
    knobs = replace(ROWS, num_stages=1)
    dq, dk, dv = (
        RowShape(name=name, knobs=knobs, padded_dim_qk=128, padded_dim_v=64)
        for name in ("dq", "dk", "dv")
    )
    both = (128 + 32) * (128 + 64) * 2
    assert backward_resources.needs(dq).smem_bytes == both
    assert backward_resources.needs(dk).smem_bytes == both + 32 * 8
    # dV keeps K alone, and in slices streams its columns of dO alone.
    assert backward_resources.needs(dv).smem_bytes == both + 32 * 8 - 128 * 64 * 2
    half = replace(dv, knobs=replace(knobs, slices=2))
    assert backward_resources.needs(half).smem_bytes == (
        backward_resources.needs(dv).smem_bytes - 32 * 32 * 2
    )
    # Sums that meet at the end may need more than the loop did.
    wide_rows = RowShape(
        name="dv",
        knobs=replace(knobs, warps=2, column_warps=2, block_rows=64),
        padded_dim_qk=16,
        padded_dim_v=256,
    )
    assert backward_resources.needs(wide_rows).smem_bytes == 64 * 256 * 4


def test_parts_of_the_queries_save_registers_of_scores() -> None:
    whole = backward_resources.needs(keys_shape(one_pass=False))
    halves = backward_resources.needs(keys_shape(one_pass=False, query_subtiles=2))
    # Two row tiles of 16 keys: 64 or 32 queries are 8 or 4 tiles of 4 registers each.
    assert whole.fragment_registers - halves.fragment_registers == 2 * 4 * 4


def test_the_share_of_dq_is_cut_evenly() -> None:
    assert dq_split(keys_shape()) == (2, 4)
    assert dq_tile(keys_shape()) == (32, 32)
    # One row of tiles: all warps along the columns, some of them idle.
    thin = replace(keys_shape(block_m=16), padded_dim_qk=80)
    assert dq_split(thin) == (1, 8)
    assert dq_tile(thin) == (16, 16)


def test_registers_decide_how_many_rows_a_warp_owns() -> None:
    spec = resolve("H100").spec
    # 16 rows leave too few registers for 512 threads, 64 take too many.
    for pairs, fits in ((8, False), (4, True), (2, False)):
        selected = backward("two_kernels", keys=replace(KEYS, warp_pairs=pairs))
        kernel = resources.kernels(selected)[0]
        assert (least_registers(kernel) <= register_cap(kernel, spec)) == fits
