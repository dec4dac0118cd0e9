"""What a record is found by: attention's records as they always were, retention's by their mask and form too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attention_autotuner.arch import resolve
from attention_autotuner.core.outcome import Ok
from attention_autotuner.core.problem import Problem
from attention_autotuner.tuning.lookup import distance
from attention_autotuner.tuning.record_schema import CandidateEntry, space_schema
from attention_autotuner.tuning.records import RecordStore
from attention_autotuner.tuning.step import problems_of_step

RETNET = Problem(op="retnet", mask="explicit", causal=True)
RETENTION = Problem(op="retention", causal=True)


def test_the_schema_of_attention_is_that_of_the_records_that_were_shipped() -> None:
    assert space_schema("attention", "forward") == "a14b375783847447"
    assert space_schema("attention", "backward") == "626a7d1c293939b3"


def test_schemas_of_operations_differ() -> None:
    keys = [
        (op, way) for op in ("attention", "retnet", "retention") for way in ("forward", "backward")
    ]
    assert len({space_schema(op, way) for op, way in keys}) == len(keys)  # type: ignore[arg-type]


def test_an_entry_from_before_masks_is_attentions() -> None:
    candidate = resolve("A100").default(Problem())
    said = CandidateEntry(candidate=candidate, kernel_digest="", outcome=Ok()).to_json()
    del said["candidate"]["mask"]
    assert CandidateEntry.from_json(said).candidate == candidate


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RETNET, replace(RETNET, mask="decay")),
        (RETENTION, replace(RETENTION, form="chunkwise")),
        (replace(RETENTION, form="recurrent"), replace(RETENTION, form="chunkwise")),
    ],
)
def test_masks_and_forms_have_records_of_their_own(first: Problem, second: Problem) -> None:
    store = RecordStore(Path("/records"))
    assert store.path(first, "H100", "gpu") != store.path(second, "H100", "gpu")
    assert distance(first, second) is None
    assert distance(first, first) == 0.0


def test_a_step_of_a_form_has_a_backward_without_one() -> None:
    forward, backward = problems_of_step(replace(RETENTION, form="parallel"))
    assert (forward.form, backward.form) == ("parallel", "auto")
