"""What policies offer for retnet and retention, and what its kernels take of an SM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.arch import resolve, resources
from attention_autotuner.arch.legality import check, check_kernel
from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.knobs import ParallelKnobs
from attention_autotuner.codegen.problem import Problem
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
        found = policy.default(problem(dims, op="retention", causal=True, form=form))
        assert found.form == form
        assert check(found, policy.spec) is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_candidates_are_distinct_legal_and_hold_the_default(direction: Any) -> None:
    policy = resolve("H100")
    asked = problem((128, 256), op="retention", causal=True, direction=direction)
    found = policy.legal(asked)
    assert policy.default(asked) in found
    assert len({one.name for one in found}) == len(found)
    assert all(check(one, policy.spec) is None for one in found)


@pytest.mark.parametrize(("seqlen", "offered"), [(64, True), (65, False)])
def test_the_recurrent_form_is_offered_for_few_tokens(seqlen: int, offered: bool) -> None:
    asked = problem((64, 64), op="retention", causal=True, seqlen_q=seqlen, seqlen_k=seqlen)
    forms = {one.form for one in resolve("H100").legal(asked)}
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
    assert smem("chunkwise", output=replace(CHUNKS, scores="given")) == streamed + 2 * scores
    deep = replace(CHUNKS, scores="given", depth_warps=2)
    assert smem("chunkwise", output=deep) == streamed + 2 * scores + 4 * 64 * 64


@pytest.mark.parametrize(
    ("changes", "predicate"),
    [
        ({"chunk": 48}, "chunk_range"),
        ({"super_chunk": 96}, "super_chunk_multiple_of_chunk"),
        ({"output": replace(CHUNKS, num_stages=4)}, "chunk_stages_range"),
        ({"output": replace(CHUNKS, column_warps=1)}, "chunk_warps_range"),
        ({"output": replace(CHUNKS, columns=40)}, "columns_divide_among_warps"),
        ({"output": replace(CHUNKS, columns=96)}, "columns_within_class"),
        ({"output": replace(CHUNKS, depth_warps=3)}, "depth_warps_range"),
        ({"output": replace(CHUNKS, depth_warps=2)}, "inline_needs_one_depth_warp"),
    ],
)
def test_rules_of_a_pass_over_chunks(changes: dict[str, Any], predicate: str) -> None:
    legal = retention("chunkwise")
    assert check_kernel(legal) is None
    broken = check_kernel(replace(legal, knobs=replace(legal.knobs, **changes)))
    assert broken is not None
    assert broken.predicate == predicate


def test_parallel_rows_obey_the_rules_of_attention() -> None:
    knobs = RETENTION["parallel"]
    assert isinstance(knobs, ParallelKnobs)
    wrong = replace(knobs, rows=replace(knobs.rows, k_slice=64, num_stages=5))
    broken = check_kernel(retention("parallel", knobs=wrong))
    assert broken is not None
    assert broken.predicate == "num_stages_range"
