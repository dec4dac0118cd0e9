from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from attention_autotuner.codegen.candidate import Candidate
from attention_autotuner.codegen.identity import digest, digest16, encode
from attention_autotuner.codegen.problem import Problem

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
}
CANDIDATE_FLIPS: dict[str, Any] = {
    "dtype": "bf16",
    "class_qk": 64,
    "class_v": 64,
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
    "cta_order": "heads_first",
    "ctas_per_sm": 2,
    "copy_bytes": 2,
}
# Fields with a single legal value so far: flipped past validation, because their digest matters from the day they get a
# second one.
SINGLE_VALUED = {"op": "retention", "direction": "backward", "family": "sm90"}

CANDIDATE = Candidate(
    family="sm80",
    dtype="fp16",
    class_qk=128,
    class_v=128,
    block_m=128,
    block_n=64,
    warps_m=4,
    num_stages=2,
    k_slice=128,
)


def _flip(instance: Any, name: str, value: Any) -> Any:
    copy = dataclasses.replace(instance)
    object.__setattr__(copy, name, value)
    return copy


@pytest.mark.parametrize(
    ("instance", "flips"),
    [(Problem(), PROBLEM_FLIPS), (CANDIDATE, CANDIDATE_FLIPS)],
    ids=["problem", "candidate"],
)
def test_every_field_takes_part(instance: Any, flips: dict[str, Any]) -> None:
    flipped = [instance]
    for field in dataclasses.fields(instance):
        value = {**SINGLE_VALUED, **flips}[field.name]
        assert value != getattr(instance, field.name)
        flipped.append(_flip(instance, field.name, value))
    digests = [digest(item) for item in flipped]
    assert len(set(digests)) == len(digests)


def test_candidate_names_are_as_distinct_as_candidates() -> None:
    flips = {**SINGLE_VALUED, **CANDIDATE_FLIPS}
    fields = dataclasses.fields(CANDIDATE)
    names = {_flip(CANDIDATE, field.name, flips[field.name]).name for field in fields}
    assert len(names | {CANDIDATE.name}) == len(fields) + 1


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
