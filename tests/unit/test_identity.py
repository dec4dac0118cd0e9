from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.core.identity import digest, digest16, encode
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels.attention_backward_sm90.knobs import (
    AttentionBackwardSm90Knobs,
    BackwardPassSm90,
    DqShareSm90,
)
from attention_autotuner.kernels.attention_forward_sm90.knobs import AttentionForwardSm90Knobs
from attention_autotuner.kernels.chunks_sm80.knobs import (
    ChunkPass,
    ChunksKnobs,
)
from attention_autotuner.kernels.chunks_sm90.knobs import ChunkwiseSm90Knobs
from attention_autotuner.kernels.recurrent_sm80.knobs import RecurrentKnobs
from attention_autotuner.kernels.scores_backward_sm80.knobs import (
    BackwardKnobs,
    KeyPass,
    RowPass,
)
from attention_autotuner.kernels.scores_backward_sm90.knobs import (
    BackwardSm90Knobs,
    Sm90Pass,
    StoredPass,
)
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs

# For every field another legal value. A field that is not here fails the test, so that a new one cannot be forgotten.
PROBLEM_FLIPS: dict[str, Any] = {
    "dtype": "bf16",
    "batch": 5,
    "heads_q": 32,
    "heads_kv": 8,
    "seqlen_q": 17,
    "seqlen_k": 18,
    "dim_qk": 64,
    "dim_v": 64,
    "causal": True,
    "causal_alignment": "top_left",
    "alignment_bytes": 2,
    "key_bounds": True,
    "modifications": ("softcap",),
    "window_size": (127, 0),
    "packed_rows": (96, 128),
}
CANDIDATE_FLIPS: dict[str, Any] = {
    "dtype": "bf16",
    "padded_dim_qk": 64,
    "padded_dim_v": 64,
    "copy_bytes": 2,
    "key_bounds": True,
    "modifications": ("softcap", "window"),
}
FORWARD_FLIPS: dict[str, Any] = {
    "block_m": 64,
    "block_n": 32,
    "warps_m": 8,
    "warps_n": 2,
    "num_stages": 3,
    "q_in_registers": True,
    "qk_ahead": True,
    "k_slice": 64,
    "v_slices": 2,
    "persistent": True,
    "cta_order": "longest_first",
    "ctas_per_sm": 2,
    "pack_gqa": True,
    "split_kv": False,
    "splits": 2,
}
KEY_FLIPS: dict[str, Any] = {
    "block_m": 32,
    "block_n": 64,
    "warp_pairs": 2,
    "num_stages": 1,
    "query_subtiles": 2,
    "ctas_per_sm": 2,
}
ROW_FLIPS: dict[str, Any] = {
    "block_rows": 64,
    "block_columns": 32,
    "warps": 4,
    "column_warps": 2,
    "num_stages": 2,
    "slices": 2,
    "ctas_per_sm": 2,
}
# Fields whose other legal values need other fields changed with them, or have none so far: flipped past validation,
# because their digest matters all the same.
ALONE = {
    "op": "retention",
    "direction": "backward",
    "mask": "decay",
    "form": "chunkwise",
    "deterministic": True,
    "operands": "tn",
    "documents": 7,
}

KEYS = KeyPass(block_m=64, block_n=128, warp_pairs=4, num_stages=2)
ROWS = RowPass(block_rows=128, block_columns=64, warps=8, num_stages=1)
SPLIT = BackwardKnobs(plan="three_kernels", dq=ROWS, dk=ROWS, dv=ROWS)
BACKWARD_FLIPS: dict[str, Any] = {
    "plan": "two_kernels",
    "keys": KEYS,
    "dq": replace(ROWS, warps=4),
    "dk": replace(ROWS, warps=4),
    "dv": replace(ROWS, warps=4),
    "cta_order": "longest_first",
}
CHUNKS = ChunkPass(columns=64, column_warps=2, num_stages=2)
CHUNK_FLIPS: dict[str, Any] = {
    "columns": 32,
    "column_warps": 4,
    "depth_warps": 2,
    "num_stages": 3,
    "scores": "precomputed",
    "ctas_per_sm": 2,
}
OTHER_CHUNKS = replace(CHUNKS, columns=128)
# Passes that knobs of the other direction or form have.
ABSENT: dict[str, Any] = {
    "chunk": 64,
    **dict.fromkeys(("states", "output", "dq", "dk", "dv"), OTHER_CHUNKS),
}
CHUNKWISE = ChunksKnobs(chunk=64, output=CHUNKS)
CHUNKWISE_FLIPS: dict[str, Any] = {"chunk": 32, "super_chunk": 512, "output": OTHER_CHUNKS}
RECURRENT = RecurrentKnobs(columns=32, warps=4)
RECURRENT_FLIPS: dict[str, Any] = {"columns": 64, "warps": 8, "ctas_per_sm": 2}
GRADIENTS = ChunksKnobs(chunk=64, dq=CHUNKS, dk=CHUNKS, dv=CHUNKS)
GRADIENT_FLIPS: dict[str, Any] = {
    "chunk": 32,
    "super_chunk": 512,
    "dq": OTHER_CHUNKS,
    "dk": OTHER_CHUNKS,
    "dv": OTHER_CHUNKS,
}
WGMMA_PASS = Sm90Pass(warpgroups=2, block_columns=128, num_stages=2, slice_stages=3)
WGMMA_PASS_FLIPS: dict[str, Any] = {
    "warpgroups": 3,
    "block_columns": 64,
    "num_stages": 1,
    "depth_slices": 2,
    "slice_stages": 4,
    "slices": 2,
    "ping_pong": True,
    "exchange_stages": 1,
    "kept_depth": 64,
}
STORED_PASS = StoredPass(warpgroup_rows=64, num_stages=2)
STORED_PASS_FLIPS: dict[str, Any] = {"warpgroups": 3, "warpgroup_rows": 128, "num_stages": 4}
WGMMA_SPLIT = BackwardSm90Knobs(dq=WGMMA_PASS, dk=WGMMA_PASS, dv=WGMMA_PASS)
OTHER_WGMMA_PASS = replace(WGMMA_PASS, num_stages=1)
WGMMA_SPLIT_FLIPS: dict[str, Any] = {
    "dq": OTHER_WGMMA_PASS,
    "dk": OTHER_WGMMA_PASS,
    "dv": OTHER_WGMMA_PASS,
    "stored_dk": STORED_PASS,
    "cta_order": "longest_first",
    "gathered_stores": True,
}
SOFTMAX = AttentionForwardSm90Knobs(warpgroups=2, block_n=128, mainloop="overlap", split_kv=True)
SOFTMAX_FLIPS: dict[str, Any] = {
    "warpgroups": 3,
    "block_n": 64,
    "mainloop": "serial",
    "optimistic": False,
    "ping_pong": True,
    "q_stages": 1,
    "k_stages": 3,
    "v_stages": 3,
    "mask_stages": 1,
    "v_slices": 2,
    "exchange_stages": 1,
    "kept_depth": 64,
    "output": "direct",
    "schedule": "grid",
    "pack_gqa": True,
    "split_kv": False,
    "splits": 2,
}
SOFTMAX_PASS = BackwardPassSm90(block_columns=64, issue_order="serial")
OTHER_SOFTMAX_PASS = replace(SOFTMAX_PASS, block_columns=128)
SOFTMAX_BACKWARD = AttentionBackwardSm90Knobs(
    decomposition="fused", keys=SOFTMAX_PASS, dq_share=DqShareSm90(dq_by="keys")
)
SOFTMAX_BACKWARD_FLIPS: dict[str, Any] = {
    "decomposition": "two_pass",
    **dict.fromkeys(("keys", "dk", "dv", "dq"), OTHER_SOFTMAX_PASS),
    "dq_share": DqShareSm90(dq_by="own"),
    "cta_order": "longest_first",
    **dict.fromkeys(("persistent", "early_launches", "gathered_stores", "dynamic"), True),
}
WALK = ChunkwiseSm90Knobs(warpgroups=2, num_stages=2)
WALK_FLIPS: dict[str, Any] = {
    "super_chunk": 512,
    "warpgroups": 1,
    "num_stages": 3,
    "ctas_per_sm": 2,
}
CANDIDATE = Candidate(
    dtype="fp16",
    padded_dim_qk=128,
    padded_dim_v=128,
    knobs=ForwardKnobs(
        block_m=128,
        block_n=64,
        warps_m=4,
        num_stages=2,
        k_slice=128,
        split_kv=True,
    ),
)


PARALLEL = replace(CANDIDATE.knobs, chunk=64, states=CHUNKS)


def _flip(instance: Any, name: str, value: Any) -> Any:
    copy = replace(instance)
    object.__setattr__(copy, name, value)
    return copy


@pytest.mark.parametrize(
    ("instance", "flips"),
    [
        (Problem(), PROBLEM_FLIPS),
        (CANDIDATE, CANDIDATE_FLIPS | {"knobs": SPLIT}),
        (CANDIDATE.knobs, FORWARD_FLIPS),
        (PARALLEL, FORWARD_FLIPS | {"chunk": 32}),
        (KEYS, KEY_FLIPS),
        (ROWS, ROW_FLIPS),
        (SPLIT, BACKWARD_FLIPS),
        (CHUNKS, CHUNK_FLIPS),
        (CHUNKWISE, CHUNKWISE_FLIPS),
        (RECURRENT, RECURRENT_FLIPS),
        (GRADIENTS, GRADIENT_FLIPS),
        (WGMMA_PASS, WGMMA_PASS_FLIPS),
        (STORED_PASS, STORED_PASS_FLIPS),
        (WGMMA_SPLIT, WGMMA_SPLIT_FLIPS),
        (WALK, WALK_FLIPS),
        (SOFTMAX, SOFTMAX_FLIPS),
        (SOFTMAX_BACKWARD, SOFTMAX_BACKWARD_FLIPS),
    ],
    ids=[
        "problem",
        "candidate",
        "forward",
        "parallel",
        "key pass",
        "row pass",
        "backward",
        "pass over chunks",
        "chunkwise",
        "recurrent",
        "retention backward",
        "wgmma pass",
        "stored pass",
        "wgmma backward",
        "wgmma chunkwise",
        "wgmma attention",
        "wgmma attention backward",
    ],
)
def test_every_field_takes_part(instance: Any, flips: dict[str, Any]) -> None:
    flipped = [instance]
    for field in dataclasses.fields(instance):
        value = {**ALONE, **ABSENT, **flips}[field.name]
        assert value != getattr(instance, field.name)
        flipped.append(_flip(instance, field.name, value))
    digests = [digest(item) for item in flipped]
    assert len(set(digests)) == len(digests)


def names(instance: Any, flips: dict[str, Any], candidate: Callable[[Any], Candidate]) -> list[str]:
    """The name of a candidate, and those with one field of a part of it flipped."""
    flipped = [_flip(instance, name, value) for name, value in flips.items()]
    present = {
        f.name for f in dataclasses.fields(instance) if getattr(instance, f.name) is not None
    }
    assert flips.keys() >= present
    return [candidate(knobs_given).name for knobs_given in (instance, *flipped)]


def test_candidate_names_are_as_distinct_as_candidates() -> None:
    backward = replace(CANDIDATE, direction="backward", knobs=SPLIT)
    alone = {name: ALONE[name] for name in ("op", "direction", "mask")}
    groups = [
        names(
            CANDIDATE, CANDIDATE_FLIPS | alone | {"knobs": SPLIT}, lambda knobs_given: knobs_given
        ),
        names(
            CANDIDATE.knobs,
            FORWARD_FLIPS,
            lambda knobs_given: replace(CANDIDATE, knobs=knobs_given),
        ),
        names(
            PARALLEL,
            FORWARD_FLIPS | {"chunk": 32, "states": OTHER_CHUNKS},
            lambda knobs_given: replace(CANDIDATE, op="retention", knobs=knobs_given),
        ),
        names(SPLIT, BACKWARD_FLIPS, lambda knobs_given: replace(backward, knobs=knobs_given)),
        names(
            ROWS,
            ROW_FLIPS,
            lambda knobs_given: replace(backward, knobs=replace(SPLIT, dv=knobs_given)),
        ),
        names(
            KEYS,
            KEY_FLIPS,
            lambda knobs_given: replace(
                backward, knobs=BackwardKnobs(plan="one_pass", keys=knobs_given)
            ),
        ),
    ]
    retention = replace(CANDIDATE, op="retention", knobs=CHUNKWISE)
    gradients = replace(retention, direction="backward", knobs=GRADIENTS)
    groups += [
        names(
            CHUNKWISE, CHUNKWISE_FLIPS, lambda knobs_given: replace(retention, knobs=knobs_given)
        ),
        names(
            RECURRENT, RECURRENT_FLIPS, lambda knobs_given: replace(retention, knobs=knobs_given)
        ),
        names(GRADIENTS, GRADIENT_FLIPS, lambda knobs_given: replace(gradients, knobs=knobs_given)),
        names(
            CHUNKS,
            CHUNK_FLIPS,
            lambda knobs_given: replace(gradients, knobs=replace(GRADIENTS, dk=knobs_given)),
        ),
    ]
    masked = {"op": "retnet", "mask": "explicit", "direction": "backward"}
    split = replace(CANDIDATE, **masked, knobs=WGMMA_SPLIT)  # type: ignore[arg-type]
    chunk_candidate = replace(retention, knobs=WALK)
    groups += [
        names(
            WGMMA_SPLIT, WGMMA_SPLIT_FLIPS, lambda knobs_given: replace(split, knobs=knobs_given)
        ),
        names(
            WGMMA_PASS,
            WGMMA_PASS_FLIPS,
            lambda knobs_given: replace(split, knobs=replace(WGMMA_SPLIT, dk=knobs_given)),
        ),
        names(WALK, WALK_FLIPS, lambda knobs_given: replace(chunk_candidate, knobs=knobs_given)),
        names(SOFTMAX, SOFTMAX_FLIPS, lambda knobs_given: replace(CANDIDATE, knobs=knobs_given)),
        names(
            SOFTMAX_BACKWARD,
            SOFTMAX_BACKWARD_FLIPS,
            lambda knobs_given: replace(backward, knobs=knobs_given),
        ),
    ]
    for group in groups:
        assert len(set(group)) == len(group)


def test_values_that_look_alike_differ() -> None:
    values = [
        None, True, False, 0, 1, 1.0, 0.0, -0.0, "1", b"1", "", (), ("",), ("1",), (1,), ((1,),), (1, 1), {}, {"1": 1},
        {"1": "1"}, "None", ("a", "b"), ("ab",), ("a,b",), Problem(),
    ]  # fmt: skip
    for left, right in itertools.combinations(values, 2):
        assert encode(left) != encode(right), (left, right)


def test_dataclasses_of_different_types_differ() -> None:
    @dataclass(frozen=True)
    class Left:
        x: int = 1

    @dataclass(frozen=True)
    class Right:
        x: int = 1

    assert encode(Left()) != encode(Right())


def test_order_of_a_mapping_does_not_matter() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, range(3), Problem, lambda: None])
def test_unknown_types_fail_closed(value: object) -> None:
    with pytest.raises(TypeError, match="identity"):
        digest(value)
    with pytest.raises(TypeError, match="identity"):
        digest({"nested": [value]})


def test_mappings_need_string_keys() -> None:
    with pytest.raises(TypeError, match="int key"):
        encode({1: 2})


def test_digest_is_stable() -> None:
    # Records on disk are found by it: a change of the encoding must be a decision, not an accident.
    assert digest("a", 1, None, True, 1.5, (b"x", {"k": ["v"]})) == (
        "af8639d25648ec3e06e8042436b9f0728fa2418fa907306cd0a4c71d31d08937"
    )
    assert digest16("a") == digest("a")[:16]
