from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace

import pytest

from attention_autotuner.codegen.candidate import Candidate

CANDIDATE = Candidate(
    family="sm80",
    dtype="bf16",
    class_qk=192,
    class_v=512,
    block_m=128,
    block_n=64,
    warps_m=4,
    warps_n=2,
    num_stages=2,
    k_slice=64,
    v_slices=4,
    persistent=True,
    cta_order="heads_first",
)


def test_config_survives_json() -> None:
    config = json.loads(json.dumps(CANDIDATE.config))
    assert Candidate.from_config(config) == CANDIDATE


def test_config_with_unknown_or_missing_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="block_q"):
        Candidate.from_config({**CANDIDATE.config, "block_q": 1})
    with pytest.raises(TypeError, match="block_m"):
        Candidate.from_config({k: v for k, v in CANDIDATE.config.items() if k != "block_m"})


def test_num_threads() -> None:
    assert CANDIDATE.num_threads == 256


def test_names_are_identifiers_that_fit_a_file_system() -> None:
    assert re.fullmatch(r"[A-Za-z_]\w*", CANDIDATE.name)
    assert len(CANDIDATE.name) < 180


def test_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        CANDIDATE.block_m = 64  # type: ignore[misc]
    assert {CANDIDATE: 1}[replace(CANDIDATE)] == 1
