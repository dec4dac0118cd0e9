from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from attention_autotuner.core.candidate import Candidate
from attention_autotuner.kernels.configs import candidate_from_config
from attention_autotuner.kernels.scores_backward_sm80.knobs import (
    BackwardKnobs,
    KeyPass,
    RowPass,
)
from attention_autotuner.kernels.scores_backward_sm80.knobs import knobs_of as backward_knobs_of
from attention_autotuner.kernels.scores_forward_sm80.knobs import ForwardKnobs
from attention_autotuner.kernels.scores_forward_sm80.knobs import knobs_of as forward_knobs_of

CANDIDATE = Candidate(
    dtype="bf16",
    padded_dim_qk=192,
    padded_dim_v=512,
    knobs=ForwardKnobs(
        block_m=128,
        block_n=64,
        warps_m=4,
        warps_n=2,
        num_stages=2,
        k_slice=64,
        v_slices=4,
        persistent=True,
        cta_order="longest_first",
    ),
)


ROWS = RowPass(block_rows=128, block_columns=64, warps=8, num_stages=1)
KEYS = KeyPass(block_m=64, block_n=128, warp_pairs=4, num_stages=2)
FUSED = Candidate(
    direction="backward",
    dtype="fp16",
    padded_dim_qk=256,
    padded_dim_v=512,
    knobs=BackwardKnobs(plan="one_pass", keys=KEYS),
)
PAIR = replace(FUSED, knobs=BackwardKnobs(plan="two_kernels", keys=KEYS, dq=ROWS))
SPLIT = replace(
    FUSED, knobs=BackwardKnobs(plan="three_kernels", dq=ROWS, dk=ROWS, dv=replace(ROWS, slices=4))
)
ALL = [CANDIDATE, FUSED, PAIR, SPLIT]


@pytest.mark.parametrize("candidate", ALL)
def test_config_survives_json(candidate: Candidate) -> None:
    config = json.loads(json.dumps(candidate.config))
    assert candidate_from_config(config) == candidate


def test_config_with_unknown_or_missing_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="block_q"):
        candidate_from_config({**CANDIDATE.config, "block_q": 1})
    with pytest.raises(TypeError, match="knobs"):
        candidate_from_config({k: v for k, v in CANDIDATE.config.items() if k != "knobs"})
    knobs = CANDIDATE.config["knobs"]
    with pytest.raises(TypeError, match="block_q"):
        candidate_from_config(CANDIDATE.config | {"knobs": knobs | {"block_q": 1}})
    del knobs["block_m"]
    with pytest.raises(TypeError, match="block_m"):
        candidate_from_config(CANDIDATE.config | {"knobs": knobs})
    with pytest.raises(TypeError, match="no knobs are known for conv forward"):
        candidate_from_config(CANDIDATE.config | {"op": "conv"})


def test_knobs_are_those_of_the_direction() -> None:
    assert CANDIDATE.knobs.block_n == 64
    assert PAIR.knobs.keys == KEYS
    with pytest.raises(TypeError, match="has no BackwardKnobs"):
        backward_knobs_of(CANDIDATE)
    with pytest.raises(TypeError, match="has no ForwardKnobs"):
        forward_knobs_of(PAIR)
    with pytest.raises(
        TypeError,
        match="scores_forward_sm80 does not compute attention backward with softmax scores, got ForwardKnobs",
    ):
        replace(PAIR, knobs=CANDIDATE.knobs)


@pytest.mark.parametrize(
    ("plan", "passes"),
    [
        ("one_pass", {}),
        ("one_pass", {"keys": KEYS, "dq": ROWS}),
        ("two_kernels", {"keys": KEYS}),
        ("three_kernels", {"dq": ROWS, "dk": ROWS}),
        ("other", {"keys": KEYS}),
    ],
)
def test_a_plan_takes_its_own_passes(plan: Any, passes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=plan):
        BackwardKnobs(plan=plan, **passes)


def test_passes_run_in_a_fixed_order() -> None:
    assert list(PAIR.knobs.passes) == ["keys", "dq"]
    assert list(SPLIT.knobs.passes) == ["dq", "dk", "dv"]


def test_only_atomic_sums_are_not_deterministic() -> None:
    assert [selected.deterministic for selected in ALL] == [True, False, True, True]


def test_num_threads() -> None:
    assert CANDIDATE.knobs.num_threads == 256
    assert KEYS.num_threads == 256
    assert replace(ROWS, column_warps=2).num_threads == 512
    assert replace(PAIR.knobs, dq=replace(ROWS, warps=16)).num_threads == 512


@pytest.mark.parametrize("candidate", ALL)
def test_names_are_identifiers_that_fit_a_file_system(candidate: Candidate) -> None:
    assert re.fullmatch(r"[A-Za-z_]\w*", candidate.name)
    assert len(candidate.name) < 180


def test_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        CANDIDATE.knobs.block_m = 64
    assert {CANDIDATE: 1}[replace(CANDIDATE)] == 1
