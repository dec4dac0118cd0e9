from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_autotuner.arch import resolve
from attention_autotuner.core.identity import values_of
from attention_autotuner.core.problem import Direction, Problem, bucket_seqlen, padded_dim
from attention_autotuner.core.problem_fields import problem_of_fields
from attention_autotuner.errors import AttentionAutotunerError, UnsupportedProblemError


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"op": "conv"}, ["op", "conv"]),
        ({"direction": "sideways"}, ["direction", "sideways"]),
        ({"dtype": "fp32"}, ["dtype", "fp32"]),
        ({"batch": 0}, ["batch", "0"]),
        ({"heads_q": 0}, ["heads_q", "0"]),
        ({"heads_kv": -1}, ["heads_kv", "-1"]),
        ({"seqlen_q": 0}, ["seqlen_q", "0"]),
        ({"seqlen_k": 2**31}, ["seqlen_k", str(2**31)]),
        ({"heads_q": 6, "heads_kv": 4}, ["heads_q", "6", "4"]),
        ({"dim_qk": 0}, ["dim_qk", "0"]),
        ({"dim_qk": 12}, ["dim_qk", "8", "12"]),
        ({"dim_qk": 264}, ["dim_qk", "256", "264"]),
        ({"dim_v": 520}, ["dim_v", "512", "520"]),
        ({"dim_v": 63}, ["dim_v", "63"]),
        ({"causal_alignment": "middle"}, ["causal_alignment", "middle"]),
        ({"alignment_bytes": 8}, ["alignment_bytes", "8"]),
        ({"deterministic": True}, ["deterministic", "backward"]),
    ],
)
def test_bad_fields_are_named_with_their_value(fields: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnsupportedProblemError) as caught:
        Problem(**fields)
    assert all(part in str(caught.value) for part in named)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AttentionAutotunerError)


def test_values_at_the_limits_are_accepted() -> None:
    problem = Problem(
        dim_qk=256, dim_v=512, seqlen_q=1, seqlen_k=2**30, batch=1, heads_q=8, heads_kv=1
    )
    assert (problem.padded_dim_qk, problem.padded_dim_v) == (256, 512)


@pytest.mark.parametrize(
    ("dim", "expected"), [(8, 16), (16, 16), (24, 32), (40, 48), (72, 80), (512, 512)]
)
def test_padded_dim(dim: int, expected: int) -> None:
    assert padded_dim(dim) == expected


@pytest.mark.parametrize(
    ("seqlen", "expected"), [(1, 16), (16, 16), (17, 32), (4095, 4096), (4096, 4096), (4097, 8192)]
)
def test_bucket_seqlen(seqlen: int, expected: int) -> None:
    assert bucket_seqlen(seqlen) == expected


def test_problems_of_one_bucket_are_equal_when_bucketed() -> None:
    left, right = Problem(seqlen_q=1025, seqlen_k=2000), Problem(seqlen_q=2048, seqlen_k=1100)
    assert left != right
    assert left.bucketed() == right.bucketed() == Problem(seqlen_q=2048, seqlen_k=2048)


def test_causal_offset() -> None:
    assert Problem(seqlen_q=3, seqlen_k=7, causal=True).causal_offset == 4
    assert Problem(seqlen_q=7, seqlen_k=3, causal=True).causal_offset == -4
    assert (
        Problem(seqlen_q=3, seqlen_k=7, causal=True, causal_alignment="top_left").causal_offset == 0
    )


def test_work_of_a_small_forward_problem_by_hand() -> None:
    problem = Problem(
        batch=2, heads_q=4, heads_kv=2, seqlen_q=3, seqlen_k=5, dim_qk=8, dim_v=16, causal=False
    )
    # Two GEMMs of 2 * 4 heads: 3 x 5 x 8 and 3 x 5 x 16 multiply-adds.
    assert problem.flops == 2 * 8 * (3 * 5 * 8 + 3 * 5 * 16)
    # Two bytes an element: q, o of 8 heads, k, v of 4 heads.
    assert problem.bytes_moved == 2 * (8 * 3 * (8 + 16) + 4 * 5 * (8 + 16))


def test_work_of_a_small_backward_problem_by_hand() -> None:
    problem = Problem(
        direction="backward",
        batch=2,
        heads_q=4,
        heads_kv=2,
        seqlen_q=3,
        seqlen_k=5,
        dim_qk=8,
        dim_v=16,
    )
    # Five GEMMs of 8 heads: S, dQ and dK are 3 x 5 x 8, dP and dV 3 x 5 x 16 multiply-adds.
    assert problem.flops == 2 * 8 * (3 * 3 * 5 * 8 + 2 * 3 * 5 * 16)
    # Rows see three, four and five keys.
    assert replace(problem, causal=True).flops == problem.flops * 12 // 15
    square = replace(problem, seqlen_q=5)
    assert replace(square, causal=True).flops == square.flops // 2
    # q, dq, o, do of 8 heads, k, dk, v, dv of 4, and the LSE.
    rows = 2 * (8 * 3 + 4 * 5)
    assert problem.bytes_moved == 2 * rows * (8 + 16) + 4 * 8 * 3


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(), "attention forward fp16 b4 h16 s4096 d128"),
        (
            Problem(heads_kv=4, seqlen_k=512, dim_v=64, causal=True, causal_alignment="top_left"),
            "attention forward fp16 b4 h16/4 s4096x512 d128/64 causal-top-left",
        ),
        (
            Problem(dtype="bf16", causal=True, alignment_bytes=2),
            "attention forward bf16 b4 h16 s4096 d128 causal narrow",
        ),
        (
            Problem(direction="backward", deterministic=True),
            "attention backward fp16 b4 h16 s4096 d128 deterministic",
        ),
    ],
)
def test_describe(problem: Problem, text: str) -> None:
    assert problem.describe() == text


RETENTION = Problem(op="retention", causal=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch": 4096, "heads_q": 16}, "at most 65535 for retention, got 65536"),
        ({"causal": False}, "retention with decay is causal, got causal=False"),
        ({"seqlen_k": 5}, "as many queries as keys, got 4096 and 5"),
        ({"form": "serial"}, "form must be one of"),
        ({"mask": "explicit"}, "got 'explicit' for retention"),
        ({"direction": "backward", "form": "parallel"}, "got 'parallel' for retention backward"),
    ],
)
def test_limits_of_retention_name_the_value(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedProblemError) as caught:
        replace(RETENTION, **changes)
    assert named in str(caught.value)


def test_retention_counts_gemms_of_tokens_with_states() -> None:
    problem = replace(RETENTION, batch=2, heads_q=4, heads_kv=4, seqlen_q=8, seqlen_k=8, dim_qk=16)
    gemm_flops = 2 * 2 * 4 * 8 * 16 * 128
    assert problem.flops == 2 * gemm_flops
    assert replace(problem, direction="backward").flops == 5 * gemm_flops


@pytest.mark.parametrize(
    ("seqlen", "expected"),
    [(1, 16), (33, 64), (64, 64), (65, 80), (197, 208), (577, 592), (1024, 1024)],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_defaults_of_attention_go_by_lengths_inside_a_bucket(
    direction: Direction, seqlen: int, expected: int
) -> None:
    problem = Problem(direction=direction, seqlen_q=seqlen, seqlen_k=seqlen)
    rounded = problem.rounded()
    assert (rounded.seqlen_q, rounded.seqlen_k) == (expected, expected)
    assert rounded.rounded() == rounded
    assert rounded.bucketed() == problem.bucketed()


@pytest.mark.parametrize(
    "fields",
    [
        {"seqlen_q": 1},
        {"direction": "backward", "packed_rows": (900, 900)},
        {"packed_rows": (900, 900)},
        {"op": "retnet", "mask": "explicit"},
        {"op": "retention", "causal": True},
    ],
)
def test_other_defaults_go_by_buckets(fields: dict[str, Any]) -> None:
    problem = Problem(**({"seqlen_q": 577, "seqlen_k": 577} | fields))
    assert not problem.goes_by_tiles
    assert problem.rounded() == problem.bucketed()


def test_a_token_by_itself_has_a_default_of_its_own() -> None:
    token = Problem(op="retention", causal=True, seqlen_q=1, seqlen_k=1)
    assert token.rounded() == token
    assert resolve("H200").default(token.rounded()).knobs.form == "recurrent"
    others = (
        replace(token, seqlen_q=2, seqlen_k=2),
        replace(token, direction="backward"),
        replace(token, packed_rows=(8, 8), batch=8),
        Problem(seqlen_q=1),
    )
    for other in others:
        assert other.rounded() == other.bucketed()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "attention forward fp16 b4 h16 s4096 d128"),
        ({"seqlen_q": 512, "causal": True}, "attention forward fp16 b4 h16 s512 d128 causal"),
        ({"dim_qk": 64}, "attention forward fp16 b4 h16 s4096 d64"),
        ({"heads_q": 8}, "attention forward fp16 b4 h8 s4096 d128"),
        ({"seqlen_k": 512, "dim_v": 64}, "attention forward fp16 b4 h16 s4096x512 d128/64"),
        ({"seqlen_q": 1, "seqlen_k": 999}, "attention forward fp16 b4 h16 s1x999 d128"),
        ({"heads_q": 8, "heads_kv": 2}, "attention forward fp16 b4 h8/2 s4096 d128"),
        ({"op": "retention"}, "retention forward fp16 b4 h16 s4096 d128 causal"),
        ({"op": "retnet"}, "retnet forward fp16 b4 h16 s4096 d128 explicit"),
        ({"op": "gemm", "seqlen_q": 64}, "gemm forward fp16 b1 h1 s64 d128"),
        ({"dtype": "bfloat16"}, "attention forward bf16 b4 h16 s4096 d128"),
        ({"dtype": "Half"}, "attention forward fp16 b4 h16 s4096 d128"),
        ({"dtype": torch.bfloat16}, "attention forward bf16 b4 h16 s4096 d128"),
        ({"dtype": torch.float16}, "attention forward fp16 b4 h16 s4096 d128"),
    ],
)
def test_fields_that_are_left_out_follow_those_that_are_given(
    fields: dict[str, Any], said: str
) -> None:
    assert problem_of_fields(fields).describe() == said


def test_a_whole_problem_is_what_its_fields_say() -> None:
    for problem in (Problem(seqlen_q=512), Problem(dim_qk=64, heads_kv=8, batch=1)):
        assert problem_of_fields(values_of(problem)) == problem


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"seqlen": 5}, "no field 'seqlen'; its fields: op, direction"),
        ({"dtype": torch.float32}, "dtype must be one of .*, got torch.float32"),
        ({"dtype": None}, "dtype must be one of .*, got None"),
        ({"modifications": "softcap"}, "a list of names, got 'softcap'"),
        ({"modifications": [["softcap"]]}, "a list of names, got "),
    ],
)
def test_bad_fields_of_a_caller_are_named(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=error):
        problem_of_fields(fields)
