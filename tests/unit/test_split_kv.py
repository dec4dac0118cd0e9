"""Few queries on long keys in family sm80: packed heads, split keys, and the split counts that are worth trying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100, RTX4090, Policy
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.cost_model import estimate, rank
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.kernels.scores_forward_sm80.knobs import knobs_of
from attention_autotuner.kernels.shared.split_kv import (
    packed_heads,
    row_tiles,
    split_counts,
    tiles_of_parts,
)
from tests.candidates import offered_by

KERNEL = KERNELS["scores_forward_sm80"]
POLICIES = [A100(), RTX4090(), H100()]
LONG = Problem(dtype="bf16", batch=1, heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=8192)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.spec.name)


def default(policy: Policy, problem: Problem) -> Candidate:
    knobs = KERNEL.default(problem, policy.spec)
    assert knobs is not None
    return Candidate.of(problem, knobs)


def offered(policy: Policy, problem: Problem) -> list[Candidate]:
    return offered_by(KERNEL.name, problem, policy.spec)


FEW: list[dict[str, Any]] = [
    {},
    {"batch": 8, "seqlen_q": 4},
    {"seqlen_k": 131072},
    {"seqlen_q": 16, "seqlen_k": 4096, "dim_qk": 72, "dim_v": 72},
    {"seqlen_q": 128, "seqlen_k": 16384},
    {"seqlen_q": 128, "heads_kv": 32, "heads_q": 32, "seqlen_k": 65536, "dim_qk": 64, "dim_v": 64},
    {"heads_q": 71, "heads_kv": 1, "dim_qk": 64, "dim_v": 64},
    {"heads_q": 8, "heads_kv": 1, "dim_qk": 256, "dim_v": 256},
    {"seqlen_q": 4, "key_bounds": True, "window_size": (4000, 0)},
    {"batch": 4, "packed_rows": (4, 20000)},
]


@each_policy
@pytest.mark.parametrize("sizes", FEW, ids=lambda sizes: "_".join(map(str, sizes.values())))
def test_few_queries_take_packed_heads_and_split_keys(
    policy: Policy, sizes: dict[str, Any]
) -> None:
    problem = replace(LONG, **{"causal": sizes.get("seqlen_q", 1) > 1, **sizes})
    chosen = default(policy, problem)
    knobs = knobs_of(chosen)
    assert knobs.split_kv
    assert knobs.pack_gqa == (problem.heads_q > problem.heads_kv)
    candidates = offered(policy, problem)
    assert chosen in candidates
    assert len({c.name for c in candidates}) == len(candidates)
    # Half of the SMs have work, or as many as there are pairs of tiles of keys; and the model agrees.
    pairs = -(-problem.seqlen_k // knobs.block_n) // 2
    busy = 2 * row_tiles(problem, knobs) * knobs.splits >= policy.spec.num_sms
    assert busy or knobs.splits >= 0.9 * pairs
    us = estimate(problem, chosen, policy.spec).us
    alone = estimate(problem, chosen.compiled, policy.spec).us
    assert us == alone if knobs.splits == 1 else us < alone
    ranked = rank(problem, candidates, policy.spec)
    assert knobs_of(ranked[0][0]).split_kv
    assert us < 1.35 * ranked[0][1].us
    whole = next(prediction.us for c, prediction in ranked if not knobs_of(c).split_kv)
    assert us < 0.7 * whole


@each_policy
def test_memory_bounds_many_sequences(policy: Policy) -> None:
    problem = replace(LONG, batch=64)
    chosen = default(policy, problem)
    read_us = problem.bytes_moved / policy.spec.hbm_bytes_per_second * 1e6
    assert read_us < estimate(problem, chosen, policy.spec).us < 1.25 * read_us


def test_many_queries_do_not_split() -> None:
    for problem in (
        replace(LONG, seqlen_q=4096, seqlen_k=4096),
        replace(LONG, seqlen_q=300),
        Problem(op="retnet", mask="explicit", seqlen_q=1, seqlen_k=8192),
    ):
        assert not any(knobs_of(c).split_kv for c in offered(A100(), problem))
        assert not knobs_of(default(A100(), problem)).split_kv
    # Enough tiles for all SMs, or keys too short for a second kernel.
    for batch, seqlen_k in ((8, 8192), (1, 500)):
        problem = replace(LONG, seqlen_q=100, batch=batch, seqlen_k=seqlen_k)
        assert not knobs_of(default(A100(), problem)).split_kv


def test_unaligned_tensors_stream_too() -> None:
    problem = replace(LONG, alignment_bytes=2)
    assert POLICIES[-1].default(LONG).kernel == "attention_forward_sm90"
    chosen = POLICIES[-1].default(problem)
    assert (chosen.kernel, chosen.copy_bytes) == (KERNEL.name, 2)
    assert knobs_of(chosen).split_kv


def test_tiles_pack_the_heads_that_divide_a_group() -> None:
    knobs = knobs_of(default(A100(), LONG))
    assert knobs.block_m == 16
    for heads, packed, tiles in ((4, 4, 8), (16, 16, 8), (24, 12, 16), (17, 1, 136)):
        problem = replace(LONG, heads_q=8 * heads)
        assert (packed_heads(problem, knobs), row_tiles(problem, knobs)) == (packed, tiles)
    assert packed_heads(LONG, replace(knobs, pack_gqa=False)) == 1


def test_split_counts_fill_the_slots() -> None:
    knobs = knobs_of(default(A100(), LONG))
    counts = split_counts(LONG, knobs, 216)
    assert counts[0] == 26  # of 27, which fill them, as many as nearly do
    assert {8, 16, 32, 64, 27, 54} & set(counts) >= {27, 54}
    assert max(split_counts(replace(LONG, seqlen_k=200), knobs, 216)) == 2  # pairs of tiles of keys
    assert split_counts(replace(LONG, seqlen_k=64), knobs, 216) == [1]


def test_partial_results_are_counted() -> None:
    chosen = default(A100(), LONG).launched({"splits": 5})
    assert KERNEL.workspace_bytes(LONG, chosen) == 5 * 32 * 4 * 128 + 768
    assert KERNEL.workspace_bytes(LONG, chosen.compiled) == 0
    # No more splits than tiles of keys.
    assert KERNEL.workspace_bytes(replace(LONG, seqlen_k=64), chosen) == 0


@each_policy
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_chunk_of_few_heads_splits_its_keys(policy: Policy, dim: int) -> None:
    sizes: dict[str, Any] = {"heads_q": 4, "heads_kv": 1, "seqlen_q": 512, "seqlen_k": 32768}
    chunk = replace(LONG, causal=True, dim_qk=dim, dim_v=dim, **sizes)
    chosen = default(policy, chunk)
    assert chosen in offered(policy, chunk)
    assert knobs_of(chosen).splits > 1
    whole = chosen.launched({"splits": 1})
    assert estimate(chunk, chosen, policy.spec).us < 0.35 * estimate(chunk, whole, policy.spec).us
    others: list[dict[str, Any]] = [
        {"batch": 16},
        {"seqlen_k": 2048},
        {"modifications": ("prefix_lens",)},
        {"packed_rows": (512, 32768)},
    ]
    for changes in others:
        assert not knobs_of(default(policy, replace(chunk, **changes))).split_kv, changes


@pytest.mark.parametrize("splits", [0, 2])
def test_splits_need_the_knob_for_them(splits: int) -> None:
    with pytest.raises(ValueError, match=f"or more with split_kv, got {splits}"):
        replace(knobs_of(default(A100(), LONG)), split_kv=False, splits=splits)


@pytest.mark.parametrize("policy", [A100(), H100()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("seqlen_q", [1, 65, 128, 200, 512])
def test_no_window_builds_another_kernel(policy: Policy, seqlen_q: int) -> None:
    sizes: dict[str, Any] = {
        "batch": 1,
        "heads_q": 4,
        "heads_kv": 4,
        "seqlen_q": seqlen_q,
        "seqlen_k": 8128,
    }
    windows = ((500, 0), (3, -1), (-1, 0), (4000, 5))
    problems = [Problem(window_size=window, **sizes) for window in windows]
    assert len({policy.default(problem).compiled for problem in problems}) == 1


# --- packed sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "splits", "ctas", "tiles"),
    [
        ([128], 32, 16.5, [8] * 16),  # a round of all CTAs
        ([128] * 16, 32, 16.5, [128] * 16),  # which as many blocks are already
        (
            [1600, 47],
            32,
            16.5,
            [50] * 32 + [47],
        ),  # two rounds, as one and a part of another take longer
        ([1600, 47], 1, 16.5, [1600, 47]),
        ([512, 1, 0], 4, 16.5, [128] * 4 + [1, 0]),
        ([0, 0], 32, 16.5, [0, 0]),
    ],
)
def test_parts_are_about_as_long_as_keeps_all_ctas_busy(
    counts: list[int], splits: int, ctas: float, tiles: list[int]
) -> None:
    knobs = replace(knobs_of(default(H100(), LONG)), block_n=64, splits=splits)
    assert tiles_of_parts(counts, knobs, ctas) == tiles
