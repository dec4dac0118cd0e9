"""The candidates of retnet and retention, and the resources of their kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import resources
from attention_autotuner.kernels.chunks_sm80.knobs import (
    ChunksKnobs,
)
from attention_autotuner.kernels.legality import check, check_kernel
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from tests.candidates import CHUNKS, PLAIN, RETENTION, RETNET, retention

POLICIES = ("A100", "RTX4090", "H100")
DIMS = ((16, 16), (48, 16), (64, 64), (176, 304), (128, 256), (256, 512))


def problem(dims: tuple[int, int], **fields: Any) -> Problem:
    return Problem(dim_qk=dims[0], dim_v=dims[1], **fields)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["explicit", "decay"])
def test_retnet_has_a_legal_default(name: str, direction: Any, mask: Any) -> None:
    policy = resolve(name)
    for dims in DIMS:
        for alignment in (2, 16):
            asked = problem(
                dims,
                op="retnet",
                mask=mask,
                causal=mask == "decay",
                direction=direction,
                alignment_bytes=alignment,
            )
            assert check(policy.default(asked), policy.spec) is None


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
def test_every_form_has_a_legal_default_of_its_own(name: str, form: Any) -> None:
    policy = resolve(name)
    for dims in DIMS:
        chosen = policy.default(problem(dims, op="retention", causal=True, form=form))
        assert chosen.form == form
        assert check(chosen, policy.spec) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_are_distinct_legal_and_hold_the_default(direction: Any) -> None:
    policy = resolve("H100")
    asked = problem((128, 256), op="retention", causal=True, direction=direction)
    chosen = policy.legal(asked)
    assert policy.default(asked) in chosen
    assert len({selected.name for selected in chosen}) == len(chosen)
    assert all(check(selected, policy.spec) is None for selected in chosen)


@pytest.mark.parametrize(("seqlen", "offered"), [(64, True), (65, False)])
def test_the_recurrent_form_is_offered_for_few_tokens(seqlen: int, offered: bool) -> None:
    asked = problem((64, 64), op="retention", causal=True, seqlen_q=seqlen, seqlen_k=seqlen)
    forms = {selected.form for selected in resolve("H100").legal(asked)}
    assert ("recurrent" in forms) == offered
    assert {"parallel", "chunkwise"} <= forms


def test_a_mask_takes_a_tile_and_a_decay_nothing() -> None:
    explicit, decay, *_ = RETNET
    assert resources.smem_bytes(decay) == resources.smem_bytes(PLAIN)
    assert resources.smem_bytes(explicit) - resources.smem_bytes(decay) == 2 * 128 * (64 + 8) * 2


def smem(kind: str, **knobs: Any) -> int:
    made: Candidate = retention(kind, knobs=replace(RETENTION[kind], **knobs))
    return resources.smem_bytes(made)


def test_shared_memory_of_a_pass_over_chunks() -> None:
    streamed = 2 * 2 * (2 * 64 * 64 + 64 * 64)
    scores = 2 * 64 * 64
    assert smem("chunkwise") == streamed + scores
    assert smem("chunkwise", output=replace(CHUNKS, scores="precomputed")) == streamed + 2 * scores
    deep = replace(CHUNKS, scores="precomputed", depth_warps=2)
    assert smem("chunkwise", output=deep) == streamed + 2 * scores + 4 * 64 * 64
    narrow = replace(CHUNKS, columns=32, depth_warps=2)  # the scores themselves are exchanged
    assert smem("chunkwise", output=narrow) == streamed - 2 * 2 * 64 * 32 + scores + 4 * 64 * 64


def test_a_depth_that_warps_cannot_share_is_padded() -> None:
    deep = replace(CHUNKS, scores="precomputed", depth_warps=2)
    knobs = ChunksKnobs(chunk=64, output=deep)
    wide_chunks, padded = (
        retention("chunkwise", padded_dim_qk=dim, knobs=knobs) for dim in (64, 48)
    )
    assert check_kernel(padded) is None
    assert resources.kernels(padded) == resources.kernels(wide_chunks)


@pytest.mark.parametrize(
    ("changes", "predicate"),
    [
        ({"chunk": 48}, "chunk_range"),
        ({"super_chunk": 96}, "super_chunk_multiple_of_chunk"),
        ({"output": replace(CHUNKS, num_stages=4)}, "chunk_stages_range"),
        ({"output": replace(CHUNKS, column_warps=1)}, "chunk_warps_range"),
        ({"output": replace(CHUNKS, columns=48, column_warps=3)}, "chunk_warps_range"),
        ({"output": replace(CHUNKS, columns=40)}, "columns_divide_among_warps"),
        ({"output": replace(CHUNKS, depth_warps=3)}, "depth_warps_range"),
        (
            {"chunk": 16, "output": replace(CHUNKS, depth_warps=2)},
            "chunk_divides_among_depth_warps",
        ),
        ({"chunk": 16, "output": replace(CHUNKS, column_warps=4)}, "inline_divides_chunk"),
        (
            {"chunk": 16, "output": replace(CHUNKS, scores="precomputed")},
            "precomputed_needs_chunk_of_32",
        ),
    ],
)
def test_rules_of_a_pass_over_chunks(changes: dict[str, Any], predicate: str) -> None:
    legal = retention("chunkwise")
    assert check_kernel(legal) is None
    rejection = check_kernel(replace(legal, knobs=replace(legal.knobs, **changes)))
    assert rejection is not None
    assert rejection.predicate == predicate


PAIRS = tuple(product(range(16, 257, 16), range(16, 513, 16)))


@pytest.mark.parametrize("name", POLICIES)
def test_every_pair_of_classes_has_a_legal_candidate(name: str) -> None:
    policy = resolve(name)
    kinds: tuple[tuple[Any, Any], ...] = (
        ("forward", "chunkwise"),
        ("forward", "recurrent"),
        ("backward", "auto"),
    )
    for dims, (direction, form) in product(PAIRS, kinds):
        asked = problem(dims, op="retention", causal=True, direction=direction, form=form)
        assert check(policy.default(asked), policy.spec) is None


@pytest.mark.parametrize("name", POLICIES)
def test_every_pair_of_classes_has_a_legal_kernel_over_rows(name: str) -> None:
    policy = resolve(name)
    for dims in PAIRS:
        assert check(policy.default(problem(dims)), policy.spec) is None


def asked_at(dims: tuple[int, int], batch: int, heads: int, seqlen: int, **fields: Any) -> Problem:
    return problem(
        dims,
        op="retention",
        causal=True,
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        **fields,
    )


SHAPES = (
    ((256, 512), 8, 8, 2048),
    ((256, 512), 1, 8, 16384),
    ((128, 256), 8, 16, 2048),
    ((128, 128), 8, 16, 4096),
    ((64, 64), 8, 32, 2048),
    ((80, 80), 2, 8, 4096),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_spaces_are_small_enough_to_rank_and_hold_the_default(shape: Any) -> None:
    policy = resolve("H200")
    for direction in ("forward", "backward"):
        asked = asked_at(*shape, direction=direction)
        chosen = policy.legal(asked)
        assert 50 <= len(chosen) <= 300
        assert policy.default(asked) in chosen


def test_super_chunks_divide_what_leaves_processors_idle() -> None:
    def sizes(*shape: Any) -> set[int]:
        return {
            selected.knobs.super_chunk
            for selected in resolve("H200").legal(asked_at(*shape, form="chunkwise"))
            if isinstance(selected.knobs, ChunksKnobs)
        }

    assert sizes((256, 512), 1, 8, 16384) == {0, 2048, 4096, 8192}
    assert sizes((64, 64), 1, 8, 3000) == {0, 512, 1024, 2048}
    assert sizes((64, 64), 64, 32, 3000) == {0}


def test_passes_of_a_backward_candidate_may_differ() -> None:
    chosen = resolve("H200").legal(asked_at((256, 512), 8, 8, 2048, direction="backward"))
    knobs = [selected.knobs for selected in chosen if isinstance(selected.knobs, ChunksKnobs)]
    assert any(selected.dq != selected.dv for selected in knobs)


def test_parallel_rows_obey_the_rules_of_attention() -> None:
    knobs = RETENTION["parallel"]
    assert isinstance(knobs, ForwardKnobs)
    wrong = replace(knobs, k_slice=64, num_stages=5)
    rejection = check_kernel(retention("parallel", knobs=wrong))
    assert rejection is not None
    assert rejection.predicate == "num_stages_range"
