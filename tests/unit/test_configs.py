from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from attention_autotuner.arch import A100, H100
from attention_autotuner.core.problem import Problem
from attention_autotuner.kernels import configs
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.registry import KERNELS
from attention_autotuner.tuning.environment import Environment
from attention_autotuner.tuning.record_schema import TuningRecord, space_digest
from tests.candidates import KEYS, ROWS, backward
from tests.old_configs import OLD_WORDS, before_kernels_had_names, in_old_words
from tests.record_entries import entry

ATTENTION, RETNET = Problem(), Problem(op="retnet", mask="explicit")
RETENTION = Problem(op="retention", causal=True)
SM90_ATTENTION = H100().default(ATTENTION)
SM90_GRADIENT = H100().default(replace(ATTENTION, direction="backward"))
SM90_RETENTION_BACKWARD = H100().default(replace(RETENTION, direction="backward"))
DEFAULTS = {
    ("scores_forward_sm80", "scores"): A100().default(ATTENTION),
    ("scores_forward_sm80", "parallel"): A100().default(replace(RETENTION, form="parallel")),
    ("attention_forward_sm90", ""): SM90_ATTENTION,
    ("attention_backward_sm90", ""): SM90_GRADIENT,
    ("scores_backward_sm80", ""): A100().default(replace(ATTENTION, direction="backward")),
    ("scores_backward_sm90", ""): H100().default(replace(RETNET, direction="backward")),
    ("chunks_sm80", "forward"): A100().default(replace(RETENTION, form="chunkwise")),
    ("chunks_sm80", "backward"): A100().default(replace(RETENTION, direction="backward")),
    ("chunks_backward_sm90", ""): SM90_RETENTION_BACKWARD,
    ("chunks_sm90", ""): H100().default(replace(RETENTION, form="chunkwise")),
    ("recurrent_sm80", ""): A100().default(replace(RETENTION, form="recurrent")),
}
ALWAYS_NAMED = {  # kernels that came after names
    "attention_forward_sm90",
    "attention_backward_sm90",
    "chunks_backward_sm90",
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_config_names_its_kernel_and_comes_back(key: tuple[str, str]) -> None:
    candidate = DEFAULTS[key]
    config = json.loads(json.dumps(candidate.config))
    assert config["kernel"] == key[0]
    assert next(iter(config)) == "kernel"
    assert candidate.kernel == key[0]
    assert KERNELS[key[0]].family == candidate.family
    assert candidate_from_config(config) == candidate
    if key[0] not in ALWAYS_NAMED:
        assert candidate_from_config(before_kernels_had_names(config)) == candidate


def test_renamed_fields_and_values_are_read_as_the_present_ones() -> None:
    dq = replace(DEFAULTS["scores_backward_sm90", ""].knobs.dq, ping_pong=True)
    sm90 = DEFAULTS["scores_backward_sm90", ""]
    chunks = DEFAULTS["chunks_sm80", "forward"]
    precomputed = replace(chunks.knobs.output, scores="precomputed")
    candidates = [
        *(candidate for key, candidate in DEFAULTS.items() if key[0] not in ALWAYS_NAMED),
        *map(backward, ("one_pass", "two_kernels", "three_kernels")),
        backward("two_kernels", keys=replace(KEYS, query_subtiles=2), dq=ROWS),
        backward("one_pass", cta_order="longest_first"),
        replace(sm90, knobs=replace(sm90.knobs, dq=dq, cta_order="longest_first")),
        replace(chunks, knobs=replace(chunks.knobs, output=precomputed)),
    ]
    written = [json.dumps(in_old_words(candidate.config)) for candidate in candidates]
    for candidate, text in zip(candidates, written, strict=True):
        assert candidate_from_config(json.loads(text)) == candidate
    for new, old in OLD_WORDS.items():
        assert any(f'"{old}"' in text for text in written)
        assert not any(f'"{new}"' in text for text in written)


def test_every_kernel_is_tried_here() -> None:
    assert {kernel for kernel, _ in DEFAULTS} == set(KERNELS)


def test_a_kernel_nobody_knows_is_named() -> None:
    config = DEFAULTS["recurrent_sm80", ""].config
    with pytest.raises(TypeError, match="'recurrent_sm70'"):
        candidate_from_config(config | {"kernel": "recurrent_sm70"})
    with pytest.raises(TypeError, match="'recurrent_sm80' has no variant 'other'"):
        candidate_from_config(config | {"variant": "other"})


def test_old_fields_and_words_are_read_as_what_they_are_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names change at any depth, and the names of candidates with them."""
    candidate = DEFAULTS["scores_backward_sm80", ""]
    words = {"q_tile": "block_m", "single": "one_pass", "by_rows": "raster"}
    old = {new: before for before, new in words.items()}
    problem = replace(ATTENTION, direction="backward")
    record = TuningRecord(
        problem=problem.bucketed(), measured_problem=problem, purpose="backward", arch="A100",
        space_digest=space_digest([candidate]), pick=candidate.name, default=candidate.name,
        confirmed=True, entries=(entry(candidate, 1.0),), environment=Environment(),
    )  # fmt: skip
    document: dict[str, Any] = configs.reworded(record.to_json(), old)
    (written,) = document["entries"]
    assert "q_tile" in written["candidate"]["knobs"]["keys"]
    document["pick"] = document["default"] = written["name"] = "as it was called then"
    with pytest.raises(TypeError):
        candidate_from_config(written["candidate"])
    monkeypatch.setattr(KERNELS["chunks_sm80"], "renamed", words)
    with pytest.raises(TypeError):
        candidate_from_config(written["candidate"])
    monkeypatch.setattr(KERNELS["scores_backward_sm80"], "renamed", words)
    assert TuningRecord.from_json(document) == record
